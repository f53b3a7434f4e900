"""Augmentations that hide a part of an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from torchdali.transforms.augment.base import Augmentation, Range, parse_range


class GridMask(Augmentation):
    """Hide a grid of squares: GridMask Data Augmentation, https://arxiv.org/abs/2001.04086.

    Args:
        tile: Side of a tile in pixels, or its range. Each tile has one hidden square.
        ratio: Side of the square as a share of the tile's, or its range.
        angle: Angle of the grid in degrees, or its range.
        shift: Shift of the grid as a share of a tile, or its range. It is drawn for each of the two axes.
    """

    drawn = ("tile", "ratio", "angle", "shift_x", "shift_y")

    def __init__(self, tile: Range = 100, ratio: Range = 0.5, angle: Range = 0.0, shift: Range = (0.0, 1.0)) -> None:
        super().__init__()
        self.tile = parse_range("tile", tile, 1)
        self.ratio = parse_range("ratio", ratio, 0, 1)
        self.angle = parse_range("angle", angle)
        self.shift_x = self.shift_y = parse_range("shift", shift)

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        """See :class:`Augmentation`. The side of a tile is cut to whole pixels."""
        height, width = image.shape[-2:]
        tile, ratio = math.floor(params["tile"]), params["ratio"]
        cos, sin = (f(math.radians(params["angle"])) / tile for f in (math.cos, math.sin))
        y = torch.arange(height, dtype=torch.float32, device=image.device)[:, None]
        x = torch.arange(width, dtype=torch.float32, device=image.device)
        across, down = x * cos - y * sin - params["shift_x"], x * sin + y * cos - params["shift_y"]
        hidden = (across - across.floor() < ratio) & (down - down.floor() < ratio)
        return image.masked_fill(hidden, 0)
