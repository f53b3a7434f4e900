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


def _flag(*markers: int) -> Flags:
    flags: Flags = np.zeros(256, np.bool_)
    flags[list(markers)] = True
    return flags


_IS_FRAME, _IS_END, _IS_END_OR_APP1 = _flag(*FRAMES), _flag(*ENDS, SCAN), _flag(*ENDS, SCAN, APP1)


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
    count = len(data)
    nothing: Flags = np.zeros(count, np.bool_)
    headers = Headers(nothing.copy(), np.zeros((count, 2), np.int64), nothing.copy(), nothing.copy())
    if not adjust_orientation:
        _parse_pngs(data, headers)
    _parse_jpegs(data, headers, adjust_orientation)
    return headers


def _parse_pngs(data: Bytes, headers: Headers) -> None:
    rows = np.flatnonzero((data[:, :8] == np.frombuffer(PNG_SIGNATURE, np.uint8)).all(1))
    rows = rows[(data[rows, 12:16] == np.frombuffer(b"IHDR", np.uint8)).all(1)]
    rows = rows[(data[rows, 24] == 8) & np.isin(data[rows, 25], (0, 2, 3))] if len(rows) else rows
    if len(rows := rows[[_is_plain_png(start.tobytes()) for start in data[rows]]] if len(rows) else rows):
        width, height = (_read_uint(data.reshape(-1), rows * data.shape[1] + offset, 4) for offset in (16, 20))
        _set_sizes(headers, rows, height, width)


def _is_plain_png(start: bytes) -> bool:
    return b"acTL" not in start and start.count(b"IHDR") == 1 and has_png_chunks_within(start, LARGE_CHUNK)


def _parse_jpegs(data: Bytes, headers: Headers, adjust_orientation: bool) -> None:
    """Follow the markers (ITU-T T.81, annex B) of all JPEGs at once, up to their first scans."""
    flat: Bytes = data.reshape(-1)
    length = data.shape[1]
    is_end = _IS_END_OR_APP1 if adjust_orientation else _IS_END
    rows: IntArray = np.flatnonzero((data[:, :3] == (0xFF, 0xD8, 0xFF)).all(1))
    jpegs = rows
    at: IntArray = rows * length + 2
    last: IntArray = at + (length - _SEGMENT_BYTES - 2)
    adobe_rgb, one_frame, scanned = (np.zeros(len(data), np.bool_) for _ in range(3))
    while len(rows):
        marker: Bytes = flat.take(at + 1, mode="clip")
        alive: Flags = (at <= last) & (flat.take(at, mode="clip") == 0xFF) & (marker != 0)
        frame: Flags = alive & _IS_FRAME[marker]
        if frame.any():
            frame_rows = rows[frame]
            alive[frame] = ~one_frame[frame_rows]  # DALI takes the last of two frame headers: see header.py
            _parse_frames(flat, headers, frame_rows, at[frame])
            one_frame[frame_rows] = True
        scanned[rows[alive & (marker == SCAN)]] = True
        alive &= ~is_end[marker]
        if not alive.all():
            rows, at, last, marker = rows[alive], at[alive], last[alive], marker[alive]
        if (adobe := np.flatnonzero(marker == 0xEE)).size:
            adobe = adobe[_has_text(flat, at[adobe] + 4, b"Adobe")]
            adobe_rgb[rows[adobe]] = flat[at[adobe] + 15] == 0
        # A byte 0xFF before a marker is padding.
        at = at + np.where(marker == 0xFF, 1, 2 + _read_uint(flat, at + 2, 2))
    headers.known[jpegs[~scanned[jpegs] | adobe_rgb[jpegs]]] = False


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
