"""An image file's size, and whether DALI decodes it as PIL does, from its first bytes.

Reading a JPEG's header this way takes about six microseconds of one core. So an epoch can know the size of every image
before it is decoded. PIL opens files of any other kind, and reads no pixels either.
"""

from __future__ import annotations

import errno
import io
import math
import os
import stat
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL.Image

from torchdali.sources.headers.metadata import (
    find_in_exif,
    has_late_metadata,
    has_png_orientation,
    has_xmp_orientation,
    is_sideways,
    read_orientation,
)
from torchdali.sources.headers.plain import parse_plain

__all__ = [
    "APP1",
    "ENDS",
    "FRAMES",
    "HEADER_BYTES",
    "OPEN_FLAGS",
    "PNG_SIGNATURE",
    "SCAN",
    "UNREADABLE",
    "Header",
    "error_text",
    "is_system_fault",
    "max_pixels",
    "open_file",
    "parse_header",
    "read_header",
]

UNREADABLE = (
    *(OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError),
    *(RuntimeError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error, MemoryError),
)
"""The exceptions of PIL for files that are no image, or damaged: a damaged length may need more memory than there is.
"""

_SYSTEM_FAULTS = {
    getattr(errno, name)
    for name in (
        *("EMFILE", "ENFILE", "ENOMEM", "EIO", "ESTALE", "EREMOTEIO", "ENOTCONN", "ECONNRESET", "EHOSTDOWN"),
        *("EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
    )
    if hasattr(errno, name)
}


def is_system_fault(error: BaseException | None) -> bool:
    """Return whether the system, the storage or a signal handler is at fault, and not a file.

    A ``TimeoutError`` comes from the storage, or from a signal handler that limits the time of a step.
    """
    return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _SYSTEM_FAULTS)


_open: Callable[..., Any] = PIL.Image.open

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""How files are opened that may be anything: a pipe without a writer would block."""
HEADER_BYTES = 2048
"""Number of bytes that are read first of a file."""

FRAMES = (0xC0, 0xC1, 0xC2)
"""JPEG markers of the frames that DALI decodes: baseline, extended and progressive."""
ENDS = (*sorted({*range(0xC3, 0xD0)} - {0xC4, 0xC8, 0xCC}), 0xD9)
"""JPEG markers of other frames, and of the end of the image."""
SCAN = 0xDA
APP1 = 0xE1
"""JPEG marker of EXIF and XMP data."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Header(NamedTuple):
    """The header of an image file.

    Attributes:
        height: Height in pixels, after a turn by ``orientation``.
        width: Width in pixels.
        length: Length of the file in bytes.
        jpeg: Whether the file is a JPEG.
        native: Whether DALI decodes the file to the pixels of ``PIL.Image.convert("RGB")``. Only JPEG, PNG, WebP, BMP,
            PPM and TIFF files can be native. CMYK, 16-bit, transparent and animated images are not.
        baseline: Whether the file is a baseline JPEG, which JPEG engines decode.
        modified: Time of the file's last modification in nanoseconds; 0 for bytes in memory.
        orientation: EXIF orientation, 1 to 8. It is 1 if it was not asked for: ``ImageFolder`` ignores it.
    """

    height: int
    width: int
    length: int
    jpeg: bool
    native: bool
    baseline: bool = False
    modified: int = 0
    orientation: int = 1


def error_text(error: BaseException) -> str:
    """Return the text of an exception of ``UNREADABLE``, without the name of the file or its address in memory."""
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    return "cannot identify image file" if isinstance(error, PIL.UnidentifiedImageError) else str(error)


def max_pixels() -> int:
    """Return the most pixels that PIL opens. It raises ``DecompressionBombError`` for a larger image."""
    return 2 * PIL.Image.MAX_IMAGE_PIXELS if PIL.Image.MAX_IMAGE_PIXELS else sys.maxsize


def open_file(path: str | bytes) -> tuple[int, os.stat_result]:
    """Open a file for reading. Return its descriptor, which the caller must close, and its status.

    Raises:
        OSError: The file cannot be opened, or is a pipe or a device.
    """
    file = os.open(path, OPEN_FLAGS)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise OSError("it is no regular file")
    return file, status


def read_file(path: str) -> tuple[npt.NDArray[np.uint8], int]:
    """Return a file's bytes, and the time of its last modification before it was read, in nanoseconds.

    Raises:
        OSError: The file cannot be read, or is a pipe or a device.
    """
    file, status = open_file(path)
    try:
        data: npt.NDArray[np.uint8] = np.empty(status.st_size, np.uint8)
        filled = 0
        while filled < len(data) and (count := os.readv(file, [data[filled:].data])):
            filled += count
    finally:
        os.close(file)
    return data[:filled], status.st_mtime_ns


def read_header(path: str, adjust_orientation: bool = False) -> Header:
    """Read the header of an image file.

    Args:
        path: The file.
        adjust_orientation: Whether decoders turn the image by its EXIF orientation.

    Raises:
        OSError: The file cannot be read, or PIL does not know its format (``PIL.UnidentifiedImageError``).
    """
    file, status = open_file(path)
    try:
        header = _parse(lambda offset: os.pread(file, HEADER_BYTES, offset), status.st_size, adjust_orientation)
    finally:
        os.close(file)
    header = header or _read_with_pil(path, status.st_size, adjust_orientation)
    return header._replace(modified=status.st_mtime_ns)


def parse_header(encoded: memoryview, adjust_orientation: bool = False) -> Header:
    """Read the header of an image file in memory.

    Args:
        encoded: The file.
        adjust_orientation: As for :func:`read_header`.

    Raises:
        OSError: PIL does not know the format.
    """
    header = _parse(lambda offset: bytes(encoded[offset : offset + HEADER_BYTES]), len(encoded), adjust_orientation)
    return header or _read_with_pil(io.BytesIO(encoded), len(encoded), adjust_orientation)


