"""Pack a batch in a worker: the images into one block of shared memory, and the rest collated.

This code runs where the samples are loaded: in a worker, or in the main process without workers. It does not use CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, cast

import numpy as np
from torch.utils.data import get_worker_info

from torchdali.errors import SampleError
from torchdali.runtime.exceptions import add_note
from torchdali.samples.annotations import LabelsGetters, check_has_image
from torchdali.samples.finder import ImageFinder, find_common_key_paths, take_bad_files
from torchdali.samples.guard import call_collate
from torchdali.samples.image import ImageInput, RefusedError, StoredURL, UnreadableError, make_black, to_image_input
from torchdali.samples.on_error import SIZE, OnError, find_substitutes
from torchdali.samples.tree import (
    build_tree,
    collate,
    describe_sample,
    format_key_paths,
    tree_leaves,
    with_placeholders,
)
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import First, InputKind, Spec
from torchdali.workers.packed import Packed, lay_out_images
from torchdali.workers.packed_targets import pack_targets
from torchdali.workers.pickling import pickle_batch
from torchdali.workers.shared_memory import SharedBufferPool

__all__ = [
    "ErrorFactory",
    "Keyed",
    "Packer",
    "SampleFailure",
    "map_substitutes",
]

_NONE_LEFT = "and no other sample of its batch can take its place"

ErrorFactory = Callable[[int, str, str], SampleError]
"""Makes the error of a sample from its number in the batch, the name of the bad part, and the reason."""


class SampleFailure(NamedTuple):
    """A sample for which the dataset raised an exception.

    Attributes:
        name: The class of the dataset.
        reason: The exception, in words.
    """

    name: str
    reason: str


class Keyed(NamedTuple):
    """What belongs to a batch, for a worker that draws.

    Attributes:
        content: The indices that the sampler returned, then the samples that the dataset returned.
        draws: The random numbers of these samples.
    """

    content: Any
    draws: Draws


class Packer:
    """The ``collate_fn`` of workers.

    Args:
        collate_fn: The loader's ``collate_fn``.
        batched: Whether it gets a list of samples, and not one sample.
        has_default_collate: Whether ``collate_fn`` is one of DataLoader's own. Those work without the images.
        images: Whether to find and pack images. If not, only ``collate_fn`` is called.
        first: What the transforms begin with.
        on_error: What happens to samples that cannot be read or decoded.
        finder: Finds the images of a sample. By default it goes by their types and shapes.
        needs_pil_metadata: Whether to pack the attributes of PIL images besides their pixels.
        in_worker: Whether it runs in a worker. A loader without workers may itself be used in another loader's worker.
        adjust_orientation: As for :func:`to_image_input`.
        labels_getters: Those of the transforms.
        draw: Draws the parameters of a batch whose random numbers come with its samples.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        batched: bool,
        has_default_collate: bool,
        images: bool,
        first: First = "conversion",
        on_error: OnError = "raise",
        finder: ImageFinder | None = None,
        needs_pil_metadata: bool = False,
        in_worker: bool = False,
        adjust_orientation: bool = False,
        labels_getters: LabelsGetters = (),
        draw: Callable[[Packed, Draws], None] | None = None,
    ) -> None:
        self._collate, self._batched, self._images = collate_fn, batched, images
        self._has_default_collate = has_default_collate
        self._first: First = first
        self._on_error = on_error
        self._finder = finder or ImageFinder()
        self._needs_pil_metadata, self._in_worker, self._adjust_orientation = (
            needs_pil_metadata,
            in_worker,
            adjust_orientation,
        )
        self._labels_getters, self._draw = labels_getters, draw
        self._pool: SharedBufferPool | None = None

    @property
    def worker(self) -> Any:
        """torch's information on the worker that this runs in. None in the loader's process."""
        return get_worker_info() if self._in_worker else None

    def __call__(self, data: Any) -> Packed:
        """Pack a list of samples, or one sample. :class:`Keyed` ones have their random numbers with them."""
        info, draws = self.worker, None
        if isinstance(data, Keyed):
            data, draws = data
        samples: list[Any] = [data]
        is_opaque = False  # a batch that cannot be split into samples
        if self._batched and isinstance(data, Sequence):
            samples = list(cast("Sequence[Any]", data))
        elif self._batched and self._images and _is_iterable_batch(data):  # __getitems__ may return any type
            data = samples = list(cast("Iterable[Any]", data))
        elif self._batched:
            samples, is_opaque = [], True
        packed = Packed(None, 1 if is_opaque else len(samples), worker=info.id if info else 0)
        packed.outline = describe_sample(build_tree(data)) if is_opaque and self._images else ""
        failed = {i: (x.name, x.reason) for i, x in enumerate(samples) if isinstance(x, SampleFailure)}
        while True:
            if failed and not self._substitute(packed, samples, failed):
                return packed
            failed = self._fill(packed, samples if failed else data, samples, info is not None, draws)
            if not failed:
                return packed

    def _substitute(self, packed: Packed, samples: list[Any], failed: dict[int, tuple[str, str]]) -> bool:
        """Replace each failed sample by the next good one. Return False if there is none."""
        # If a substitute fails, keep the reason of the sample that it replaced.
        packed.replaced |= {i: why for i, why in failed.items() if i not in packed.replaced}
        substitutes = map_substitutes(packed.replaced, len(samples))
        if substitutes is None:
            first = min(failed)
            name, reason = failed[first]
            packed.replaced, packed.refused = {}, {first: (name, f"{reason}, {_NONE_LEFT}")}
            return False
        for i, substitute in substitutes.items():
            samples[i] = samples[substitute]
        return True

    def _fill(
        self, packed: Packed, data: Any, samples: list[Any], in_worker: bool, draws: Draws | None
    ) -> dict[int, tuple[str, str]]:
        """Pack the samples. Return the samples to substitute, with a name and a reason for each."""
        trees = [build_tree(sample) for sample in samples] if self._images else []
        image_lists = [self._finder.find(tree) for tree in trees]
        if trees and self._has_default_collate:
            packed.structure = tuple(path for path, _ in tree_leaves(trees[0]))
        if not any(image_lists):
            packed.outline = describe_sample(trees[0]) if trees else packed.outline
            for tree in trees:
                check_has_image(tree)
            try:
                packed.data = call_collate(self._collate, data)
            except Exception as error:
                if packed.outline:
                    add_note(error, f"no image for transform= was found in a sample, which is {packed.outline}")
                raise
            packed.data = pickle_batch(packed.data) if in_worker else packed.data
            return {}
        take_bad_files(trees, image_lists)
        if self._has_default_collate or self._on_error != "raise":
            key_paths, mismatch, imageless = find_common_key_paths(trees, image_lists)
            if self._on_error == "skip" and imageless:
                return imageless
            if self._on_error == "replace" and imageless:
                mismatch = {}
                for i in imageless:
                    image_lists[i] = [(key_path, None) for key_path in key_paths]
            if self._has_default_collate:
                packed.key_paths, packed.refused = key_paths, mismatch
        if packed.refused:
            return {}
        packed.targets, annotations, packed.refused = pack_targets(trees, image_lists, self._labels_getters)
        if packed.refused:
            return {}
        images, unreadable = self._convert(packed, image_lists)
        if unreadable or packed.refused:
            return unreadable
        parts = [[*leaves, *other.leaves] for leaves, other in zip(image_lists, annotations, strict=True)]
        stripped = [with_placeholders(tree, leaves) for tree, leaves in zip(trees, parts, strict=True)]
        if not self._has_default_collate or packed.targets is not None:
            packed.data = stripped
        else:
            try:
                packed.data = collate(stripped) if self._batched else self._collate(stripped[0])
            except Exception as error:
                paths = format_key_paths([key_path for key_path, _ in image_lists[0]])
                add_note(error, f"transform= took as image {paths} of a sample, which is {describe_sample(trees[0])}")
                raise
        if in_worker:  # torch sends each tensor by a file descriptor, and uncollated samples have too many tensors
            by_value = not self._has_default_collate or packed.targets is not None
            packed.data = pickle_batch(packed.data, tensors_by_value=by_value)
        # Last: the block of a batch that fails later would never become free.
        self._pack(packed, images, in_worker, draws)
        return {}

    def _convert(
        self, packed: Packed, image_lists: Sequence[Sequence[tuple[str, Any]]]
    ) -> tuple[list[tuple[int, int, ImageInput]], dict[int, tuple[str, str]]]:
        """Return each image with its sample and slot, slot by slot, and the samples to substitute."""
        images: list[tuple[int, int, ImageInput]] = []
        unreadable: dict[tuple[int, int], tuple[str, str]] = {}
        sizeless: set[tuple[int, int]] = set()
        for slot in range(max(map(len, image_lists))):
            for sample, sample_images in enumerate(image_lists):
                if slot >= len(sample_images):
                    continue
                key_path, leaf = sample_images[slot]
                try:
                    images.append((sample, slot, to_image_input(leaf, self._first, self._adjust_orientation)))
                except RefusedError as error:
                    name = _find_file(leaf) or key_path or "the sample itself"
                    if self._on_error != "raise" and isinstance(error, UnreadableError):
                        unreadable[sample, slot] = name, str(error)
                        size = error.size or (packed.targets.get_canvas(sample) if packed.targets else None)
                        images.append((sample, slot, make_black(size or SIZE)))
                        if not size:
                            sizeless.add((sample, slot))
                    else:
                        packed.refused.setdefault(sample, (name, str(error)))
        failed = {sample: why for (sample, _), why in reversed(unreadable.items())}  # the first image's reason stays
        if self._on_error == "skip":
            return images, failed
        packed.replaced |= failed
        readable = [item for item in images if item[:2] not in unreadable]
        return [_match_size(readable, item) if item[:2] in sizeless else item for item in images], {}

    def _pack(
        self, packed: Packed, images: Sequence[tuple[int, int, ImageInput]], in_worker: bool, draws: Draws | None
    ) -> None:
        groups: dict[tuple[Spec, InputKind], list[tuple[int, int, ImageInput]]] = {}
        for sample, slot, image in images:
            groups.setdefault(image.key, []).append((sample, slot, image))
        size = 0
        for (spec, input_kind), members in groups.items():
            group, size = lay_out_images(spec, input_kind, members, size)
            group.pil = [x.pil for _, _, x in members for _ in range(x.num_frames)] if self._needs_pil_metadata else []
            packed.groups.append(group)
        array_lists = [[image.data for _, _, image in members] for members in groups.values()]
        if not in_worker:
            for group, arrays in zip(packed.groups, array_lists, strict=True):
                group.arrays = [np.ascontiguousarray(array) for array in arrays]
                if group.spec.kind == "video":
                    group.arrays = [frame for video in group.arrays for frame in video]
            return
        if self._draw and draws:
            self._draw(packed, draws)
        self._pool = self._pool or SharedBufferPool()
        masks, size = packed.targets.detach_masks(size) if packed.targets else ([], size)
        packed.targets = cast("Any", packed.targets and pickle_batch(packed.targets, tensors_by_value=True))
        memory, packed.block = self._pool.take(size)
        for start, mask in masks:
            np.copyto(memory[start : start + mask.nbytes].view(mask.dtype).reshape(mask.shape), mask)
        for group, arrays in zip(packed.groups, array_lists, strict=True):
            for start, array in zip(group.start[group.firsts].tolist(), arrays, strict=True):
                np.copyto(memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)


