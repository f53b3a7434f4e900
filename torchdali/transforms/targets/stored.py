"""Masks of a sample that become a tensor when all their moves are known.

Until then they take less memory: in a worker's batch, and on their way to the device.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from torchdali.transforms.spec import IntArray

Self = TypeVar("Self", bound="StoredMasks")


class StoredMasks(ABC):
    """Masks of one sample that are no tensor yet.

    Args:
        data: What they are made of.
        shape: ``(..., H, W)`` of the masks.
        dtype: Of the masks.

    Attributes:
        decoded_bytes: Bytes beside ``data`` that a batch in flight takes for the masks.
        rows: Which of the masks to make, or None for all.
    """

    decoded_bytes = 0
    rows: IntArray | None = None

    def __init__(self, data: npt.NDArray[Any], shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> None:
        self.data = data
        self.shape, self.dtype = shape, dtype

    @property
    def canvas(self) -> tuple[int, int]:
        """Height and width."""
        height, width = self.shape[-2:]
        return height, width

    def with_data(self: Self, data: npt.NDArray[Any]) -> Self:
        """Return the same masks with their data elsewhere."""
        other = copy.copy(self)
        other.data = data
        return other

    def select(self: Self, rows: IntArray | None) -> Self:
        """Return some of the masks, by their numbers."""
        other = copy.copy(self)
        other.rows = rows
        return other

    def to_tensor(self) -> torch.Tensor:
        """Return what is copied to the device."""
        return torch.from_numpy(self.data)

    @abstractmethod
    def prepare(self, tensor: torch.Tensor, has_fill: bool) -> torch.Tensor:
        """Return the ``(..., H, W)`` planes that are moved.

        Args:
            tensor: What is on the device.
            has_fill: Whether moves fill planes with something else than 0.
        """

    @abstractmethod
    def finish(self, taken: torch.Tensor, has_fill: bool) -> torch.Tensor:
        """Return the masks, from the planes after all moves."""


class EncodedMask(StoredMasks):
    """A mask file that DALI decodes: a grey PNG.

    Args:
        data: ``(L,)`` bytes of the file.
        shape: ``(1, H, W)`` of the mask.
        dtype: Of the mask: uint8, or uint16 for a file of 16 bits.
        scale: What the decoder multiplies the values of the mask with, because it stretches few bits to 8.
    """

    def __init__(
        self, data: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, scale: int = 1
    ) -> None:
        super().__init__(data, shape, dtype)
        self.scale = scale
        self.decoded_bytes = math.prod(shape) * dtype.itemsize

    def prepare(self, tensor: torch.Tensor, has_fill: bool) -> torch.Tensor:
        """Return the mask; ``tensor`` is ``(1, H, W)``, what the decoder put out."""
        return tensor if self.scale == 1 else tensor // self.scale

    def finish(self, taken: torch.Tensor, has_fill: bool) -> torch.Tensor:
        return taken if self.rows is None else taken.index_select(0, torch.from_numpy(self.rows).to(taken.device))


class BitMasks(StoredMasks):
    """Masks of zeros and ones, eight to a byte: bit ``k`` of plane ``p`` is the mask ``8 p + k``.

    Args:
        data: ``(P, H, W)`` planes.
        shape: ``(N, H, W)`` of the masks.
        dtype: uint8 or bool.
    """

    @classmethod
    def pack(cls, masks: torch.Tensor) -> BitMasks | None:
        """Return masks as bits. Return None if they are others than zeros and ones, or bits save nothing."""
        if masks.dtype not in (torch.uint8, torch.bool) or masks.ndim != 3 or len(masks) < 2:
            return None
        values: npt.NDArray[np.uint8] = masks.as_subclass(torch.Tensor).numpy().view(np.uint8)
        if values.max(initial=0) > 1:
            return None
        planes = np.zeros((-(-len(values) // 8), *values.shape[1:]), np.uint8)
        for i, mask in enumerate(values):
            planes[i >> 3] |= mask << np.uint8(i & 7)
        return cls(planes, tuple(masks.shape), masks.dtype)

    def prepare(self, tensor: torch.Tensor, has_fill: bool) -> torch.Tensor:
        """Return the planes. Moves pick pixels, so eight masks are moved at once, if filled with 0."""
        return self._unpack(tensor) if has_fill else tensor

    def finish(self, taken: torch.Tensor, has_fill: bool) -> torch.Tensor:
        return taken if has_fill else self._unpack(taken)

    def _unpack(self, planes: torch.Tensor) -> torch.Tensor:
        bits = torch.arange(8, dtype=torch.uint8, device=planes.device)[:, None, None]
        masks = (planes[:, None] >> bits).bitwise_and_(1).flatten(0, 1)
        rows = self.rows
        masks = masks[: self.shape[0]] if rows is None else masks[torch.from_numpy(rows).to(planes.device)]
        return masks.view(self.dtype)


class RunMasks(StoredMasks):
    """Masks as the lengths of their runs of zeros and ones, column by column, as COCO stores them.

    Args:
        data: ``(R,)`` int32 lengths. The runs of each mask begin with zeros, and fill it.
        counts: ``(N,)`` numbers of runs of the masks.
        size: Height and width.
    """

    def __init__(self, data: npt.NDArray[np.int32], counts: IntArray, size: tuple[int, int]) -> None:
        super().__init__(data, (len(counts), *size))
        self.counts = counts

    def select(self, rows: IntArray | None) -> RunMasks:
        """Return some of the masks, by their numbers in ascending order."""
        if rows is None:
            return self
        is_selected = np.repeat(np.isin(np.arange(len(self.counts)), rows), self.counts)
        return RunMasks(self.data[is_selected], self.counts[rows], self.canvas)

    def to_tensor(self) -> torch.Tensor:
        """Return ``(2, R)``: where runs end, counted over all masks with a pixel behind each; and 1 or -1 for a change.

        After a run of zeros the value changes by 1, after a run of ones by -1.
        """
        ends = np.cumsum(self.data, dtype=np.int64) + np.repeat(np.arange(len(self.counts)), self.counts)
        return torch.from_numpy(np.stack((ends, 1 - 2 * self._find_ones())))

    def prepare(self, tensor: torch.Tensor, has_fill: bool) -> torch.Tensor:
        return self.expand() if tensor.device.type == "cpu" else self.expand_on_device(tensor)

    def finish(self, taken: torch.Tensor, has_fill: bool) -> torch.Tensor:
        return taken.contiguous()

    def expand(self) -> torch.Tensor:
        """Return ``(N, H, W)`` masks on the host."""
        count, height, width = self.shape
        values = self._find_ones().astype(np.uint8)
        return torch.from_numpy(np.repeat(values, self.data)).view(count, width, height).transpose(1, 2)

    def _find_ones(self) -> IntArray:
        """Return ``(R,)`` the value of each run: 0 or 1."""
        first = np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        return (np.arange(len(first)) - first) % 2

    def expand_on_device(self, changes: torch.Tensor) -> torch.Tensor:
        """Return ``(N, H, W)`` masks on the device of ``changes``, which :meth:`to_tensor` returned."""
        count, height, width = self.shape
        area = height * width
        steps = torch.zeros(count * (area + 1), dtype=torch.int8, device=changes.device)
        steps.index_add_(0, changes[0], changes[1].to(torch.int8))
        values = steps.view(count, area + 1).cumsum(1, dtype=torch.int8)[:, :area].view(torch.uint8)
        return values.view(count, width, height).transpose(1, 2)


class InstanceMasks(StoredMasks):
    """Masks that share no pixel, as one plane of their numbers.

    Args:
        data: ``(1, H, W)`` number of the mask that has a pixel, counted from 1; 0 for none.
        count: Number of masks.
    """

    def __init__(self, data: npt.NDArray[Any], count: int) -> None:
        super().__init__(data, (count, *data.shape), torch.bool)

    def prepare(self, tensor: torch.Tensor, has_fill: bool) -> torch.Tensor:
        """Return the planes. One is moved for all masks, if filled with 0."""
        return self._compare(tensor) if has_fill else tensor

    def finish(self, taken: torch.Tensor, has_fill: bool) -> torch.Tensor:
        """Return ``(N, 1, H, W)`` masks."""
        return taken if has_fill else self._compare(taken)

    def _compare(self, plane: torch.Tensor) -> torch.Tensor:
        rows = np.arange(self.shape[0]) if self.rows is None else self.rows
        numbers = torch.from_numpy(rows + 1).to(plane.device, plane.dtype)
        return plane == numbers[:, None, None, None]


EMPTY: npt.NDArray[Any] = np.empty(0, np.uint8)
"""Stands for data that is elsewhere."""
