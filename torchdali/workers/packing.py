"""What worker processes do with samples: the images into one block of memory, the rest collated.

Everything here runs where the dataset is asked for samples, in a worker or in the process itself. It draws no random
number and knows no CUDA.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info
from torchvision import tv_tensors

from torchdali.errors import TransformError
from torchdali.runtime.exceptions import add_note
from torchdali.samples.finder import ImageFinder
from torchdali.samples.image import ImageInput, RefusedError, StoredURL, UnreadableError, black, to_image_input
from torchdali.samples.on_error import SIZE, OnError, find_substitutes
from torchdali.samples.pil import PILHeader
from torchdali.samples.tree import (
    Tree,
    build_tree,
    collate,
    describe_sample,
    format_key_paths,
    tree_leaves,
    tree_map,
    with_placeholders,
)
from torchdali.sources import Header
from torchdali.transforms.spec import First, InputKind, IntArray, Spec
from torchdali.workers.pickling import pickle_batch
from torchdali.workers.shared_memory import SharedBuffer, SharedBufferHandle, SharedBufferPool, aligned

__all__ = [
    "Packed",
    "PackedImages",
    "Packer",
    "SampleFailure",
    "map_substitutes",
    "refuse_annotations",
]

_NONE_LEFT = "and no other sample of its batch can take its place"


class SampleFailure(NamedTuple):
    """In the place of a sample: what the dataset raised.

    Attributes:
        named: What raised it.
        reason: What it raised.
    """

    named: str
    reason: str


@dataclass
class PackedImages:
    """Images of one kind, of one batch.

    Attributes:
        spec: What they are.
        input_kind: How they are fed.
        sample: ``(N,)`` which sample of the batch each belongs to.
        slot: ``(N,)`` which of its sample's images each is; images come slot by slot.
        size: ``(N, 2)`` heights and widths.
        start: ``(N,)`` where each begins in the block; without a block, nothing.
        length: ``(N,)`` bytes of each.
        headers: Of the files, where paths are packed.
        pil: What PIL images have besides pixels, if transforms or ``collate_fn`` get PIL images.
        arrays: Where there is no block, the images themselves.
    """

    spec: Spec
    input_kind: InputKind
    sample: IntArray
    slot: IntArray
    size: IntArray
    start: IntArray
    length: IntArray
    headers: list[Header]
    pil: list[PILHeader | None] = field(default_factory=list["PILHeader | None"])
    arrays: list[npt.NDArray[Any]] = field(default_factory=list[npt.NDArray[Any]])


@dataclass
class Packed:
    """A batch as a worker sends it.

    Attributes:
        data: The collated samples, or the list of them, with slots where images were.
        count: Number of samples.
        key_paths: Where the images of the samples are, where all have them in the same places.
        groups: The images, by kind.
        block: The memory that they are in; None where there was no worker.
        worker: Whose batch it is.
        reasons: What is wrong with an image, by sample; with the file's name.
        failed: The same of samples in whose places there is something else.
        structure: The key paths of the first sample's parts, where all samples are of one structure.
        outline: What the first sample is made of, where no image was found.
        task: Number that the batch was asked for under.
        state: What a stream said of itself after the batch.
    """

    data: Any
    count: int
    key_paths: tuple[str, ...] = ()
    groups: list[PackedImages] = field(default_factory=list[PackedImages])
    block: SharedBufferHandle | SharedBuffer | None = None
    worker: int = 0
    reasons: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    failed: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    structure: tuple[str, ...] = ()
    outline: str = ""
    task: int = 0
    state: dict[str, Any] = field(default_factory=dict[str, Any])

    def pin_memory(self) -> Packed:
        """Called by DataLoader, in a thread of its own where there are workers."""
        self.data = tree_map(self.data, _pin, is_leaf=_can_be_pinned)
        return self


def _can_be_pinned(node: Any) -> bool:
    return callable(getattr(cast("object", node), "pin_memory", None))


def _pin(leaf: Any) -> Any:
    """What DataLoader does to a leaf; but a tensor that is on a device stays there, as the user may not have asked."""
    if isinstance(leaf, torch.Tensor) and (leaf.device.type != "cpu" or leaf.layout != torch.strided):
        return leaf
    return leaf.pin_memory() if _can_be_pinned(leaf) else leaf


class Packer:
    """What workers have in the place of the loader's ``collate_fn``.

    Args:
        collate_fn: The loader's.
        batched: Whether samples come in lists.
        uses_default_collate: Whether ``collate_fn`` is one of DataLoader's own, which need no image to do their work.
        images: Whether images are taken out; else ``collate_fn`` does all there is to do.
        first: What the transforms begin with.
        on_error: What is done about samples that cannot be read or decoded.
        finder: Finds the images of a sample. By default, goes by what they look like.
        keeps_pil: Whether what PIL images have besides pixels is packed.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        batched: bool,
        uses_default_collate: bool,
        images: bool,
        first: First = "conversion",
        on_error: OnError = "raise",
        finder: ImageFinder | None = None,
        keeps_pil: bool = False,
    ) -> None:
        self._collate, self._batched, self._images = collate_fn, batched, images
        self._uses_default_collate = uses_default_collate
        self._first: First = first
        self._on_error = on_error
        self._finder = finder or ImageFinder()
        self._keeps_pil = keeps_pil
        self._process = os.getpid()
        self._pool: SharedBufferPool | None = None

    @property
    def worker(self) -> Any:
        """What torch says of the worker that this runs in; None in the process of the loader."""
        # A dataset in a worker may have a loader without workers: that worker is none of this loader's.
        return get_worker_info() if self._process != os.getpid() else None

    def __call__(self, data: Any) -> Packed:
        """Packs a list of samples, or one sample."""
        info = self.worker
        samples: list[Any] = [data]
        whole = False
        if self._batched and isinstance(data, Sequence):
            samples = list(cast("Sequence[Any]", data))
        elif self._batched and self._images and _is_iterable_batch(data):  # a dataset's __getitems__ may give anything
            data = samples = list(cast("Iterable[Any]", data))
        elif self._batched:
            samples, whole = [], True
        packed = Packed(None, 1 if whole else len(samples), worker=info.id if info else 0)
        packed.outline = describe_sample(build_tree(data)) if whole and self._images else ""
        failed = {i: (one.named, one.reason) for i, one in enumerate(samples) if isinstance(one, SampleFailure)}
        while True:
            if failed and not self._substitute(packed, samples, failed):
                return packed
            failed = self._fill(packed, samples if failed else data, samples, info is not None)
            if not failed:
                return packed

    def _substitute(self, packed: Packed, samples: list[Any], failed: dict[int, tuple[str, str]]) -> bool:
        """Puts the next good sample in the place of each one that failed; False where there is none."""
        # One that was given up before has another in its place, which is at fault now.
        packed.failed |= {i: why for i, why in failed.items() if i not in packed.failed}
        others = map_substitutes(packed.failed, len(samples))
        if others is None:
            first = min(failed)
            named, reason = failed[first]
            packed.failed, packed.reasons = {}, {first: (named, f"{reason}, {_NONE_LEFT}")}
            return False
        for i, other in others.items():
            samples[i] = samples[other]
        return True

    def _fill(self, packed: Packed, data: Any, samples: list[Any], in_worker: bool) -> dict[int, tuple[str, str]]:
        """Packs what there is; returns which samples others have to take the place of."""
        trees = [build_tree(sample) for sample in samples] if self._images else []
        for one in trees:
            refuse_annotations(one)
        image_lists = [self._finder.find(one) for one in trees]
        if trees and self._uses_default_collate:
            packed.structure = tuple(path for path, _ in tree_leaves(trees[0]))
        if not any(image_lists):
            packed.outline = describe_sample(trees[0]) if trees else packed.outline
            try:
                packed.data = self._collate(data)
            except Exception as error:
                if packed.outline:
                    add_note(error, f"no image for transform= was found in a sample, which is {packed.outline}")
                raise
            packed.data = pickle_batch(packed.data) if in_worker else packed.data
            return {}
        if self._uses_default_collate or self._on_error != "raise":
            key_paths, wrong, without = _find_common_key_paths(trees, image_lists)
            if self._on_error == "skip" and without:
                return without
            if self._on_error == "replace" and without:
                wrong = {}
                for i in without:
                    image_lists[i] = [(key_path, None) for key_path in key_paths]
            if self._uses_default_collate:
                packed.key_paths, packed.reasons = key_paths, wrong
        if packed.reasons:
            return {}
        images, unreadable = self._convert(packed, image_lists)
        if unreadable or packed.reasons:
            return unreadable
        slotted = [with_placeholders(one, images) for one, images in zip(trees, image_lists, strict=True)]
        if not self._uses_default_collate:
            packed.data = slotted
        else:
            try:
                packed.data = collate(slotted) if self._batched else self._collate(slotted[0])
            except Exception as error:
                taken = format_key_paths([key_path for key_path, _ in image_lists[0]])
                add_note(error, f"transform= took as image {taken} of a sample, which is {describe_sample(trees[0])}")
                raise
        if in_worker:  # samples hold many tensors, more than there are file descriptors
            packed.data = pickle_batch(packed.data, tensors_by_value=not self._uses_default_collate)
        self._pack(packed, images, in_worker)  # last: a block of a batch that fails afterwards would never be free
        return {}

    def _convert(
        self, packed: Packed, image_lists: Sequence[Sequence[tuple[str, Any]]]
    ) -> tuple[list[tuple[int, int, ImageInput]], dict[int, tuple[str, str]]]:
        """Each image with its sample and slot, slot by slot; and which samples others have to take the place of."""
        images: list[tuple[int, int, ImageInput]] = []
        unreadable: dict[tuple[int, int], tuple[str, str]] = {}
        of_unknown_size: set[tuple[int, int]] = set()
        for slot in range(max(map(len, image_lists))):
            for sample, sample_images in enumerate(image_lists):
                if slot >= len(sample_images):
                    continue
                key_path, leaf = sample_images[slot]
                try:
                    images.append((sample, slot, to_image_input(leaf, self._first)))
                except RefusedError as error:
                    named = str(leaf) if isinstance(leaf, (PurePath, StoredURL)) else key_path or "the sample itself"
                    if self._on_error != "raise" and isinstance(error, UnreadableError):
                        unreadable[sample, slot] = named, str(error)
                        images.append((sample, slot, black(error.size or SIZE)))
                        if not error.size:
                            of_unknown_size.add((sample, slot))
                    else:
                        packed.reasons.setdefault(sample, (named, str(error)))
        whole = {sample: why for (sample, _), why in reversed(unreadable.items())}
        if self._on_error == "skip":
            return images, whole
        packed.failed |= whole
        read = [(sample, slot, image) for sample, slot, image in images if (sample, slot) not in unreadable]
        return [_match_size(read, one) if one[:2] in of_unknown_size else one for one in images], {}

    def _pack(self, packed: Packed, images: Sequence[tuple[int, int, ImageInput]], in_worker: bool) -> None:
        groups: dict[tuple[Spec, InputKind], list[tuple[int, int, ImageInput]]] = {}
        for sample, slot, image in images:
            groups.setdefault(image.key, []).append((sample, slot, image))
        at = 0
        for (spec, input_kind), members in groups.items():
            group, at = _lay_out(spec, input_kind, members, at)
            group.pil = [image.pil for _, _, image in members] if self._keeps_pil else []
            packed.groups.append(group)
        every = [[image.data for _, _, image in members] for members in groups.values()]
        if not in_worker:
            for group, arrays in zip(packed.groups, every, strict=True):
                group.arrays = [np.ascontiguousarray(array) for array in arrays]
            return
        self._pool = self._pool or SharedBufferPool()
        memory, packed.block = self._pool.take(at)
        for group, arrays in zip(packed.groups, every, strict=True):
            for start, length, array in zip(group.start.tolist(), group.length.tolist(), arrays, strict=True):
                np.copyto(memory[start : start + length].view(array.dtype).reshape(array.shape), array)


