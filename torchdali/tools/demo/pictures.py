"""Write a small image folder of real photographs: crops of the pictures in scikit-image's wheel."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

PICTURES = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
"""One class each. About half of them are grey, and are written as grey JPEGs."""

SPLITS = {"train": (0.0, 0.6), "val": (0.6, 1.0)}
"""Part of a picture's longer side from which each split takes its crops. No pixel is in both."""

SMALLEST, LARGEST = 96, 400


def draw_boxes(
    size: tuple[int, int], part: tuple[float, float], count: int, rng: np.random.Generator
) -> list[tuple[int, int, int, int]]:
    """Draw boxes ``(left, top, right, bottom)`` of varied size and shape inside one part of a picture.

    Args:
        size: Width and height of the picture.
        part: Start and end of the part, as fractions of the picture's longer side.
        count: Number of boxes.
        rng: Random generator.
    """
    longer = int(size[1] > size[0])
    start, stop = [0, 0], list(size)
    start[longer], stop[longer] = (round(edge * size[longer]) for edge in part)
    boxes: list[tuple[int, int, int, int]] = []
    for _ in range(count):
        sides = [int(rng.integers(SMALLEST, min(LARGEST, stop[i] - start[i]) + 1)) for i in (0, 1)]
        left, top = (int(rng.integers(start[i], stop[i] - sides[i] + 1)) for i in (0, 1))
        boxes.append((left, top, left + sides[0], top + sides[1]))
    return boxes


def write_pictures(root: Path, *, train: int, val: int, seed: int, tick: Callable[[int], None]) -> None:
    """Write ``root/{train,val}/<picture>/<number>.jpg`` for ImageFolder. Overwrite files, but delete none.

    Args:
        root: The folder. It is made if it is missing.
        train: Number of crops of each picture for training.
        val: Number of crops of each picture for validation.
        seed: Seed of the crops.
        tick: Called with the number of files just written.
    """
    rng = np.random.default_rng(seed)
    for name in PICTURES:
        picture = Image.open(BytesIO((files("skimage") / "data" / name).read_bytes()))
        for split, count in {"train": train, "val": val}.items():
            folder = root / split / Path(name).stem
            folder.mkdir(parents=True, exist_ok=True)
            for number, box in enumerate(draw_boxes(picture.size, SPLITS[split], count, rng)):
                picture.crop(box).save(folder / f"{number:03}.jpg", quality=int(rng.integers(75, 96)))
                tick(1)
