"""Headers of many files at once, from their first bytes.

Read one by one in Python, they need the interpreter's lock several times for each file, and get it only while the
training loop waits. What cannot be told this way is left to ``header.py``, which says the same of all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchdali.sources.headers.header import ENDS, FRAMES, PNG_SIGNATURE, SCAN, most_pixels
from torchdali.transforms.spec import IntArray

__all__ = ["LARGE", "MANY", "Headers", "parse"]

_ROOM = 20  # from a marker to the end of what is looked at of its segment

LARGE = 0xFFFF
"""A side that is this long or longer, which no JPEG's is, does not fit the columns of ``facts.py``."""

MANY = 32
"""Files from which on their headers are read together."""

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


class Headers(NamedTuple):
    """What the first bytes of files say. All of these files are decoded by DALI as PIL does.

    Attributes:
        known: ``(N,)`` whether the first bytes tell; the others say nothing of a file of which they do not.
        sizes: ``(N, 2)`` heights and widths, below 65,535.
        jpeg: ``(N,)`` whether it is a JPEG.
        baseline: ``(N,)`` whether it is one that JPEG engines decode.
    """

    known: Flags
    sizes: IntArray
    jpeg: Flags
    baseline: Flags


def parse(heads: Bytes) -> Headers:
    """Reads the headers of JPEGs and PNGs.

    Args:
        heads: ``(N, 2048)`` the first bytes of each file, padded with 0.
    """
    count = len(heads)
    nothing: Flags = np.zeros(count, np.bool_)
    found = Headers(nothing.copy(), np.zeros((count, 2), np.int64), nothing.copy(), nothing.copy())
    _pngs(heads, found)
    _jpegs(heads, found)
    return found


def _pngs(heads: Bytes, found: Headers) -> None:
    signed = (heads[:, :8] == np.frombuffer(PNG_SIGNATURE, np.uint8)).all(1)
    named = signed & (heads[:, 12:16] == np.frombuffer(b"IHDR", np.uint8)).all(1)
    rows = np.flatnonzero(named & (heads[:, 24] == 8) & np.isin(heads[:, 25], (0, 2, 3)))
    rows = rows[[_is_plain_png(head.tobytes()) for head in heads[rows]]] if len(rows) else rows
    width, height = (_number(heads, rows, np.full(len(rows), at), 4) for at in (16, 20))
    _keep(found, rows, height, width)


def _is_plain_png(head: bytes) -> bool:
    return b"acTL" not in head and head.count(b"IHDR") == 1


def _jpegs(heads: Bytes, found: Headers) -> None:
    """Walks all files from marker to marker (ITU-T T.81, annex B) at once, to their first scans."""
    rows = np.flatnonzero((heads[:, :3] == (0xFF, 0xD8, 0xFF)).all(1))
    at = np.full(len(heads), 2)
    adobe_rgb, one_frame, scanned = (np.zeros(len(heads), np.bool_) for _ in range(3))
    begun = rows
    while len(rows):
        rows = rows[at[rows] + _ROOM <= heads.shape[1]]
        rows = rows[heads[rows, at[rows]] == 0xFF]
        place = at[rows]
        marker = heads[rows, place + 1]
        frame = np.isin(marker, FRAMES)
        again = frame & one_frame[rows]  # of two frame headers DALI takes the last
        _frames(heads, found, rows[frame], place[frame])
        one_frame[rows[frame]] = True
        scanned[rows[marker == SCAN]] = True
        going = ~again & ~np.isin(marker, (*ENDS, SCAN))
        rows, place, marker = rows[going], place[going], marker[going]
        adobe = rows[(marker == 0xEE) & _says(heads, rows, place + 4, b"Adobe")]
        adobe_rgb[adobe] = heads[adobe, at[adobe] + 15] == 0
        # A byte 0xFF before a marker is padding.
        at[rows] += np.where(marker == 0xFF, 1, 2 + _number(heads, rows, place + 2, 2))
    found.known[begun[~scanned[begun] | adobe_rgb[begun]]] = False


def _frames(heads: Bytes, found: Headers, rows: IntArray, place: IntArray) -> None:
    body = place + 4
    components = heads[rows, body + 5]
    names: Any = heads[rows[:, None], body[:, None] + (6, 9, 12)]
    named_rgb = (components == 3) & (names == np.frombuffer(b"RGB", np.uint8)).all(1)
    native = (heads[rows, body] == 8) & np.isin(components, (1, 3)) & ~named_rgb
    rows, body = rows[native], body[native]
    kept = _keep(found, rows, _number(heads, rows, body + 1, 2), _number(heads, rows, body + 3, 2))
    found.jpeg[rows[kept]] = True
    found.baseline[rows[kept]] = heads[rows[kept], body[kept] - 3] == FRAMES[0]


def _keep(found: Headers, rows: IntArray, height: IntArray, width: IntArray) -> Flags:
    # A height of 0 says that the height comes after the pixels, which only a whole decoder follows.
    told: Flags = (np.minimum(height, width) > 0) & (np.maximum(height, width) < LARGE)
    told &= height * width <= most_pixels()
    found.known[rows[told]] = True
    found.sizes[rows[told]] = np.stack((height, width), 1)[told]
    return told


def _number(heads: Bytes, rows: IntArray, place: IntArray, length: int) -> IntArray:
    """Big-endian numbers of so many bytes, one a file."""
    number = np.zeros(len(rows), np.int64)
    for i in range(length):
        number = number * 256 + heads[rows, place + i]
    return number


def _says(heads: Bytes, rows: IntArray, place: IntArray, text: bytes) -> Any:
    letters = heads[rows[:, None], place[:, None] + np.arange(len(text))]
    return (letters == np.frombuffer(text, np.uint8)).all(1)