def map_substitutes(failed: Collection[int], count: int) -> dict[int, int] | None:
    """Return for each failed sample of a batch the next one that did not fail; None if all did."""
    substitutes = find_substitutes(np.isin(np.arange(count), list(failed)))
    return None if substitutes is None else {i: int(substitutes[i]) for i in failed}


def _match_size(
    images: Sequence[tuple[int, int, ImageInput]], image: tuple[int, int, ImageInput]
) -> tuple[int, int, ImageInput]:
    """A black image as large as the next one of its slot among ``images``."""
    sample, slot, _ = image
    sizes = {i: one.size for i, at, one in images if at == slot}
    after = [i for i in sizes if i > sample] or list(sizes)
    return sample, slot, black(sizes[after[0]] if after else SIZE)


def _lay_out(
    spec: Spec, input_kind: InputKind, members: Sequence[tuple[int, int, ImageInput]], at: int
) -> tuple[PackedImages, int]:
    """Where images go: side by side, so that they are one array where all are equal in shape."""
    length = np.array([image.data.nbytes for _, _, image in members], np.int64)
    start = at + np.concatenate(([0], np.cumsum(length)[:-1]))
    group = PackedImages(
        spec,
        input_kind,
        np.array([sample for sample, _, _ in members], np.int64),
        np.array([slot for _, slot, _ in members], np.int64),
        np.array([image.size for _, _, image in members], np.int64),
        start,
        length,
        [image.header for _, _, image in members if image.header],
    )
    return group, aligned(at + int(length.sum()))


