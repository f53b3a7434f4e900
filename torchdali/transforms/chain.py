"""Take chains apart: containers only call their transforms one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

from torchdali.transforms.batched import is_batchable


def _compose_children(transform: Any) -> Sequence[Any]:
    children = transform.transforms
    if isinstance(children, Iterator):
        raise TypeError("Compose was given a generator, which the first call uses up: give it a list")
    return children


def _expand_classification_preset(preset: Any) -> Sequence[Any]:
    """Return the transforms that ``Weights.transforms()`` of ``torchvision.models`` applies, in order."""
    return [
        v1.Resize(preset.resize_size, interpolation=preset.interpolation, antialias=preset.antialias),
        v2.CenterCrop(preset.crop_size),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(preset.mean, preset.std),
    ]


_CHILDREN_GETTERS: dict[type | str, Callable[[Any], Sequence[Any]]] = {
    v1.Compose: _compose_children,
    v2.Compose: _compose_children,
    nn.Sequential: list,
    nn.ModuleList: list,
    list: list,
    "torchvision.transforms._presets.ImageClassification": _expand_classification_preset,
}
"""How to get a container's transforms, by its class. A private class is given by its full name.

Subclasses are left out, because they may do anything.
"""


def is_unmodified(transform: Any) -> bool:
    """Return True if the object behaves as its class: it has no hooks and no methods of its own."""
    kind, own = type(cast("object", transform)), cast("dict[str, Any]", getattr(transform, "__dict__", {}))
    if own.get("_forward_hooks") or own.get("_forward_pre_hooks"):
        return False
    return not any(callable(value) and callable(getattr(kind, name, None)) for name, value in own.items())


def _find_children_getter(transform: Any) -> Callable[[Any], Sequence[Any]] | None:
    kind = type(cast("object", transform))
    getter = _CHILDREN_GETTERS.get(kind) or _CHILDREN_GETTERS.get(f"{kind.__module__}.{kind.__qualname__}")
    return getter if getter and is_unmodified(transform) and not is_batchable(transform) else None


def is_container(transform: Any) -> bool:
    """Return True if the transform only calls others, one after another."""
    return _find_children_getter(transform) is not None


def check_callable(*transforms: Any) -> None:
    """Raise TypeError unless all can be called with an image. A class of transforms cannot: only its instances."""
    for transform in transforms:
        kind = cast("type[Any] | None", transform if isinstance(transform, type) else None)
        if kind and any("__call__" in vars(base) for base in kind.__mro__):
            raise TypeError(f"{kind.__name__} is a class of transforms: give what {kind.__name__}(...) makes")
        if not callable(transform):
            raise TypeError(f"a transform must be callable, got {transform!r}")


def flatten(transform: Any) -> list[Any]:
    """Return the transforms in a chain, in order, without their containers."""
    return [] if transform is None else _flatten(transform)


def _flatten(transform: Any) -> list[Any]:
    get_children = _find_children_getter(transform)
    return [leaf for child in get_children(transform) for leaf in _flatten(child)] if get_children else [transform]
