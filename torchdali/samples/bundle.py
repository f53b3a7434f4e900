"""Many tensors in one piece of memory, so that one copy moves all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Bundle", "is_plain", "to_bytes"]

_ALIGNMENT = 16
"""The first tensor of each dtype begins at a multiple of so many bytes: a multiple of the size of every element."""

_FAST = {torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32}
"""Types that numpy has, too."""


class Bundle(NamedTuple):
    """The values of dense tensors. Those of one dtype lie one behind another, so one call splits them again.

    A tensor that comes twice is there once, and is one tensor again after the split.

    Attributes:
        memory: ``(L,)`` uint8, the bytes of all of them.
        shapes: The shape of each.
        parts: For each dtype its first byte, and the numbers of its tensors.
        order: The numbers of the tensors, in the order in which they came.
    """

    memory: torch.Tensor
    shapes: list[tuple[int, ...]]
    parts: list[tuple[torch.dtype, int, list[int]]]
    order: list[int]

    @classmethod
    def pack(cls, tensors: Sequence[torch.Tensor], pin_memory: bool = False) -> Bundle:
        """Copy dense tensors into new memory."""
        number: dict[int, int] = {}
        order = [number.setdefault(id(tensor), len(number)) for tensor in tensors]
        tensors = list({id(tensor): tensor for tensor in tensors}.values())
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(i)
        counts = [tensor.numel() for tensor in tensors]
        sizes = [sum(counts[i] for i in members) * dtype.itemsize for dtype, members in by_dtype.items()]
        begins = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        memory = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=pin_memory)
        array = memory.numpy()
        for begin, size, members in zip(begins, sizes, by_dtype.values(), strict=False):
            np.concatenate([to_bytes(tensors[i]) for i in members], out=array[begin : begin + size])
        parts = [(dtype, begin, members) for begin, (dtype, members) in zip(begins, by_dtype.items(), strict=False)]
        return cls(memory, [tuple(tensor.shape) for tensor in tensors], parts, order)

    def split(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of a copy of ``memory``, on any device.

        They are no views for autograd. So a script may change one of them in place, and no other knows of it.
        """
        tensors = self._split(memory)
        return [tensors[i] for i in self.order]

    def copy_out(self) -> list[torch.Tensor]:
        """Return the tensors, each with memory of its own."""
        tensors = [tensor.clone() for tensor in self._split(self.memory)]
        return [tensors[i] for i in self.order]

    def _split(self, memory: torch.Tensor) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = [memory] * len(self.shapes)
        for dtype, begin, members in self.parts:
            counts = [math.prod(self.shapes[i]) for i in members]
            values = memory[begin : begin + sum(counts) * dtype.itemsize].view(dtype)
            for i, part in zip(members, torch.unsafe_split_with_sizes(values, counts), strict=True):
                tensors[i] = part if len(self.shapes[i]) == 1 else part.view(self.shapes[i])
        return tensors


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is no more than its values: dense, of torch's own class and without gradients."""
    is_dense = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return is_dense and not tensor.requires_grad and not tensor.is_quantized


def to_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the values of a tensor as ``(L,)`` bytes.

    numpy copies them to pinned memory: torch's ``copy_`` waits for a thread on each core, also on those that are busy.
    """
    if is_plain(tensor) and tensor.dtype in _FAST and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.numpy().reshape(-1).view(np.uint8)  # a fifth of the time: a batch has many small tensors
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    # A tensor of one element may have any strides, and be contiguous.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
