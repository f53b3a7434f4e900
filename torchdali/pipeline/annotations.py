"""Check that transforms take samples with boxes, masks or key points, as torchvision would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2._auto_augment import _AutoAugmentBase  # pyright: ignore[reportPrivateUsage]

from torchdali.errors import TransformError
from torchdali.transforms import Rule, Views, find_rule, flatten
from torchdali.transforms.rule import Composite
from torchdali.transforms.rules.conversion import Identity

__all__ = ["check_annotations"]


def check_annotations(chain: Iterable[Any], kinds: Iterable[type]) -> None:
    """Raise TransformError if a transform does not take annotations of these types.

    Args:
        chain: The transforms, in order.
        kinds: ``BoundingBoxes``, ``Mask`` or ``KeyPoints``.
    """
    annotations = [_make_tiny(kind) for kind in kinds]
    for position, leaf in enumerate(chain, start=1):
        try:
            _check(leaf, [tv_tensors.Image(torch.zeros(3, 8, 8)), *annotations])
        except TypeError as error:
            raise TransformError(f"transform {position}, {type(leaf).__name__}: {error}") from error


def _make_tiny(kind: Any) -> Any:
    if kind is cast("Any", tv_tensors.BoundingBoxes):
        return kind(torch.zeros(1, 4), format="XYXY", canvas_size=(8, 8))
    return kind(torch.zeros(1, 8, 8)) if kind is tv_tensors.Mask else kind(torch.zeros(1, 2), canvas_size=(8, 8))


def _check(leaf: Any, parts: list[Any]) -> None:
    """Raise TypeError if a transform does not take a sample of these parts."""
    names = ", ".join(type(part).__name__ for part in parts[1:])
    rule = find_rule(leaf)
    if isinstance(rule, Identity):
        return
    if not isinstance(leaf, v2.Transform):
        # Without a rule it may be the user's own function, which takes whole samples.
        if rule is not None or type(leaf).__module__.startswith("torchvision.transforms."):
            raise TypeError(f"it takes images alone, and samples have {names}; use torchvision.transforms.v2")
        return
    leaf.check_inputs(parts)
    if isinstance(leaf, _AutoAugmentBase):
        cast("Any", leaf)._flatten_and_extract_image_or_video(tuple(parts))  # noqa: SLF001 - where torchvision refuses
    if rule and not isinstance(rule, Composite) and not rule.moves and type(rule).output_size is not Rule.output_size:
        raise TypeError(f"its rule changes the size of images, does not move {names}, and must define move")
    if isinstance(rule, Views):
        raise TypeError(f"it makes several images of one, and samples have {names}")
    for inner in flatten(cast("Any", getattr(leaf, "transforms", None))):
        _check(inner, parts)
