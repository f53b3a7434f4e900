"""Photographs for the certificate: crops of those in scikit-image's wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import skimage.data
from PIL import Image
from torchvision.datasets import ImageFolder

COUNT = 12
SMALLEST, LARGEST = 120, 260
_NAMES = ("astronaut", "coffee", "chelsea", "rocket")


def photographs() -> dict[str, npt.NDArray[np.uint8]]:
    """Return four photographs, RGB, of 300 to 640 pixels a side, by name."""
    return {name: getattr(cast("Any", skimage.data), name)() for name in _NAMES}


def write_photographs(root: Path) -> ImageFolder:
    """Write twelve crops of different sizes, and return the folder as a dataset.

    They are PNGs, which all decoders decode alike, so that every difference is the transforms'.
    """
    (root / "all").mkdir(parents=True)
    rng = np.random.default_rng(0)
    pictures = list(photographs().values())
    for i in range(COUNT):
        sides: list[int] = rng.integers(SMALLEST, LARGEST, 2).tolist()
        height, width = sides
        picture = pictures[i % len(pictures)]
        rows, columns, _ = cast("tuple[int, int, int]", picture.shape)
        top, left = int(rng.integers(0, rows - height)), int(rng.integers(0, columns - width))
        Image.fromarray(picture[top : top + height, left : left + width]).save(root / "all" / f"{i:02}.png")
    return ImageFolder(root)
