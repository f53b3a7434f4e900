"""Recognize image files by their first bytes and their names."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

__all__ = ["IMAGE_SUFFIXES", "is_encoded", "is_stored"]

_MAGIC = re.compile(
    rb"\xff\xd8\xff"  # JPEG
    rb"|\x89PNG\r\n\x1a\n"
    rb"|GIF8"
    rb"|BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0"  # the length of a bitmap's header
    rb"|II\*\0|MM\0\*"  # TIFF
    rb"|\0\0\0\x0cjP  "  # JPEG 2000
    rb"|P[1-6][\s#]"  # portable anymaps
    rb"|RIFF.{4}WEBP"
    rb"|.{4}ftypavi[fs]",
    re.DOTALL,
)
_START = 18
"""Bytes that tell what a file is."""

IMAGE_SUFFIXES = (*IMG_EXTENSIONS, ".gif", ".jp2", ".jpe")
"""Of image files, in lower case."""


def is_stored(node: Any) -> bool:
    """Return True for an image file as Hugging Face's ``datasets.Image(decode=False)`` returns it.

    Audio files look the same there, so the first bytes or the suffix must tell them apart.
    """
    if type(node) is not dict or len(cast("dict[Any, Any]", node)) != 2 or "bytes" not in node or "path" not in node:
        return False
    data, path = cast("Any", node["bytes"]), cast("Any", node["path"])
    if data is None and isinstance(path, str):  # a file within an archive is zip://cat/0.jpg::/data/train.zip
        return path.split("::")[0].lower().endswith(IMAGE_SUFFIXES)
    return is_encoded(data)


def is_encoded(leaf: Any) -> bool:
    """Return True if bytes, or an array of bytes, begin like an image file."""
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        start = bytes(cast("bytes", leaf)[:_START])
    elif isinstance(leaf, (np.ndarray, torch.Tensor)):
        array: Any = cast("Any", leaf)
        if array.ndim != 1 or array.dtype not in (np.uint8, torch.uint8):
            return False
        start = bytes(array[:_START].tolist())
    else:
        return False
    return _MAGIC.match(start) is not None