def map_substitutes(failed: Collection[int], count: int) -> dict[int, int] | None:
    """Return the next good sample for each failed sample of a batch. Return None if all failed."""
    substitutes = find_substitutes(np.isin(np.arange(count), list(failed)))
    return None if substitutes is None else {i: int(substitutes[i]) for i in failed}


def _match_size(
    images: Sequence[tuple[int, int, ImageInput]], image: tuple[int, int, ImageInput]
) -> tuple[int, int, ImageInput]:
    """Return a black image, or video, of the size of the next one in the same slot."""
    sample, slot, _ = image
    others = {i: other for i, other_slot, other in images if other_slot == slot}
    candidates = [i for i in others if i > sample] or list(others)
    if not candidates:
        return sample, slot, make_black(SIZE)
    other = others[candidates[0]]
    if other.key[0].kind == "video":
        return sample, slot, other._replace(data=np.zeros_like(other.data))
    return sample, slot, make_black(other.size)


def _is_iterable_batch(data: Any) -> bool:
    return isinstance(data, Iterable) and not isinstance(data, (Mapping, str, bytes))


def _find_file(image: Any) -> str:
    """Return the file of an image that is a path, an object's address, or opened by PIL; else an empty string."""
    if isinstance(image, (PurePath, StoredURL)):
        return str(image)
    file = getattr(image, "filename", "")  # PIL's, which opens files and decodes them later
    return file if isinstance(file, str) else ""
