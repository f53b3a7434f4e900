"""Masks of a sample that become a tensor when all their moves are known.

Until then they take less memory: in a worker's batch, and on their way to the device.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from torchdali.transforms.spec import IntArray

Take = Callable[[torch.Tensor], torch.Tensor]
"""Takes the pixels of ``(..., H, W)`` masks as they are after all moves."""

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
    def make(self, tensor: torch.Tensor, take: Take, has_fill: bool) -> torch.Tensor:
        """Return the masks after all moves.

        Args:
            tensor: What is on the device.
            take: See :data:`Take`.
            has_fill: Whether ``take`` fills with something else than 0.
        """


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

    def make(self, tensor: torch.Tensor, take: Take, has_fill: bool) -> torch.Tensor:
        """Return the mask after all moves; ``tensor`` is ``(1, H, W)``, what the decoder put out."""
        mask = take(tensor if self.scale == 1 else tensor // self.scale)
        return mask if self.rows is None else mask[torch.from_numpy(self.rows).to(mask.device)]


EMPTY: npt.NDArray[Any] = np.empty(0, np.uint8)
"""Stands for data that is elsewhere."""
