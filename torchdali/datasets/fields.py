"""The parts of a sample other than its image, decoded by their suffix as webdataset decodes them."""

from __future__ import annotations

import io
import json
from typing import Any, cast

import numpy as np
import PIL.Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from torchdali.datasets.shards import Bytes

__all__ = ["IMAGE_SUFFIXES", "decode_field", "is_integer_part", "open_rgb"]

IMAGE_SUFFIXES = frozenset(suffix.removeprefix(".") for suffix in (*IMG_EXTENSIONS, ".gif", ".jp2", ".jpe"))

_INTEGERS = frozenset(("cls", "cls2", "class", "count", "index", "inx", "id"))
_TEXTS = frozenset(("txt", "text", "transcript"))
_JSON = frozenset(("json", "jsn"))


def open_rgb(data: Bytes | bytes) -> Any:
    """Return the image of a file in memory, as torchvision's default loader opens files."""
    with cast("Any", PIL.Image).open(io.BytesIO(cast("Any", data))) as image:
        return image.convert("RGB")


def is_integer_part(name: str) -> bool:
    """Return whether a part is decoded to an integer, by the suffix of its name."""
    return name.rpartition(".")[2] in _INTEGERS


def decode_field(name: str, data: bytes) -> Any:
    """Decode a part of a sample.

    Args:
        name: Its name, whose last suffix tells what it is: integers such as ``cls``, texts, JSON, numpy's ``npy`` and
            ``npz`` without Python objects, or an image, which keeps its mode. Others stay bytes. Pickles do, too,
            because loading one runs code.
        data: Its bytes.

    Raises:
        ValueError: It is damaged.
    """
    suffix = name.rpartition(".")[2]
    if suffix in _INTEGERS:
        return int(data)
    if suffix in _TEXTS:
        return data.decode()
    if suffix in _JSON:
        return json.loads(data)
    if suffix == "npy":
        return np.load(io.BytesIO(data), allow_pickle=False)
    if suffix == "npz":
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)
    if suffix in IMAGE_SUFFIXES:
        with cast("Any", PIL.Image).open(io.BytesIO(data)) as image:
            image.load()
            return image.copy()
    return data
