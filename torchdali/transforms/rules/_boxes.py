"""Boxes of random area and aspect ratio: what RandomResizedCrop keeps and RandomErasing erases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray

__all__ = ["ATTEMPTS", "random_boxes"]

ATTEMPTS = 10

Floats = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]


def random_boxes(
    draws: Draws,
    size: IntArray,
    scale: Sequence[float],
    ratio: Sequence[float],
    tall: bool,
    fits: Callable[[Floats, Floats], Mask],
) -> tuple[IntArray, IntArray, Mask]:
    """For each image the first of ten random boxes that fits.

    Args:
        draws: The random numbers of the images.
        size: ``(N, 2)`` their heights and widths.
        scale: Least and most of the share of the image's area.
        ratio: Least and most aspect ratio; its logarithm is uniform.
        tall: Whether a ratio is height by width, and not width by height.
        fits: Whether boxes do, ``(N, 10)``, given their heights and widths.

    Returns:
        ``(N, 2)`` tops and lefts, ``(N, 2)`` heights and widths, and for which images there is a box.
    """
    low, high = scale
    log_low, log_high = np.log(np.asarray(ratio, np.float64))
    u = draws.uniform(2 * ATTEMPTS + 2)
    area = size[:, :1] * size[:, 1:] * (low + (high - low) * u[:, :ATTEMPTS])
    drawn = np.exp(log_low + (log_high - log_low) * u[:, ATTEMPTS : 2 * ATTEMPTS])
    sides = np.rint(np.sqrt(area * drawn)), np.rint(np.sqrt(area / drawn))
    height, width = sides if tall else sides[::-1]
    fitting = fits(height, width)
    first = np.arange(0, fitting.size, ATTEMPTS) + np.argmax(fitting, axis=1)
    shape = np.stack((height.reshape(-1)[first], width.reshape(-1)[first]), axis=1).astype(np.int64)
    start = np.floor(u[:, -2:] * (size - shape + 1)).astype(np.int64)
    return start, shape, fitting.reshape(-1)[first]
