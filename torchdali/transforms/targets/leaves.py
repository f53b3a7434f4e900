"""The boxes, key points and masks of a batch: collected from samples, and given back to them."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torchvision import tv_tensors

from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets.boxes import Boxes
from torchdali.transforms.targets.pixels import Pixels
from torchdali.transforms.targets.points import Points
from torchdali.transforms.targets.ragged import canvas
from torchdali.transforms.targets.stored import EncodedMask, StoredMasks

Place = tuple[int, int] | torch.Tensor | StoredMasks
"""A mask, or the group of boxes or points and the number in it."""

Self = TypeVar("Self", bound="Leaves")

_MOST_BEFORE = 2**25
"""Pixels of masks before all moves that are gathered together at most, for the memory of a GPU."""


def _kind(leaf: torch.Tensor) -> tuple[Any, ...]:
    """Return what leaves must have in common to be moved as one array."""
    if isinstance(leaf, tv_tensors.BoundingBoxes):
        return Boxes, leaf.dtype, leaf.format, leaf.clamping_mode, leaf.shape[1:]
    if isinstance(leaf, tv_tensors.KeyPoints):
        return Points, leaf.dtype, leaf.shape[1:]
    raise ValueError(f"targets must be BoundingBoxes, KeyPoints or Mask, got {type(leaf).__name__}")


def _select(masks: torch.Tensor | StoredMasks, kept: IntArray | None) -> torch.Tensor:
    """Return what is copied to the device for some of the masks of a sample, or for all."""
    if isinstance(masks, StoredMasks):
        return masks.select(kept).to_tensor()
    tensor = masks.as_subclass(torch.Tensor)
    return tensor if kept is None else tensor[torch.from_numpy(kept)]


class Leaves:
    """Boxes, key points and masks of a batch. A leaf is one tensor of one sample.

    Args:
        size: ``(N, 2)`` heights and widths of the images.
        groups: Boxes and key points, each of one kind.
        pixels: Where the pixels of masks come from, or None if there are no masks.

    Attributes:
        size: ``(N, 2)`` heights and widths of the images now.
        is_pure: Whether boxes, points and masks are plain tensors now. Then nothing moves them.
        mask_dtype: The dtype that masks get in the end, or None for their own.
        is_sanitized: Whether boxes were dropped, and their masks with them.
        places: For each sample, the place of each leaf.
        decoded: By the sample and the number of the leaf, what DALI made of mask files.
    """

    def __init__(self, size: IntArray, groups: Iterable[Boxes | Points] = (), pixels: Pixels | None = None) -> None:
        self.size: IntArray = size
        self.groups = list(groups)
        self.pixels = pixels
        self.is_pure = False
        self.mask_dtype: torch.dtype | None = None
        self.is_sanitized = False
        self.places: list[list[Place]] | None = None
        self.decoded: dict[tuple[int, int], torch.Tensor] = {}

    @classmethod
    def collect(cls: type[Self], samples: Sequence[Sequence[torch.Tensor | StoredMasks]], size: IntArray) -> Self:
        """Return the targets of a batch.

        Args:
            samples: The ``BoundingBoxes``, ``KeyPoints``, ``Mask`` and :class:`StoredMasks` of each sample. They are
                not changed.
            size: ``(N, 2)`` heights and widths of the images.
        """
        leaves: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)
        owners: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        number: dict[tuple[Any, ...], int] = {}
        places: list[list[Place]] = []
        has_masks = np.zeros(len(size), bool)
        for i, sample in enumerate(samples):
            places.append([])
            for leaf in sample:
                if isinstance(leaf, (tv_tensors.Mask, StoredMasks)):
                    has_masks[i] = True
                    places[-1].append(leaf)
                    continue
                kind = _kind(leaf)
                places[-1].append((number.setdefault(kind, len(number)), len(leaves[kind])))
                leaves[kind].append(leaf)
                owners[kind].append(i)
        groups = [kind[0].collect(leaves[kind], np.array(owners[kind], np.int64)) for kind in number]
        targets = cls(size, groups, Pixels(size, has_masks) if has_masks.any() else None)
        targets.places = places
        return targets

    def to_tensors(self) -> list[torch.Tensor]:
        """Return what :meth:`leaves` is made of: a tensor for each kind of boxes and points, and the masks.

        Masks that DALI decodes are not among them.
        """
        masks = self._find_masks()
        stored = [_select(mask, kept) for _, _, mask, kept in masks if not isinstance(mask, EncodedMask)]
        return [*self._group_tensors(), *stored]

    def _group_tensors(self) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(group.values)) for group in self.groups]

    def leaves(self, tensors: Sequence[torch.Tensor] | None = None) -> list[list[torch.Tensor]]:
        """Return the targets of each sample as torchvision's types, in the order of :meth:`collect`.

        Boxes and points of one kind are views of one tensor.

        Args:
            tensors: What :meth:`to_tensors` returned, on any device. Masks are taken there.
        """
        tensors = self.to_tensors() if tensors is None else tensors
        parts = self._split(tensors)
        masks = iter(self._make_masks(tensors[len(self.groups) :]))
        return [
            [
                self._wrap(i, self.groups[place[0]], parts[place[0]][place[1]])
                if isinstance(place, tuple)
                else next(masks)
                for place in sample
            ]
            for i, sample in enumerate(self._known_places)
        ]

    def without_values(self: Self) -> Self:
        """Return the same without the values of boxes and key points, as :meth:`leaves` needs it."""
        part = copy.copy(self)
        part.groups = [group.without_values() for group in self.groups]
        return part

    def _split(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Return the boxes and points of each leaf, by the group."""
        return [tensor.split(group.counts.tolist()) for tensor, group in zip(tensors, self.groups, strict=False)]

    def find_encoded_masks(self) -> dict[tuple[int, int], EncodedMask]:
        """Return the mask files, by the sample and the number of the leaf. ``decoded`` gets what DALI makes of them."""
        return {
            (i, k): place
            for i, sample in enumerate(self.places or [])
            for k, place in enumerate(sample)
            if isinstance(place, EncodedMask)
        }

    @property
    def _known_places(self) -> list[list[Place]]:
        if self.places is None:
            raise ValueError("the places of the leaves in their samples are not known")
        return self.places

    def _wrap(self, i: int, group: Boxes | Points, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.is_pure else group.wrap(tensor, canvas(self.size, i))

    def find_kept(self) -> list[list[IntArray]]:
        """Return which of its rows each leaf still has, in the order of :meth:`collect`; nothing for masks."""
        parts = [group.split_kept_rows() for group in self.groups]
        nothing = np.empty(0, np.int64)
        return [
            [parts[place[0]][place[1]] if isinstance(place, tuple) else nothing for place in sample]
            for sample in self._known_places
        ]

    def take(self: Self, rows: IntArray, size: IntArray) -> Self:
        """Return the targets of samples in any order. Moves do not change this object, which was never moved.

        Args:
            rows: ``(M,)`` numbers of the samples. They may repeat.
            size: ``(M, 2)`` heights and widths of their images.
        """
        if not np.array_equal(rows, np.arange(len(self.size))):
            parts, places = self._split(self._group_tensors()), self._known_places

            def get_leaf(i: int, place: Place) -> torch.Tensor | StoredMasks:
                if isinstance(place, tuple):
                    return self._wrap(i, self.groups[place[0]], parts[place[0]][place[1]])
                return place if isinstance(place, StoredMasks) else tv_tensors.Mask(place)

            return type(self).collect([[get_leaf(i, place) for place in places[i]] for i in map(int, rows)], size)
        pixels = self.pixels and Pixels(size, self.pixels.has_masks)
        part = type(self)(size, [group.copy() for group in self.groups], pixels)
        part.places = self.places
        return part

    def to_dtype(self, find_dtype: Callable[[type], torch.dtype | None]) -> None:
        """Convert boxes, points and masks.

        Args:
            find_dtype: Returns the new dtype for torchvision's type, or None to convert nothing.
        """
        for group in self.groups:
            if dtype := find_dtype(group.tensor_type):
                group.values = torch.from_numpy(group.values).to(dtype).numpy()
        if self.pixels:
            self.mask_dtype = find_dtype(tv_tensors.Mask) or self.mask_dtype

    def find_chosen_masks(self) -> dict[int, tuple[int, IntArray]]:
        """Return for each sample whose boxes were sanitized how many boxes it had, and which are left.

        Masks of ``(N, H, W)`` lose the masks of boxes that were dropped, if N is the number of boxes.
        """
        if not self.is_sanitized:
            return {}
        return {
            row: (count, kept)
            for boxes in self.boxes
            for row, count, kept in zip(
                boxes.owners.tolist(), boxes.count_at_first.tolist(), boxes.split_kept_rows(), strict=True
            )
        }

    def _find_masks(self) -> list[tuple[int, int, torch.Tensor | StoredMasks, IntArray | None]]:
        """Return the masks of all samples, and which of each are left after boxes were dropped; None for all.

        Before each are the numbers of its sample and of its leaf.
        """
        if self.pixels is None:
            return []
        chosen = self.find_chosen_masks()
        masks: list[tuple[int, int, torch.Tensor | StoredMasks, IntArray | None]] = []
        for i, sample in enumerate(self._known_places):
            count, kept = chosen.get(i, (-1, None))
            for k, place in enumerate(sample):
                if not isinstance(place, tuple):
                    drops = kept is not None and len(place.shape) > 2 and place.shape[0] == count > len(kept)
                    masks.append((i, k, place, kept if drops else None))
        return masks

    def _make_masks(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all masks after all moves; ``tensors`` is what of them is on the device."""
        masks, on_device = self._find_masks(), iter(tensors)
        if self.pixels is None or not masks:
            return []
        owners = [i for i, *_ in masks]
        parts = [self.decoded[i, k] if isinstance(m, EncodedMask) else next(on_device) for i, k, m, _ in masks]
        stored = [mask.select(kept) if isinstance(mask, StoredMasks) else None for _, _, mask, kept in masks]
        # Many masks are made one by one: prepared together, all of them would be in memory twice.
        is_small = sum(math.prod(mask.shape) for _, _, mask, _ in masks) <= _MOST_BEFORE
        step = len(masks) if is_small and all(part.device.type != "cpu" for part in parts) else 1
        made: list[torch.Tensor] = []
        for begin in range(0, len(masks), step):
            some = slice(begin, begin + step)
            made += _make_some(self.pixels, owners[some], stored[some], parts[some])
        made = [mask.to(self.mask_dtype or mask.dtype) for mask in made]
        return made if self.is_pure else [tv_tensors.Mask(mask) for mask in made]

    @property
    def boxes(self) -> list[Boxes]:
        """The boxes of the batch, by kind."""
        return [group for group in self.groups if isinstance(group, Boxes)]

    @property
    def points(self) -> list[Points]:
        """The key points of the batch, by kind."""
        return [group for group in self.groups if isinstance(group, Points)]


def _make_some(
    pixels: Pixels, owners: Sequence[int], stored: Sequence[StoredMasks | None], parts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return masks after all moves.

    Args:
        pixels: The moves.
        owners: The sample of each mask.
        stored: How each is stored; None for a tensor.
        parts: What of each is on the device.
    """
    fills = pixels.has_fill
    parts = [mask.prepare(part, fills) if mask else part for mask, part in zip(stored, parts, strict=True)]
    parts = _take_pixels(pixels, owners, parts)
    return [mask.finish(part, fills) if mask else part for mask, part in zip(stored, parts, strict=True)]


def _take_pixels(pixels: Pixels, owners: Sequence[int], masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return masks after all moves; ``owners`` are their samples."""
    if masks[0].device.type != "cpu":
        together = pixels.gather_together(owners, masks) if len(masks) > 1 else None
        return together or [pixels.gather(i, mask) for i, mask in zip(owners, masks, strict=True)]
    arrays = [mask.numpy() for mask in masks]
    taken = [pixels.take(i, array) for i, array in zip(owners, arrays, strict=True)]
    # A mask that nothing has moved may lie in memory that a worker will use again.
    return [
        torch.from_numpy(new.copy() if new is old else np.ascontiguousarray(new))
        for new, old in zip(taken, arrays, strict=True)
    ]
