"""The headers of many files at once, from the first bytes of each file.

Reading headers one by one in Python takes the interpreter's lock several times for each file, so it slows down beside
the training loop. Some headers cannot be read this way. ``header.py`` reads those, and agrees on all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchdali.sources.headers.header import (
    APP1,
    ENDS,
    FRAMES,
    LARGE_CHUNK,
    PNG_SIGNATURE,
    SCAN,
    has_png_chunks_within,
    max_pixels,
)
from torchdali.transforms.spec import IntArray

__all__ = ["TOO_LARGE", "Headers", "parse"]

_SEGMENT_BYTES = 20  # bytes that are read of a segment, from its marker

TOO_LARGE = 0xFFFF
"""The smallest side, in pixels, that does not fit the columns of ``table.py``. No JPEG is as large."""

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


_OTHER, _FRAME, _ADOBE, _PADDING, _SCAN, _END = range(6)
"""What two bytes mean where a marker is expected. After ``_SCAN`` and ``_END`` no marker follows."""


def _build_kinds(*ends: int) -> npt.NDArray[np.uint8]:
    """Return ``(65536,)`` the kinds of all pairs of bytes."""
    kinds: npt.NDArray[np.uint8] = np.full(65536, _END, np.uint8)
    kinds[0xFF01:] = _OTHER
    for kind, markers in ((_FRAME, FRAMES), (_ADOBE, (0xEE,)), (_PADDING, (0xFF,)), (_SCAN, (SCAN,)), (_END, ends)):
        kinds[[0xFF00 + marker for marker in markers]] = kind
    return kinds


_JPEG_START, _PNG_START = 0xFFD8FF, int.from_bytes(PNG_SIGNATURE[:4], "big")
_KINDS, _KINDS_WITHOUT_APP1 = _build_kinds(*ENDS), _build_kinds(*ENDS, APP1)


class Headers(NamedTuple):
    """The headers of files. DALI decodes all known files as PIL does.

    Attributes:
        known: ``(N,)`` whether the header is known. If not, the other arrays have no meaning for the file.
        sizes: ``(N, 2)`` heights and widths, below 65,535.
        jpeg: ``(N,)`` whether the file is a JPEG.
        baseline: ``(N,)`` whether the file is a baseline JPEG, which JPEG engines decode.
    """

    known: Flags
    sizes: IntArray
    jpeg: Flags
    baseline: Flags


def parse(data: Bytes, adjust_orientation: bool = False) -> Headers:
    """Read the headers of JPEGs and PNGs.

    Args:
        data: ``(N, 2048)`` the first bytes of each file, padded with 0.
        adjust_orientation: Whether files that may name an orientation stay unknown: all PNGs, and JPEGs with metadata.
    """
    count, flat = len(data), data.reshape(-1)
    nothing: Flags = np.zeros(count, np.bool_)
    headers = Headers(nothing.copy(), np.zeros((count, 2), np.int64), nothing.copy(), nothing.copy())
    words: Any = np.ndarray(max(0, flat.size - 3), ">u4", flat.data, strides=(1,))  # four bytes, from each on
    starts = words[np.arange(count) * data.shape[1]]
    if not adjust_orientation:
        _parse_pngs(data, np.flatnonzero(starts == _PNG_START), headers)
    kinds = _KINDS_WITHOUT_APP1 if adjust_orientation else _KINDS
    _parse_jpegs(data, words, np.flatnonzero(starts >> 8 == _JPEG_START), kinds, headers)
    return headers


def _parse_pngs(data: Bytes, rows: IntArray, headers: Headers) -> None:
    if not len(rows):
        return
    rows = rows[(data[rows, :8] == np.frombuffer(PNG_SIGNATURE, np.uint8)).all(1)]
    rows = rows[(data[rows, 12:16] == np.frombuffer(b"IHDR", np.uint8)).all(1)]
    rows = rows[(data[rows, 24] == 8) & np.isin(data[rows, 25], (0, 2, 3))]
    if len(rows := rows[[_is_plain_png(start.tobytes()) for start in data[rows]]] if len(rows) else rows):
        width, height = (_read_uint(data.reshape(-1), rows * data.shape[1] + offset, 4) for offset in (16, 20))
        _set_sizes(headers, rows, height, width)


def _is_plain_png(start: bytes) -> bool:
    return b"acTL" not in start and start.count(b"IHDR") == 1 and has_png_chunks_within(start, LARGE_CHUNK)


def _parse_jpegs(data: Bytes, words: Any, rows: IntArray, kinds: Bytes, headers: Headers) -> None:
    """Follow the markers (ITU-T T.81, annex B) of all JPEGs at once, up to their first scans."""
    flat: Bytes = data.reshape(-1)
    length = data.shape[1]
    at: IntArray = rows * length + 2
    last: IntArray = at + (length - _SEGMENT_BYTES - 2)
    adobe_rgb, scanned = (np.zeros(len(data), np.bool_) for _ in range(2))
    frames: IntArray = np.zeros(len(data), np.int64)  # where they are
    while len(rows):
        word: IntArray = words[at].astype(np.int64)  # a marker, and the length of its segment
        step, kind = 2 + (word & 0xFFFF), kinds[word >> 16]
        alive: Flags = kind < _SCAN
        if kind.any():
            frame = kind == _FRAME
            alive[frame] = frames[rows[frame]] == 0  # DALI takes the last of two frame headers: see header.py
            frames[rows[frame]] = at[frame]
            scanned[rows[kind == _SCAN]] = True
            if (adobe := np.flatnonzero(kind == _ADOBE)).size:
                adobe = adobe[_has_text(flat, at[adobe] + 4, b"Adobe")]
                adobe_rgb[rows[adobe]] = flat[at[adobe] + 15] == 0
            step[kind == _PADDING] = 1
        at = at + step
        alive &= at <= last
        if not alive.all():
            rows, at, last = rows[alive], at[alive], last[alive]
    rows = np.flatnonzero(scanned & (frames > 0) & ~adobe_rgb)
    _parse_frames(flat, headers, rows, frames[rows])


def _parse_frames(flat: Bytes, headers: Headers, rows: IntArray, at: IntArray) -> None:
    body = at + 4
    components = flat[body + 5]
    names: Any = flat[body[:, None] + (6, 9, 12)]
    has_rgb_names = (components == 3) & (names == np.frombuffer(b"RGB", np.uint8)).all(1)
    native = (flat[body] == 8) & ((components == 1) | (components == 3)) & ~has_rgb_names
    rows, body = rows[native], body[native]
    valid = _set_sizes(headers, rows, _read_uint(flat, body + 1, 2), _read_uint(flat, body + 3, 2))
    headers.jpeg[rows[valid]] = True
    headers.baseline[rows[valid]] = flat[body[valid] - 3] == FRAMES[0]


def _set_sizes(headers: Headers, rows: IntArray, height: IntArray, width: IntArray) -> Flags:
    # A height of 0 means that the height follows the pixels (T.81, B.2.5). Only a whole decoder reads it.
    valid: Flags = (np.minimum(height, width) > 0) & (np.maximum(height, width) < TOO_LARGE)
    valid &= height * width <= max_pixels()
    headers.known[rows[valid]] = True
    headers.sizes[rows[valid]] = np.stack((height, width), 1)[valid]
    return valid


def _read_uint(flat: Bytes, at: IntArray, length: int) -> IntArray:
    """Return ``(N,)`` big-endian numbers of ``length`` bytes at some offsets."""
    number = flat[at].astype(np.int64)
    for i in range(1, length):
        number = number * 256 + flat[at + i]
    return number


def _has_text(flat: Bytes, at: IntArray, text: bytes) -> Any:
    return (flat[at[:, None] + np.arange(len(text))] == np.frombuffer(text, np.uint8)).all(1)
