"""The boxes, masks and key points of a packed batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms.v2 import functional as F

from torchdali.errors import TransformError
from torchdali.samples.annotations import Annotations, LabelsGetters, check_has_image, find_annotations
from torchdali.samples.bundle import Bundle, is_plain
from torchdali.samples.transfer import Move
from torchdali.samples.tree import Tree, describe_sample
from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets import Targets
from torchdali.transforms.targets.stored import EMPTY, BitMasks, EncodedMask, StoredMasks
from torchdali.workers.pickling import Sealed
from torchdali.workers.shared_memory import align

__all__ = ["PackedTargets", "pack_targets"]


def _get_canvas(leaf: Any) -> tuple[int, int]:
    """Return height and width of the image that an annotation is for."""
    if isinstance(leaf, StoredMasks):
        return leaf.canvas
    height, width = F.get_size(leaf)
    return height, width


@dataclass
class Unmoved:
    """The annotations of a batch as the dataset returned them.

    Attributes:
        targets: Boxes, masks and key points of all samples, and the sizes of their images.
        labels: For each sample, the tensors that lose the rows of dropped boxes or key points.
        owners: For each of the labels, the number in its sample of the boxes or key points that it belongs to.
    """

    targets: Targets
    labels: list[list[torch.Tensor]]
    owners: list[list[int]]

    def select_labels(self, moved: Targets, samples: IntArray) -> list[list[torch.Tensor]]:
        """Return the labels of each sample, without those of dropped boxes or key points.

        Args:
            moved: What ``targets.take()`` returned, after all moves.
            samples: ``(M,)`` numbers of the samples.
        """
        if not any(self.labels):
            return [[] for _ in samples]
        rows: Iterable[tuple[int, list[IntArray]]] = zip(samples.tolist(), moved.find_kept(), strict=True)
        return [
            [
                label if len(label) == len(indices[owner]) else label.index_select(0, torch.from_numpy(indices[owner]))
                for label, owner in zip(self.labels[sample], self.owners[sample], strict=True)
            ]
            for sample, indices in rows
        ]


class Moved(NamedTuple):
    """The annotations of a batch after all moves, which a worker made.

    Attributes:
        targets: Boxes, masks and key points. Masks are not moved yet.
        tensors: The values of the boxes and key points, then those of the labels. None if there are masks, or labels
            that are no plain tensors.
        num_labels: The number of labels of each sample.
    """

    targets: Targets
    tensors: Bundle | None = None
    num_labels: Sequence[int] = ()


@dataclass
class PackedTargets:
    """The annotations of a batch, as flat arrays.

    Attributes:
        unmoved: The annotations before all moves. If ``moved`` is used, they stay sealed.
        canvas: ``(N, 2)`` heights and widths of the images that they are for.
        exist: ``(N,)`` which samples have any.
        kinds: Types of these, from torchvision.
        outline: The annotations of one sample, in words.
        first: ``(N,)`` number of each sample's first placeholder.
        moved: The annotations after all moves, if the worker has drawn them.
        detached: Sample, place, offset, dtype and shape of the data of each mask that lies in shared memory.
    """

    unmoved: Sealed[Unmoved]
    canvas: IntArray
    exist: npt.NDArray[np.bool_]
    kinds: frozenset[type]
    outline: str
    first: IntArray
    moved: Moved | None = None
    detached: list[tuple[int, int, int, np.dtype[Any], tuple[int, ...]]] = field(
        default_factory=list["tuple[int, int, int, np.dtype[Any], tuple[int, ...]]"]
    )

    @property
    def targets(self) -> Targets:
        """Boxes, masks and key points before all moves."""
        return self.unmoved.open().targets

    def get_canvas(self, sample: int) -> tuple[int, int] | None:
        """Return height and width of the image that the annotations of a sample are for; None if it has none."""
        height, width = self.canvas[sample].tolist()
        return (height, width) if self.exist[sample] else None

    def keep_moved(self, targets: Targets) -> None:
        """Keep boxes, masks and key points after all moves, and with them the labels that are left.

        Args:
            targets: What ``targets.take()`` returned for all samples in order, after all moves.
        """
        unmoved = self.unmoved.open()
        if targets.pixels or not all(map(is_plain, itertools.chain(*unmoved.labels))):
            self.moved = Moved(targets)
            return
        labels = unmoved.select_labels(targets, np.arange(len(self.canvas)))
        tensors = Bundle.pack([*targets.to_tensors(), *itertools.chain(*labels)])
        self.moved = Moved(targets.without_values(), tensors, [len(row) for row in labels])

    @property
    def mask_bytes(self) -> int:
        """Bytes of all masks while the batch is in flight."""
        targets = self.moved.targets if self.moved else self.targets
        if targets.pixels is None:
            return 0
        size = sum(math.prod(shape) * dtype.itemsize for *_, dtype, shape in self.detached)
        for place in itertools.chain(*(targets.places or [])):
            if isinstance(place, StoredMasks):
                size += place.data.nbytes + place.decoded_bytes
            elif not isinstance(place, tuple):
                size += place.nbytes
        return size

    def detach_masks(self, offset: int) -> tuple[list[tuple[int, npt.NDArray[Any]]], int]:
        """Take out the masks, to write them into shared memory. :meth:`attach_masks` puts them back.

        Args:
            offset: Offset of the first mask in the memory, in bytes.

        Returns:
            The offset and the values of each mask, and the offset after the last one.
        """
        masks: list[tuple[int, npt.NDArray[Any]]] = []
        for sample, places in enumerate(self.targets.places or []):
            for i, place in enumerate(places):
                if isinstance(place, tuple):
                    continue
                stored = place if isinstance(place, StoredMasks) else BitMasks.pack(place)
                if stored:
                    places[i], data = stored.with_data(EMPTY), stored.data
                else:
                    assert isinstance(place, torch.Tensor)
                    places[i], data = (0, 0), place.as_subclass(torch.Tensor).resolve_neg().numpy()
                masks.append((offset, data))
                self.detached.append((sample, i, offset, data.dtype, data.shape))
                offset = align(offset + data.nbytes)
        return masks, offset

    def attach_masks(self, targets: Targets, memory: npt.NDArray[np.uint8]) -> None:
        """Put masks that lie in shared memory into ``targets``, moved or not. They are views of the memory.

        A second call does nothing: DALI may have decoded the masks that are there.
        """
        for sample, i, start, dtype, shape in self.detached:
            assert targets.places is not None
            places = targets.places[sample]
            place = places[i]
            if isinstance(place, StoredMasks) and len(place.data):
                continue
            data: Any = np.ndarray(shape, dtype, memory, start)
            if isinstance(place, EncodedMask):  # DALI may read it after the batch was given up, and with it the memory
                data = data.copy()
            places[i] = place.with_data(data) if isinstance(place, StoredMasks) else torch.from_numpy(data)

    def find_mismatch(self, samples: IntArray, size: IntArray) -> tuple[int, str] | None:
        """Return the first row whose annotations are for an image of another size, and what to say of it.

        Args:
            samples: ``(M,)`` numbers of the samples.
            size: ``(M, 2)`` heights and widths of their images.
        """
        canvas = self.canvas[samples]
        rows: list[int] = np.flatnonzero((canvas != size).any(1) & self.exist[samples]).tolist()
        if not rows:
            return None
        return rows[0], _describe_mismatch(tuple(size[rows[0]].tolist()), tuple(canvas[rows[0]].tolist()))

    def unpack(self, moved: Targets, samples: IntArray, move: Move) -> dict[tuple[int, int], Any]:
        """Return annotations after all moves, by the row in ``samples`` and the number of the placeholder.

        Args:
            moved: What ``targets.take()`` returned, after all moves.
            samples: ``(M,)`` numbers of the samples.
            move: Copies tensors to the device of the images.
        """
        if self.moved and self.moved.tensors and moved is self.moved.targets:
            on_device, num_labels = move(self.moved.tensors), self.moved.num_labels
        else:
            labels = self.unmoved.open().select_labels(moved, samples)
            on_device, num_labels = move([*moved.to_tensors(), *itertools.chain(*labels)]), list(map(len, labels))
        others = iter(on_device[len(on_device) - sum(num_labels) :])
        leaves = moved.leaves(on_device[: len(on_device) - sum(num_labels)])
        return {
            (row, int(self.first[sample]) + number): leaf
            for row, sample in enumerate(samples.tolist())
            for number, leaf in enumerate([*leaves[row], *itertools.islice(others, num_labels[row])])
        }


def pack_targets(
    samples: Sequence[Tree], image_lists: Sequence[Sequence[Any]], labels_getters: LabelsGetters
) -> tuple[PackedTargets | None, list[Annotations], dict[int, tuple[str, str]]]:
    """Find the annotations of the samples of a batch, and pack them.

    Args:
        samples: The samples.
        image_lists: The images of each sample. Placeholders of annotations are numbered after those of images.
        labels_getters: Those of the transforms.

    Returns:
        The packed annotations, or None if there are none; the annotations of each sample; by the number of a sample,
        the name of a part that is wrong and the reason.

    Raises:
        TransformError: An annotation cannot be moved, or its sample has no image.
    """
    annotations: list[Annotations] = []
    reasons: dict[int, tuple[str, str]] = {}
    for i, (sample, images) in enumerate(zip(samples, image_lists, strict=True)):
        try:
            annotations.append(find_annotations(sample, labels_getters))
        except TransformError:  # it is a ValueError too
            raise
        except ValueError as error:
            reasons.setdefault(i, ("its labels", f"{str(error).rstrip('.')}; it is {describe_sample(sample)}"))
            annotations.append(Annotations([], [], []))
        if annotations[-1].moved and not images:
            check_has_image(sample)
    if reasons or not any(each.moved for each in annotations):
        return None, annotations, reasons
    sizes = [{_get_canvas(leaf) for _, leaf in each.moved} for each in annotations]
    canvas = np.array([min(size, default=(0, 0)) for size in sizes], np.int64).reshape(-1, 2)
    unmoved = Unmoved(
        Targets.collect([[leaf for _, leaf in each.moved] for each in annotations], canvas),
        [[leaf for _, leaf in each.labels] for each in annotations],
        [each.owners for each in annotations],
    )
    packed = PackedTargets(
        Sealed(unmoved),
        canvas,
        np.array([len(size) > 0 for size in sizes], bool),
        frozenset(kind for each in annotations for kind in each.kinds),
        next(each.describe() for each in annotations if each.moved),
        np.array([len(images) for images in image_lists], np.int64),
    )
    return packed, annotations, reasons


def _describe_mismatch(image: tuple[int, ...], other: tuple[int, ...]) -> str:
    return (
        f"Found multiple HxW dimensions in the sample: {image} of the image, {other} of boxes, masks or key "
        "points; bring them to one size in the dataset"
    )
