"""Ways to damage an image file, and the sample that takes a bad one's row."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from conftest import encoded


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def shortened(kind: str, part: float, **options: Any) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        with PIL.Image.open(path) as image:
            data = encoded(image.convert("RGB"), kind, **options)
        path.write_bytes(data[: round(part * len(data))])

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(np.random.default_rng(0).bytes(2000)),
    "garbage after a JPEG's first bytes": lambda path: path.write_bytes(path.read_bytes()[:30] + bytes(2000)),
    "truncated JPEG": shortened("JPEG", 0.7),
    "JPEG without its last bytes": shortened("JPEG", 0.98),
    "truncated progressive JPEG": shortened("JPEG", 0.9, progressive=True),
    "truncated PNG": shortened("PNG", 0.7),
    "truncated BMP": shortened("BMP", 0.7),
    "truncated WEBP": shortened("WEBP", 0.7),
    "truncated GIF": shortened("GIF", 0.7),
    "header alone": shortened("JPEG", 0.2),
    "empty": lambda path: path.write_bytes(b""),
    "vanished": Path.unlink,
    "directory": directory,
    "dangling link": lambda path: (path.unlink(), path.symlink_to(path.parent / "nowhere")),
}


def next_good(labels: list[int], row: int, bad: Container[int]) -> int:
    """Return the label of the sample that skipping puts into a row: the next good one of the batch."""
    after = labels[row:] + labels[:row]
    return next(label for label in after if label not in bad)
