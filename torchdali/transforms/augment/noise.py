"""Augmentations that add noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.augment.base import Augmentation, Range, convert_to, parse_range, v2


class SaltAndPepper(Augmentation):
    """Make random pixels white or black, in all channels.

    Args:
        p: Probability for a pixel, or its range.
        salt: Share of these pixels that become white, or its range.
    """

    drawn = ("p", "salt")

    def __init__(self, p: Range = 0.05, salt: Range = 0.5) -> None:
        super().__init__()
        self.p = parse_range("p", p, 0, 1)
        self.salt = parse_range("salt", salt, 0, 1)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a number from each range, and one for each pixel."""
        height, width = v2._utils.query_size(flat_inputs)  # noqa: SLF001
        return {**super().make_params(flat_inputs), "uniform": torch.rand(height, width)}

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        white = 1.0 if image.is_floating_point() else 255.0
        uniform = params["uniform"].to(image.device)
        noisy = image.masked_fill(uniform < params["p"], 0)
        return noisy.masked_fill(uniform < params["p"] * params["salt"], white)


class ShotNoise(Augmentation):
    """Add noise as of photons that are counted: a value becomes ``factor * Poisson(value / factor)``.

    Each frame of a video gets noise of its own.

    Args:
        factor: The value of one photon, of 255 for uint8 and of 1 for floats, or its range. 0 adds no noise.
    """

    drawn = ("factor",)

    def __init__(self, factor: Range = 20.0) -> None:
        super().__init__()
        self.factor = parse_range("factor", factor, 0)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the factor, and tell what draws a number of photons for each of their means."""
        return {**super().make_params(flat_inputs), "count": torch.poisson}

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        factor = params["factor"]
        if not factor:
            return image
        values = F.to_dtype(image, torch.float32, scale=False)
        return convert_to(params["count"](values.clamp(min=0) / factor) * factor, image.dtype)
