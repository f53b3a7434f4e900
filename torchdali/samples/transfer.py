"""Copy batches to pinned memory, and from there to the device, on a stream of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import _utils as data_utils  # pyright: ignore[reportPrivateUsage]

from torchdali.runtime import devices
from torchdali.samples.tree import tree_map

__all__ = ["Transfer", "move_packed", "pin_memory", "to_bytes"]

_ALIGNMENT = 16
"""The first tensor of each dtype begins at a multiple of so many bytes: a multiple of the size of every element."""

_FAST = {torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32}
"""Types that numpy has, too."""

pin_memory = cast("Callable[[Any], Any]", data_utils.pin_memory.pin_memory)
"""A batch with its tensors in pinned memory, as DataLoader makes it."""


class Transfer:
    """Copies the tensors of a structure to a device.

    The copies go from pinned memory and on a stream of their own, so that they do not wait for kernels that were
    queued before; torch's current stream waits for them. What is no plain tensor cannot say which stream uses its
    memory, and is copied on the current one.

    Args:
        device: The target. For the CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, data: Any) -> Any:
        """Move the tensors of a structure, and whatever else has a method ``to``, to the device."""
        if self._device.type != "cuda":
            return data
        with devices.use(self._device):
            return self._move(data)

    def move_together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Move dense tensors to the device in one copy. They become views of one buffer there."""
        if self._device.type != "cuda":
            return list(tensors)
        return move_packed(tensors, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), self)

    def _move(self, data: Any) -> Any:
        side_stream = _get_side_stream(self._device)
        current = torch.cuda.current_stream(self._device)
        moved: list[torch.Tensor] = []

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf.to(self._device) if _is_movable(leaf) else leaf
            if leaf.device.type != "cpu":
                return leaf
            if leaf.layout != torch.strided:
                return leaf.to(self._device)
            if not leaf.is_pinned():
                leaf = _pin(leaf)
            with torch.cuda.stream(side_stream):
                moved.append(leaf.to(self._device, non_blocking=True))
            return moved[-1]

        data = tree_map(data, move, is_leaf=_is_movable)
        current.wait_stream(side_stream)
        for tensor in moved:
            tensor.record_stream(current)
        return data


def move_packed(
    tensors: Sequence[torch.Tensor],
    make_memory: Callable[[int], torch.Tensor],
    move: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Move dense tensors in one copy. Those of one dtype lie one behind another: one call splits them again.

    This call makes no views for autograd. So a script may change one tensor in place, and no other knows of it.

    Args:
        tensors: The tensors.
        make_memory: Returns a number of bytes of the host's memory.
        move: Copies these bytes to the device.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    counts = [tensor.numel() for tensor in tensors]
    sizes = [sum(counts[i] for i in members) * dtype.itemsize for dtype, members in by_dtype.items()]
    begins = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    packed = make_memory(begins[-1])
    memory = packed.numpy()
    for begin, size, members in zip(begins, sizes, by_dtype.values(), strict=False):
        np.concatenate([to_bytes(tensors[i]) for i in members], out=memory[begin : begin + size])
    packed, moved = move(packed), list[Any](tensors)
    for begin, size, (dtype, members) in zip(begins, sizes, by_dtype.items(), strict=False):
        parts = torch.unsafe_split_with_sizes(packed[begin : begin + size].view(dtype), [counts[i] for i in members])
        for i, part in zip(members, parts, strict=True):
            moved[i] = part if tensors[i].ndim == 1 else part.view(tensors[i].shape)
    return moved


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in pinned memory."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad or not tensor.is_contiguous():
        return tensor.pin_memory()  # it keeps strides and gradients
    pinned = torch.empty(tensor.numel() * tensor.itemsize, dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = to_bytes(tensor)
    return pinned.view(tensor.dtype).view(tensor.shape)


def to_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the values of a tensor as ``(L,)`` bytes.

    numpy copies them to pinned memory: torch's ``copy_`` waits for a thread on each core, also on those that are busy.
    """
    is_plain = type(tensor) is torch.Tensor and tensor.dtype in _FAST and tensor.is_contiguous()
    if is_plain and not tensor.requires_grad and not tensor.is_neg():
        return tensor.numpy().reshape(-1).view(np.uint8)  # a fifth of the time: a batch has many small tensors
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    # A tensor of one element may have any strides, and be contiguous.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


@functools.cache
def _get_side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies: one for the process, because torch keeps memory for every stream."""
    return torch.cuda.Stream(device)


def _is_movable(node: Any) -> bool:
    return callable(getattr(cast("object", node), "to", None)) and not isinstance(node, type)
