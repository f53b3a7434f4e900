"""The base class of DALI's augmentations."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import PIL.Image
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2 as annotated_v2

v2 = cast("Any", annotated_v2)  # partly untyped, as these
_functional, wrap = v2.functional, cast("Any", tv_tensors.wrap)

Range = float | Sequence[float]
"""A number, or the ends of a range from which a number is drawn uniformly."""


def parse_range(name: str, value: Range, least: float = -math.inf, most: float = math.inf) -> tuple[float, float]:
    """Return both ends of a range.

    Raises:
        ValueError: It is neither a number nor a pair (low, high), or it leaves the bounds.
    """
    ends = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(ends) != 2 or not least <= ends[0] <= ends[1] <= most or math.isinf(ends[0]) or math.isinf(ends[1]):
        bounds = "" if least == -math.inf else f" of at least {least:g}"
        bounds += "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be a number or a pair (low, high){bounds}, got {value!r}")
    return float(ends[0]), float(ends[1])


def draw_ranges(transform: Any) -> dict[str, float]:
    """Draw a number from each range of a transform: from each attribute that is named in ``drawn``."""
    ranges = {name: getattr(transform, name) for name in transform.drawn}
    return {name: low + (high - low) * float(torch.rand(())) for name, (low, high) in ranges.items()}


class Augmentation(v2.Transform):
    """A transform of pixels. It leaves boxes, masks and key points as they are.

    It takes tensors of ``(..., C, H, W)``, ``tv_tensors.Image``, ``tv_tensors.Video`` and PIL images, and returns the
    same type. The frames of a video share the random numbers.

    Attributes:
        drawn: Names of the attributes that are ranges. A number of each is drawn for a sample.
    """

    _transformed_types = (v2._utils.is_pure_tensor, PIL.Image.Image, tv_tensors.Image, tv_tensors.Video)  # noqa: SLF001

    drawn: ClassVar[tuple[str, ...]] = ()

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a number from each range."""
        return draw_ranges(self)

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Apply the transform to one input."""
        if isinstance(inpt, PIL.Image.Image):
            return _functional.to_pil_image(self.apply(_functional.pil_to_tensor(inpt), params))
        image = self.apply(inpt.as_subclass(torch.Tensor), params)
        return wrap(image, like=inpt) if isinstance(inpt, tv_tensors.TVTensor) else image

    @abstractmethod
    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        """Return the transformed image.

        Args:
            image: ``(..., C, H, W)``.
            params: The drawn numbers.
        """


def convert_to(image: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round and clamp float values if the type is an integer one, as DALI does."""
    if dtype.is_floating_point:
        return image.to(dtype)
    return (image + 0.5).floor().clamp(0, torch.iinfo(dtype).max).to(dtype)
