"""A collate function for samples of different lengths, such as sounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportPrivateUsage]
from torch.utils.data import _utils  # pyright: ignore[reportPrivateUsage]

__all__ = ["pad_collate"]

_collate: Any = cast("Any", _utils).collate.collate
_FUNCTIONS: dict[type, Callable[..., Any]] = cast("Any", _utils).collate.default_collate_fn_map


def pad_collate(samples: Sequence[Any], *, value: float = 0.0, lengths: bool = False) -> Any:
    """Collate samples as ``default_collate`` does, after tensors were padded at the end of their last axis.

    Tensors at the same place of all samples get the length of the longest. Give it as ``collate_fn=`` to ``DataLoader``
    or ``DALILoader``. For other arguments give ``functools.partial(pad_collate, lengths=True)``.

    Args:
        samples: The samples of a batch.
        value: What tensors are padded with.
        lengths: Whether the batch gets a last part: an int64 tensor ``(N,)`` with the length that the first tensor of
            each sample had.

    Returns:
        The batch. With ``lengths`` it is a list of the parts of a batch of tuples, or of the batch, and the lengths.

    Raises:
        RuntimeError: Tensors at the same place differ in another axis than the last.
        TypeError: ``lengths`` is True, and a sample has no tensor with an axis.
    """

    def stack(tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        if tensors[0].ndim and len({tensor.shape for tensor in tensors}) > 1:
            longest = max(tensor.shape[-1] for tensor in tensors)
            tensors = [pad(tensor, (0, longest - tensor.shape[-1]), value=value) for tensor in tensors]
        return _FUNCTIONS[torch.Tensor](tensors, collate_fn_map=collate_fn_map)

    batch: Any = _collate(samples, collate_fn_map={**_FUNCTIONS, torch.Tensor: stack})
    if not lengths:
        return batch
    numbers = torch.tensor([_find_length(sample) for sample in samples])
    is_tuple = isinstance(samples[0], (tuple, list))
    return [*batch, numbers] if is_tuple else [batch, numbers]


def _find_length(sample: Any) -> int:
    leaves: list[Any] = tree_leaves(sample)
    tensor = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if tensor is None:
        raise TypeError(f"pad_collate(lengths=True) needs a tensor in each sample, got {type(sample).__name__}")
    return tensor.shape[-1]
