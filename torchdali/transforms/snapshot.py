"""Take a snapshot of a chain when it is compiled, to detect later changes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from torchdali.transforms.chain import is_container
from torchdali.transforms.rule import has_rule


class _Identity:
    """Reference to an object. Equal to another one if it is the same object and, if a tensor, was not written to."""

    def __init__(self, item: Any) -> None:
        self._item = item
        counted = isinstance(item, torch.Tensor) and not item.is_inference()
        self._version: int = item._version if counted else 0  # noqa: SLF001 - torch has no other name for it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._item is other._item and self._version == other._version

    def __hash__(self) -> int:
        return id(self._item)


def snapshot(transform: Any) -> object:
    """Return a value that equals a later snapshot if the graph still fits the transform.

    Transforms with a rule, and containers, are compared by their attributes, because ``repr`` does not show all of
    them. Transforms that torch runs are called as they are, so their identity is enough.

    Args:
        transform: A transform, a chain of them, or None.
    """
    if isinstance(transform, (list, tuple)):
        return tuple(map(snapshot, cast("Any", transform)))
    if is_container(transform) or has_rule(transform):
        parts: dict[str, Any] = dict(vars(cast("object", transform)))
        if isinstance(transform, nn.Module):
            parts.update(transform.named_children())
        return type(cast("object", transform)), {
            name: snapshot(value) for name, value in parts.items() if not name.startswith("_") and name != "training"
        }
    return _Identity(transform) if callable(transform) or isinstance(transform, torch.Tensor) else repr(transform)
