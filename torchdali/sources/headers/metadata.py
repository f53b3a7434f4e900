"""The metadata of image files: the EXIF orientation that ``PIL.ImageOps.exif_transpose`` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import PIL.Image
from PIL import ExifTags, ImageOps

__all__ = [
    "find_in_exif",
    "has_late_metadata",
    "has_png_orientation",
    "has_xmp_orientation",
    "is_sideways",
    "read_orientation",
    "turn_info",
]

_TAG = int(ExifTags.Base.Orientation)
_SHORT = 3
_TYPE_BYTES = {1: 1, 2: 1, _SHORT: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_KEYS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")


def is_sideways(orientation: int) -> bool:
    """Return whether an orientation swaps height and width."""
    return orientation >= 5


def read_orientation(info: dict[Any, Any]) -> int:
    """Return the orientation, 1 to 8, in the ``info`` of an image that was converted. 1 is upright.

    Raises:
        SyntaxError, ValueError, struct.error: The EXIF data is damaged. ``exif_transpose`` raises the same.
    """
    image = PIL.Image.new("L", (1, 1))
    image.info = info
    orientation = image.getexif().get(_TAG, 1)
    return orientation if orientation in range(1, 9) else 1


def turn_info(mode: str, info: dict[Any, Any]) -> dict[Any, Any]:
    """Return the ``info`` of a PIL image after ``exif_transpose``: it names no orientation any more."""
    image = PIL.Image.new(mode, (1, 1))
    image.info = dict(info)
    return ImageOps.exif_transpose(image).info


def find_in_exif(exif: bytes, length: int) -> int | None:
    """Return the orientation in EXIF data: 0 if there is none, None if DALI and PIL may read another one.

    Args:
        exif: A TIFF file (TIFF 6.0, section 2), or its beginning. Its first directory has the orientation.
        length: Bytes of the whole.
    """
    order: Any = {b"II*\0": "little", b"MM\0*": "big"}.get(exif[:4])
    start = int.from_bytes(exif[4:8], order) if order else len(exif)
    count = int.from_bytes(exif[start : start + 2], order) if order else 0
    end = start + 2 + 12 * count
    if end > len(exif):
        return None
    orientation = 0
    for i in range(start + 2, end, 12):
        tag, kind = (int.from_bytes(exif[j : j + 2], order) for j in (i, i + 2))
        number, value = (int.from_bytes(exif[j : j + 4], order) for j in (i + 4, i + 8))
        size = number * _TYPE_BYTES.get(kind, length + 1)
        if size > 4 and value + size > length:  # PIL may stop here
            return None
        if tag == _TAG:
            value = int.from_bytes(exif[i + 8 : i + 10], order)
            if orientation or kind != _SHORT or number != 1 or not 1 <= value <= 8:
                return None
            orientation = value
    return orientation


def has_xmp_orientation(read: Callable[[int], bytes], start: int, end: int) -> bool:
    """Return whether the XMP data in a part of a file names an orientation. ``read`` as for ``header.py``."""
    data = b""
    while start + len(data) < end and (more := read(start + len(data))):
        data += more
    return b"tiff:Orientation" in data[: end - start]


def has_png_orientation(read: Callable[[int], bytes]) -> bool:
    """Return whether a PNG has a chunk that may name an orientation."""
    return any(
        kind == b"eXIf" or (kind in _PNG_TEXTS and data.startswith(_PNG_KEYS)) for kind, data in _iterate_chunks(read)
    )


def has_late_metadata(image: Any) -> bool:
    """Return whether PIL completes the ``info`` of an opened image only when it decodes the pixels."""
    if image.format != "PNG":
        return image.format == "WEBP"
    kinds = [kind for kind, _ in _iterate_chunks(lambda offset: _read_at(image.fp, offset))]
    return any(kind not in (b"IDAT", b"IEND") for kind in kinds[kinds.index(b"IDAT") :]) if b"IDAT" in kinds else False


def _iterate_chunks(read: Callable[[int], bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the type of each chunk of a PNG, and the first bytes of its data."""
    offset = 8
    while len(chunk := read(offset)) >= 8:
        yield chunk[4:8], chunk[8:]
        offset += 12 + int.from_bytes(chunk[:4], "big")


def _read_at(file: Any, offset: int) -> bytes:
    """Return some bytes from an offset on. The file stays where it is."""
    position = file.tell()
    file.seek(offset)
    try:
        return file.read(8)
    finally:
        file.seek(position)
