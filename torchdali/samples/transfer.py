"""Copy batches to pinned memory, and from there to the device, on a stream of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.data import _utils as data_utils  # pyright: ignore[reportPrivateUsage]

from torchdali.runtime import devices
from torchdali.samples.tree import tree_map

__all__ = ["Transfer", "pin_memory"]

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
        with devices.on(self._device):
            return self._move(data)

    def _move(self, data: Any) -> Any:
        side_stream = _get_side_stream(self._device)
        current = torch.cuda.current_stream(self._device)
        moved: list[torch.Tensor] = []

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf.to(self._device) if _can_move(leaf) else leaf
            if leaf.device.type != "cpu":
                return leaf
            if leaf.layout != torch.strided:
                return leaf.to(self._device)
            if not leaf.is_pinned():
                leaf = leaf.pin_memory()
            with torch.cuda.stream(side_stream):
                moved.append(leaf.to(self._device, non_blocking=True))
            return moved[-1]

        data = tree_map(data, move, is_leaf=_can_move)
        current.wait_stream(side_stream)
        for tensor in moved:
            tensor.record_stream(current)
        return data


@functools.cache
def _get_side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies: one for the process, because torch keeps memory for every stream."""
    return torch.cuda.Stream(device)


def _can_move(node: Any) -> bool:
    return callable(getattr(cast("object", node), "to", None)) and not isinstance(node, type)
