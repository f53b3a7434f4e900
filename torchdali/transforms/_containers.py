"""Chains taken apart: transforms that only call others, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

__all__ = ["flatten"]


def _held(transform: Any) -> Sequence[Any]:
    return transform.transforms


def _classification(preset: Any) -> Sequence[Any]:
    """What ``torchvision.models``' ``Weights.transforms()`` do, one after another."""
    return [
        v2.Resize(preset.resize_size, interpolation=preset.interpolation, antialias=preset.antialias),
        v2.CenterCrop(preset.crop_size),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(preset.mean, preset.std),
    ]


_INNER: dict[type | str, Callable[[Any], Sequence[Any]]] = {
    v1.Compose: _held,
    v2.Compose: _held,
    nn.Sequential: list,
    nn.ModuleList: list,
    list: list,
    "torchvision.transforms._presets.ImageClassification": _classification,
}
"""What is in a container, by its class or, where that is private, its class's full name. A subclass may do anything."""


def flatten(transform: Any) -> list[Any]:
    """The transforms in a chain, in order, without the containers that only call one after another."""
    if transform is None:
        return []
    kind = type(cast("object", transform))
    inner = _INNER.get(kind) or _INNER.get(f"{kind.__module__}.{kind.__qualname__}")
    return [transform] if inner is None else [leaf for one in inner(transform) for leaf in flatten(one)]
