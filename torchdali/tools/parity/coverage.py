"""List which of torchvision's transforms have a rule, and why the others have none."""

from __future__ import annotations

import inspect
from typing import Any

from torchvision.transforms import v2

from torchdali.transforms import Rule

__all__ = ["TORCH_ONLY", "names", "public_classes", "rules"]

TORCH_ONLY: dict[str, str] = {
    "AutoAugmentPolicy": "an enum of policies",
    "ClampBoundingBoxes": "changes bounding boxes alone",
    "ClampKeyPoints": "changes key points alone",
    "Compose": "taken apart: its transforms are taken one by one",
    "ConvertBoundingBoxFormat": "changes bounding boxes alone",
    "CutMix": "mixes the samples of a batch: `batch_transform=`",
    "InterpolationMode": "an enum of filters",
    "Lambda": "any Python function",
    "MixUp": "mixes the samples of a batch: `batch_transform=`",
    "RandomIoUCrop": "crops by bounding boxes",
    "SanitizeBoundingBoxes": "removes bounding boxes",
    "SanitizeKeyPoints": "removes key points",
    "SetClampingMode": "changes bounding boxes alone",
    "ToPILImage": "makes a PIL image, on the host",
    "Transform": "the base class of the others",
    "UniformTemporalSubsample": "takes frames of videos",
}
"""Classes of ``torchvision.transforms.v2`` without a rule, with the reason."""


def public_classes() -> dict[str, type[Any]]:
    """Return every public class of the installed ``torchvision.transforms.v2``, by name."""
    return {name: one for name, one in vars(v2).items() if not name.startswith("_") and inspect.isclass(one)}


def rules() -> dict[type[Any] | str, type[Rule]]:
    """Return the rule of every class that has one. Classes of packages that may be missing are given by name."""
    found: dict[type[Any] | str, type[Rule]] = {}
    waiting: list[type[Rule]] = [Rule]
    while waiting:
        rule = waiting.pop()
        waiting += rule.__subclasses__()
        found |= dict.fromkeys(rule.__dict__.get("handles", ()), rule)
    return found


def names(rule: type[Rule]) -> list[str]:
    """Return the names of a rule's transforms."""
    return list(dict.fromkeys(map(_name, rule.handles)))


def _name(handled: type[Any] | str) -> str:
    if not isinstance(handled, str):
        return handled.__name__
    package, *_, name = handled.split(".")
    return f"{package}: {name}"