def _find_common_key_paths(
    samples: Sequence[Tree], image_lists: Sequence[Sequence[tuple[str, Any]]]
) -> tuple[tuple[str, ...], dict[int, tuple[str, str]], dict[int, tuple[str, str]]]:
    """Where most samples have their images, what is wrong with the first that has not, and which ones have none."""
    each = [tuple(path for path, _ in images) for images in image_lists]
    ((most, _),) = Counter(filter(None, each)).most_common(1)
    wrong: dict[int, tuple[str, str]] = {}
    for number, key_paths in enumerate(each):
        if key_paths != most:
            has = f"its images are at {format_key_paths(key_paths)}" if key_paths else "no image was found in it"
            usual = format_key_paths(most)
            reason = (
                f"{has}, in other samples of the batch they are at {usual}; it is {describe_sample(samples[number])}"
            )
            wrong[number] = (usual, reason)
    elsewhere = any(each[number] for number in wrong)
    return most, dict(list(wrong.items())[:1]), {} if elsewhere else wrong


def _is_iterable_batch(data: Any) -> bool:
    return isinstance(data, Iterable) and not isinstance(data, (Mapping, str, bytes))


def refuse_annotations(sample: Tree) -> None:
    """Raise TransformError if a sample has what torchvision's transforms change along with the image."""
    for path, leaf in tree_leaves(sample):
        if isinstance(leaf, tv_tensors.TVTensor) and not isinstance(leaf, tv_tensors.Image):
            raise TransformError(
                f"a sample has a {type(leaf).__name__} at {path or 'its top'}, which torchvision's transforms change "
                "along with the image, and transform= does not: put the transform into the dataset, or what is to run "
                "on the GPU after it (conversion, normalization) alone into transform= and hand the annotation over "
                "as a plain tensor"
            )
