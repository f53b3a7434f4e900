"""Mask files: PNGs whose values, and not their colours, are the mask.

DALI decodes the palette of a PNG to colours. Its header is therefore rewritten: a grey PNG has the indices as values.
Parts that would change the values are left out: a palette, transparency, gamma and colour profiles.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors

from torchdali.sources.headers.header import PNG_SIGNATURE, max_pixels
from torchdali.transforms.targets.stored import EncodedMask

__all__ = ["decode_mask", "read_mask"]

_GREY, _PALETTE = 0, 3
_SCALES = {(_PALETTE, 1): 255, (_PALETTE, 8): 1, (_GREY, 8): 1, (_GREY, 16): 1}
"""By colour type and bits: how decoders stretch the values of a grey PNG. PIL decodes all others.

Of 2 and 4 bits DALI 2.4 makes 0 and 255 on a GPU (no issue is known).
"""
_open: Callable[..., Any] = PIL.Image.open


def read_mask(file: str | os.PathLike[str] | bytes) -> EncodedMask | tv_tensors.Mask:
    """Read a mask file as ``tv_tensors.Mask(PIL.Image.open(file))`` would: ``(1, H, W)`` for palette and grey images.

    Args:
        file: A path, or the bytes of a file.

    Returns:
        An encoded mask if DALI decodes it to the same values, else the mask. PIL reads damaged files, too.

    Raises:
        OSError: The file is missing or damaged. PIL raises other exceptions for some files, see ``UNREADABLE``.
    """
    data = file if isinstance(file, bytes) else Path(file).read_bytes()
    mask = _parse(data)
    if mask is not None:
        return mask
    with _open(io.BytesIO(data)) as image:
        return tv_tensors.Mask(image)


def decode_mask(mask: EncodedMask) -> torch.Tensor:
    """Return ``(1, H, W)`` what DALI would put out for an encoded mask, by PIL: its values, times its scale."""
    with _open(io.BytesIO(mask.data.tobytes())) as image:
        # PIL alone makes no 8 bits of one.
        grey = image.convert("L") if image.mode == "1" else image
        return tv_tensors.Mask(grey).as_subclass(torch.Tensor)


def _parse(data: bytes) -> EncodedMask | None:
    """Return the mask of a PNG, or None if PIL must decode it. A PNG with a wrong checksum is damaged."""
    if not data.startswith(PNG_SIGNATURE):
        return None
    view, offset, kinds, pixels = memoryview(data), len(PNG_SIGNATURE), list[bytes](), list[memoryview]()
    header: tuple[int, ...] = ()
    while not kinds or kinds[-1] != b"IEND":
        end = offset + 12 + int.from_bytes(view[offset : offset + 4], "big")
        kind = bytes(view[offset + 4 : offset + 8])
        if end > len(data) or zlib.crc32(view[offset + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            return None
        if kind == b"IHDR" and end - offset == 25:
            header = struct.unpack(">IIBBBBB", view[offset + 8 : end - 4])
        elif kind == b"IDAT":
            pixels.append(view[offset:end])
        kinds.append(kind)
        offset = end
    # Chunks that decoders must know begin with a capital letter. acTL is that of an animation.
    others = {kind for kind in kinds[1:] if kind[:1].isupper()} - {b"PLTE", b"IDAT", b"IEND"}
    first = kinds.index(b"IDAT") if pixels else 0
    is_split = kinds[first : first + len(pixels)] != [b"IDAT"] * len(pixels)
    if not header or kinds[0] != b"IHDR" or others or b"acTL" in kinds or not pixels or is_split:
        return None
    width, height, bits, colour, *methods = header
    if (colour, bits) not in _SCALES or any(methods) or not 0 < height * width <= max_pixels():
        return None
    if bits > 8:
        with _open(io.BytesIO(data)) as image:
            if image.mode != "I;16":  # older versions of Pillow have 32 bits here
                return None
    start = b"IHDR" + struct.pack(">IIBBBBB", width, height, bits, _GREY, 0, 0, 0)
    start = PNG_SIGNATURE + struct.pack(">I", 13) + start + struct.pack(">I", zlib.crc32(start))
    encoded = np.frombuffer(b"".join((start, *pixels, view[offset - 12 : offset])), np.uint8)
    dtype = torch.uint8 if bits <= 8 else torch.uint16
    return EncodedMask(encoded, (1, height, width), dtype, _SCALES[colour, bits])
