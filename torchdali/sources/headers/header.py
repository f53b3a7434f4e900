"""An image file's size, and whether DALI decodes it as PIL does, from its first bytes.

Reading a JPEG's header this way takes about six microseconds of one core, so that an epoch can know the size of
every image before it is decoded. Files of any other kind are opened by PIL, which reads no pixels either.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import PIL.Image

__all__ = [
    "ENDS",
    "FRAMES",
    "HEAD",
    "PNG_SIGNATURE",
    "SCAN",
    "UNREADABLE",
    "Header",
    "error_text",
    "header_of",
    "is_system_fault",
    "most_pixels",
    "open_file",
    "read_header",
]

UNREADABLE = (
    *(OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError),
    *(RuntimeError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error),
)
"""What PIL raises on files that are no image or a damaged one."""

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

    A ``TimeoutError`` is the storage's, or of a handler that bounds a step.
    """
    return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _SYSTEM_FAULTS)


_open: Callable[..., Any] = PIL.Image.open

HEAD = 2048
"""Bytes of a file that are looked at first."""

FRAMES = (0xC0, 0xC1, 0xC2)
"""A JPEG's markers of frames that DALI decodes: baseline, extended and progressive."""
ENDS = (*sorted({*range(0xC3, 0xD0)} - {0xC4, 0xC8, 0xCC}), 0xD9)
"""Its markers of other frames, and of its end."""
SCAN = 0xDA
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Header(NamedTuple):
    """What the first bytes of an image file say.

    Attributes:
        height: Height in pixels; EXIF orientation is not looked at, as in ``ImageFolder``.
        width: Width in pixels.
        length: Of the file, in bytes.
        jpeg: Whether it is a JPEG.
        native: Whether DALI decodes it to what ``PIL.Image.convert("RGB")`` gives. CMYK, 16-bit, transparent and
            animated images are not, and of the formats only JPEG, PNG and WebP are.
        baseline: Whether it is a baseline JPEG, which is what JPEG engines decode.
        modified: When the file was last, in nanoseconds; 0 of what is no file.
    """

    height: int
    width: int
    length: int
    jpeg: bool
    native: bool
    baseline: bool = False
    modified: int = 0


def error_text(error: BaseException) -> str:
    """Return what an exception of ``UNREADABLE`` says, without the name of the file or its place in memory."""
    return "cannot identify image file" if isinstance(error, PIL.UnidentifiedImageError) else str(error)


def most_pixels() -> int:
    """Of an image that PIL opens; it raises ``DecompressionBombError`` of a larger one, to which it is left then."""
    return 2 * PIL.Image.MAX_IMAGE_PIXELS if PIL.Image.MAX_IMAGE_PIXELS else sys.maxsize


def open_file(path: str) -> tuple[int, os.stat_result]:
    """A file's descriptor, which is to be closed, and what the system knows of the file.

    Raises:
        OSError: It cannot be opened, or is a pipe or a device.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe that nobody writes to would block
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        os.close(file)
        raise OSError("it is no regular file")
    return file, about


def read_header(path: str) -> Header:
    """Reads the header of an image file.

    Raises:
        OSError: The file cannot be read, or PIL does not know it (``PIL.UnidentifiedImageError``).
    """
    file, about = open_file(path)
    try:
        found = _own(lambda at: os.pread(file, HEAD, at), about.st_size)
    finally:
        os.close(file)
    return (found or _by_pil(path, about.st_size))._replace(modified=about.st_mtime_ns)


def header_of(encoded: memoryview) -> Header:
    """Reads the header of an image file that is in memory.

    Raises:
        OSError: PIL does not know it.
    """
    found = _own(lambda at: bytes(encoded[at : at + HEAD]), len(encoded))
    return found or _by_pil(io.BytesIO(encoded), len(encoded))


def _own(read: Callable[[int], bytes], length: int) -> Header | None:
    """What can be told without PIL; ``read`` gives the next bytes from a place in the file."""
    start = read(0)
    if start.startswith(b"\xff\xd8\xff"):
        return _jpeg(read, start, length)
    if start.startswith(PNG_SIGNATURE) and start[12:16] == b"IHDR":
        return _png(start, length)
    return None


def _png(start: bytes, length: int) -> Header | None:
    width, height = int.from_bytes(start[16:20], "big"), int.from_bytes(start[20:24], "big")
    native = start[24:25] == b"\x08" and start[25:26] in (b"\0", b"\2", b"\3")
    native = native and b"acTL" not in start  # of an animated one DALI may show the second image
    native = native and start.count(b"IHDR") == 1  # of two PIL takes the last, and DALI refuses the file
    return Header(height, width, length, False, True) if native and 0 < height * width <= most_pixels() else None


def _jpeg(read: Callable[[int], bytes], start: bytes, length: int) -> Header | None:
    """Walks from marker to marker (ITU-T T.81, annex B) to the first scan.

    Not only to the frame header: of two DALI takes the last, another size and precision, and may die of it.
    """
    at, adobe_rgb = 2, False
    found: Header | None = None
    window, window_at = start, 0
    while True:
        if at + 20 > window_at + len(window):
            window, window_at = read(at), at
        here = at - window_at
        if here + 4 > len(window) or window[here] != 0xFF:
            return None
        marker = window[here + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
            continue
        body = here + 4
        if marker == SCAN:
            return None if adobe_rgb else found
        if marker in FRAMES and body + 12 <= len(window):
            if found:
                return None
            depth, components = window[body], window[body + 5]
            height = int.from_bytes(window[body + 1 : body + 3], "big")
            width = int.from_bytes(window[body + 3 : body + 5], "big")
            named_rgb = components == 3 and bytes(window[body + 6 : body + 14 : 3]) == b"RGB"
            native = depth == 8 and components in (1, 3) and not (adobe_rgb or named_rgb)
            # A height of 0 says that the height comes after the pixels, which only a whole decoder follows.
            if not native or not 0 < height * width <= most_pixels():
                return None
            found = Header(height, width, length, True, True, marker == FRAMES[0])
        elif marker in FRAMES or marker in ENDS:
            return None
        if marker == 0xEE and window[body : body + 5] == b"Adobe":
            adobe_rgb = len(window) > body + 11 and window[body + 11] == 0
        at += 2 + int.from_bytes(window[here + 2 : here + 4], "big")


def _by_pil(file: str | io.BytesIO, length: int) -> Header:
    with _open(file) as image:
        native = (
            image.format == "WEBP"
            and image.mode == "RGB"
            and not getattr(image, "is_animated", False)
            and "transparency" not in image.info
        )
        return Header(image.height, image.width, length, image.format == "JPEG", native)
