"""Copy batches to pinned memory, and from there to the device, on a stream of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils.data import _utils as data_utils  # pyright: ignore[reportPrivateUsage]

from torchdali.runtime import devices
from torchdali.samples.bundle import Bundle, is_plain, to_bytes
from torchdali.samples.tree import tree_map

__all__ = ["Move", "Transfer", "pin_memory"]

Move = Callable[[Sequence[torch.Tensor] | Bundle], list[torch.Tensor]]
"""Copies tensors to the device."""

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

    def move_together(self, tensors: Sequence[torch.Tensor] | Bundle) -> list[torch.Tensor]:
        """Move dense tensors to the device in one copy. They become views of one buffer there."""
        if self._device.type != "cuda":
            # A label that a script keeps must not keep those of its whole batch.
            return tensors.copy_out() if isinstance(tensors, Bundle) else list(tensors)
        bundle = tensors if isinstance(tensors, Bundle) else Bundle.pack(tensors, pin_memory=True)
        return bundle.split(self(bundle.memory))

    def _move(self, data: Any) -> Any:
        side_stream = _get_side_stream(self._device)
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
        if moved:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(side_stream)
            for tensor in moved:
                tensor.record_stream(current)
        return data


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in pinned memory."""
    if not is_plain(tensor) or not tensor.is_contiguous():
        return tensor.pin_memory()  # it keeps strides and gradients
    pinned = torch.empty(tensor.numel() * tensor.itemsize, dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = to_bytes(tensor)
    return pinned.view(tensor.dtype).view(tensor.shape)


@functools.cache
def _get_side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies: one for the process, because torch keeps memory for every stream."""
    return torch.cuda.Stream(device)


def _is_movable(node: Any) -> bool:
    return callable(getattr(cast("object", node), "to", None)) and not isinstance(node, type)
