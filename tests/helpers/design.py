"""Bounds that each transform is designed to keep. A case of the certificate with a looser bound must give a reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchdali.tools.parity.case import Case
from torchdali.transforms import flatten


class Bound(NamedTuple):
    """The largest difference, the largest inside and the mean, in grey levels."""

    max_abs: float
    max_abs_interior: float
    mean_abs: float


NOTHING = Bound(0, 0, 0)
FREE = Bound(math.inf, math.inf, math.inf)
RESIZED = Bound(11, 1, 0.03)
WARPED = Bound(1, 1, 3e-4)
GREY_BLEND = Bound(1, 1, 0.02)

DESIGN: dict[str, Bound] = {
    **dict.fromkeys(("Resize", "RandomResizedCrop", "RandomResize", "RandomShortestSize", "ScaleJitter"), RESIZED),
    **dict.fromkeys(("RandomRotation", "RandomAffine", "RandomPerspective"), WARPED),
    **dict.fromkeys(
        (
            *("Identity", "ToImage", "ToPureTensor", "PILToTensor", "ToTensor", "ToDtype", "ConvertImageDtype"),
            *("CenterCrop", "RandomCrop", "Pad", "RandomZoomOut", "Paste", "FiveCrop", "TenCrop"),
            *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomSolarize", "RandomPosterize", "RandomInvert"),
            *("RandomAutocontrast", "Grayscale", "RandomGrayscale", "JPEG", "RandomErasing"),
            *("RandomChannelPermutation", "RGB"),
            *("ConvertBoundingBoxFormat", "ClampBoundingBoxes", "SetClampingMode", "ClampKeyPoints"),
        ),
        NOTHING,
    ),
    "GaussianBlur": Bound(1, 1, 1e-4),
    "RandomEqualize": Bound(1, 1, 0.14),
    "RandomAdjustSharpness": Bound(1, 1, 4e-4),
}
"""By the name of the class. Other classes have no promised bound."""

JITTER = {"brightness": NOTHING, "contrast": GREY_BLEND, "saturation": GREY_BLEND, "hue": Bound(1, 1, 1e-4)}
NORMALIZED = 7e-7
"""Of ``Normalize``, in normalized values."""
_ROUNDING = 1e-6
"""Of float32 sums in another order."""


def leaves(transform: Any) -> Iterator[Any]:
    """Yield the transforms in a chain, and those inside of others."""
    for leaf in flatten(transform):
        yield leaf
        yield from leaves(list(getattr(leaf, "transforms", ())))


def _bound(transform: Any) -> Bound:
    name = type(transform).__name__
    if name == "ColorJitter":
        used = [bound for part, bound in JITTER.items() if getattr(transform, part) is not None]
        return used[0] if len(used) == 1 else Bound(3, 3, 0.22) if used else NOTHING
    filtering = getattr(transform, "interpolation", "")
    if DESIGN.get(name) is RESIZED and str(getattr(filtering, "value", filtering)).startswith("nearest"):
        return NOTHING
    if DESIGN.get(name) is RESIZED and getattr(transform, "antialias", True) is False:
        return Bound(1, 1, 0.17)
    if name == "RandomErasing" and transform.value in (None, "random"):  # the bound of 0 is for constant values
        return FREE
    return DESIGN.get(name, FREE)


def design_bound(case: Case) -> Bound:
    """Return the promised bound of a case, in its values' units: the loosest of its transforms'."""
    transforms = list(leaves(case.chain))
    names = {type(transform).__name__ for transform in transforms}
    ignored = {"RandomApply", "RandomChoice", "RandomOrder", "MultiView", "Normalize"}
    bounds = [_bound(transform) for transform in transforms if type(transform).__name__ not in ignored]
    bound = Bound(*(max(column) for column in zip(NOTHING, *bounds, strict=True)))
    floating = "ToTensor" in names or any(getattr(transform, "scale", None) is True for transform in transforms)
    if floating or "ConvertImageDtype" in names:
        bound = Bound(*(value / 255 + _ROUNDING for value in bound))
    for transform in transforms:
        if type(transform).__name__ == "Normalize":
            deviation = min(float(value) for value in transform.std)
            exact = bound.max_abs <= _ROUNDING
            bound = Bound(*(NORMALIZED if exact else value / deviation for value in bound))
    return bound


def is_looser(case: Case) -> bool:
    """Return True if a bound of a case is looser than the promised one."""
    return any(own > promised for own, promised in zip(case[1:4], design_bound(case), strict=True))