def _parse(read: Callable[[int], bytes], length: int, adjust_orientation: bool) -> Header | None:
    """Return the header, or None if only PIL can read it. ``read`` returns the bytes from an offset on."""
    start = read(0)
    if start.startswith(b"\xff\xd8\xff"):
        header = _parse_jpeg(read, start, length, adjust_orientation)
        if header and is_sideways(header.orientation):
            return header._replace(height=header.width, width=header.height)
        return header
    if start.startswith(PNG_SIGNATURE) and start[12:16] == b"IHDR":
        header = _parse_png(start, length)
        return None if header and adjust_orientation and has_png_orientation(read) else header
    if (size := parse_plain(read, start, length)) and math.prod(size) <= max_pixels():
        return Header(*size, length, jpeg=False, native=True)
    return None


LARGE_CHUNK = 2**24
"""Bytes of a chunk that a PNG of any length may have: headers of many files are parsed without their lengths."""


def has_png_chunks_within(start: bytes, most: int) -> bool:
    """Return whether each chunk that begins in a PNG's first bytes ends within the file's first ``most`` bytes.

    DALI 2.4 makes room for a chunk before it reads it: gigabytes for a file of 120 bytes, if its length is damaged. We
    know no issue about it, and no version that mends it.
    """
    offset = len(PNG_SIGNATURE)
    while offset + 8 <= len(start):
        offset += 12 + int.from_bytes(start[offset : offset + 4], "big")
        if offset > most:
            return False
    return True


def _parse_png(start: bytes, length: int) -> Header | None:
    width, height = int.from_bytes(start[16:20], "big"), int.from_bytes(start[20:24], "big")
    native = start[24:25] == b"\x08" and start[25:26] in (b"\0", b"\2", b"\3")
    native = native and b"acTL" not in start  # DALI may decode the second image of an animated PNG
    native = native and has_png_chunks_within(start, max(length, LARGE_CHUNK))
    native = native and start.count(b"IHDR") == 1  # PIL takes the last of two, and DALI refuses the file
    return Header(height, width, length, False, True) if native and 0 < height * width <= max_pixels() else None


def _parse_jpeg(read: Callable[[int], bytes], start: bytes, length: int, adjust_orientation: bool) -> Header | None:
    """Follow the markers (ITU-T T.81, annex B) up to the first scan.

    The first frame header is not enough. DALI 2.4 takes the last of two, with another size and precision. It may crash.
    We know no issue about it, and no version that mends it.
    """
    offset, adobe_rgb = 2, False
    orientation: int | None = None
    has_xmp = False
    header: Header | None = None
    window, window_offset = start, 0
    while True:
        if offset + 20 > window_offset + len(window):
            window, window_offset = read(offset), offset
        i = offset - window_offset
        if i + 4 > len(window) or window[i] != 0xFF:
            return None
        marker = window[i + 1]
        if marker == 0:  # no marker (T.81, B.1.1.2): DALI refuses the file, and PIL reads on
            return None
        if marker == 0xFF:  # padding before a marker
            offset += 1
            continue
        body = i + 4
        if marker == SCAN:
            is_for_pil = adobe_rgb or (has_xmp and not orientation)  # PIL looks at XMP data if EXIF names none
            return header._replace(orientation=orientation or 1) if header and not is_for_pil else None
        if marker == APP1 and adjust_orientation:
            end = offset + 2 + int.from_bytes(window[i + 2 : i + 4], "big")
            if window[body : body + 6] == b"Exif\0\0":
                if orientation is not None:  # PIL joins several parts
                    return None
                size = max(end - offset - 10, 0)
                orientation = find_in_exif(read(offset + 10)[:size], size)
                if orientation is None:
                    return None
            elif window[body : body + 4] == b"http":
                has_xmp = has_xmp or has_xmp_orientation(read, offset, end)
        if marker in FRAMES and body + 12 <= len(window):
            if header:
                return None
            depth, components = window[body], window[body + 5]
            height = int.from_bytes(window[body + 1 : body + 3], "big")
            width = int.from_bytes(window[body + 3 : body + 5], "big")
            has_rgb_names = components == 3 and bytes(window[body + 6 : body + 14 : 3]) == b"RGB"
            native = depth == 8 and components in (1, 3) and not (adobe_rgb or has_rgb_names)
            # A height of 0 means that the height follows the pixels (T.81, B.2.5). Only a whole decoder reads it.
            if not native or not 0 < height * width <= max_pixels():
                return None
            header = Header(height, width, length, True, True, marker == FRAMES[0])
        elif marker in FRAMES or marker in ENDS:
            return None
        if marker == 0xEE and window[body : body + 5] == b"Adobe":
            adobe_rgb = len(window) > body + 11 and window[body + 11] == 0
        offset += 2 + int.from_bytes(window[i + 2 : i + 4], "big")


def _read_with_pil(file: str | io.BytesIO, length: int, adjust_orientation: bool) -> Header:
    with _open(file) as image:
        if adjust_orientation and image.format == "PNG" and has_late_metadata(image):
            image.load()
        orientation = read_orientation(image.info) if adjust_orientation else 1
        native = (
            image.format == "WEBP"
            and image.mode == "RGB"
            and not getattr(image, "is_animated", False)
            and "transparency" not in image.info
            # DALI 2.4 does not read the chunks of such files. We know no issue about it.
            and not {"exif", "xmp"} & image.info.keys()
        )
        size = (image.width, image.height) if is_sideways(orientation) else (image.height, image.width)
        return Header(*size, length, image.format == "JPEG", native, orientation=orientation)
