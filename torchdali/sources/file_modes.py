"""The modes of image files. Some datasets do not convert their images to RGB."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import PIL.Image

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.headers.header import FRAMES, HEADER_BYTES, PNG_SIGNATURE

__all__ = ["check_modes"]

_SCAN_THREADS = 16
_CHUNK = 256

_open: Callable[..., Any] = PIL.Image.open


def check_modes(name: str, paths: list[Any]) -> None:
    """Raise UnsupportedDatasetError if a file is not RGB. The dataset keeps the mode of its files."""

    def check(start: int) -> None:
        for path in paths[start : start + _CHUNK]:
            mode = _read_mode(path)
            if mode not in (None, "RGB"):
                raise UnsupportedDatasetError(
                    f"{name} keeps the mode of its files, and that of {path} is {mode}; its samples differ in "
                    "channels, as in DataLoader"
                )

    with ThreadPoolExecutor(_SCAN_THREADS) as threads:
        for _ in threads.map(check, range(0, len(paths), _CHUNK)):
            pass


def _read_mode(path: Any) -> str | None:
    """Return PIL's mode of a file, or None if it cannot be read. Its sample then raises when it is due."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            if _has_three_channels(file.read(HEADER_BYTES)):
                return "RGB"
        with _open(path) as image:
            return image.mode
    except OSError:
        return None


def _has_three_channels(start: bytes) -> bool:
    """Return whether a PNG or JPEG is RGB for PIL. Return False also if its first bytes do not tell."""
    if start.startswith(PNG_SIGNATURE):
        return start[24:26] == b"\x08\x02"
    offset = 2
    while start[offset : offset + 1] == b"\xff" and offset + 10 <= len(start):
        if start[offset + 1] in FRAMES:
            return start[offset + 9] == 3
        offset += 2 + int.from_bytes(start[offset + 2 : offset + 4], "big")
    return False
