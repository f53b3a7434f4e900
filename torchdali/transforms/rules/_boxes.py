"""Boxes of random area and aspect ratio, for RandomResizedCrop and RandomErasing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray

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
    """Return the first of ten random boxes that fits, for each image.

    Args:
        draws: The random numbers of the images.
        size: ``(N, 2)`` heights and widths of the images, in pixels.
        scale: Least and greatest share of the image's area.
        ratio: Least and greatest aspect ratio. Its logarithm is uniform.
        tall: Whether a ratio is height by width; else it is width by height.
        fits: Function of ``(N, 10)`` heights and widths that returns which boxes fit.

    Returns:
        ``(N, 2)`` tops and lefts, ``(N, 2)`` heights and widths, and ``(N,)`` which images have a box that fits.
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
