"""Augmentations that take each pixel from another place of the image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode

from torchdali.transforms.augment.base import Augmentation, Range, convert_to, parse_range


class Displacement(Augmentation):
    """The base class of transforms that move pixels.

    Args:
        interpolation: ``InterpolationMode.NEAREST`` or ``BILINEAR``.
        fill: Value of pixels that come from outside of the image.
    """

    def __init__(self, interpolation: InterpolationMode = InterpolationMode.NEAREST, fill: float = 0.0) -> None:
        super().__init__()
        if interpolation not in (InterpolationMode.NEAREST, InterpolationMode.BILINEAR):
            raise ValueError(f"interpolation must be NEAREST or BILINEAR, got {interpolation!r}")
        self.interpolation, self.fill = interpolation, float(fill)

    def check_inputs(self, flat_inputs: list[Any]) -> None:
        """Refuse a sample with targets that would have to move."""
        moving = (tv_tensors.BoundingBoxes, tv_tensors.Mask, getattr(tv_tensors, "KeyPoints", tv_tensors.Mask))
        if found := [x for x in flat_inputs if isinstance(x, moving)]:
            raise TypeError(
                f"{type(self).__name__} does not move {type(found[0]).__name__}; leave it out of this chain"
            )

    @abstractmethod
    def find_sources(self, height: int, width: int, params: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(H, W)`` x and y of the place that each pixel is taken from; a pixel's centre is at .5."""

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        """See :class:`Augmentation`."""
        height, width = image.shape[-2:]
        x, y = (place.to(image.device) for place in self.find_sources(height, width, params))
        if self.interpolation is InterpolationMode.NEAREST:
            inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
            moved = image[..., y.floor().long().clamp(0, height - 1), x.floor().long().clamp(0, width - 1)]
            return moved.masked_fill(~inside, self.fill)
        grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], -1)[None]
        values = image.reshape(1, -1, height, width).float() - self.fill
        moved = torch.nn.functional.grid_sample(values, grid, "bilinear", "zeros", align_corners=False) + self.fill
        return convert_to(moved.reshape(image.shape), image.dtype)


class Water(Displacement):
    """Move pixels along waves, as seen through water.

    A pixel (x, y) comes from ``(x + amplitude_x * sin(frequency_x * y + phase_x),
    y + amplitude_y * cos(frequency_y * x + phase_y))``.

    Args:
        amplitude: Height of the waves in pixels, along x and y.
        frequency: Angle in radians by which a wave advances in a pixel, along x and y.
        phase: Angle in radians at the first pixel, or its range. It is drawn for each of the two axes.
        interpolation: ``InterpolationMode.NEAREST`` or ``BILINEAR``.
        fill: Value of pixels that come from outside of the image.
    """

    drawn = ("phase_x", "phase_y")

    def __init__(
        self,
        amplitude: tuple[float, float] = (10.0, 10.0),
        frequency: tuple[float, float] = (0.049087, 0.049087),
        phase: Range = 0.0,
        interpolation: InterpolationMode = InterpolationMode.NEAREST,
        fill: float = 0.0,
    ) -> None:
        super().__init__(interpolation, fill)
        self.amplitude = tuple(float(x) for x in amplitude)
        self.frequency = tuple(float(x) for x in frequency)
        self.phase_x = self.phase_y = parse_range("phase", phase)

    def find_sources(self, height: int, width: int, params: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Displacement`."""
        y, x = torch.arange(height, dtype=torch.float32)[:, None], torch.arange(width, dtype=torch.float32)[None]
        from_x = x + self.amplitude[0] * torch.sin(self.frequency[0] * y + params["phase_x"])
        from_y = y + self.amplitude[1] * torch.cos(self.frequency[1] * x + params["phase_y"])
        return from_x, from_y


class Sphere(Displacement):
    """Bend the image over a sphere, as DALI's ``sphere``.

    Args:
        interpolation: ``InterpolationMode.NEAREST`` or ``BILINEAR``.
        fill: Value of pixels that come from outside of the image.
    """

    def find_sources(self, height: int, width: int, params: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Displacement`."""
        del params
        y = torch.arange(height, dtype=torch.float32)[:, None] + 0.5 - height / 2
        x = torch.arange(width, dtype=torch.float32)[None] + 0.5 - width / 2
        radius = torch.sqrt(x * x + y * y) / int(max(height, width) / 2)
        return width / 2 + radius * x, height / 2 + radius * y
