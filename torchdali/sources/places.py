"""Where image files lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchdali.transforms.spec import IntArray

__all__ = ["WORD", "Bytes", "Places", "join"]

Bytes = npt.NDArray[np.uint8]
WORD = 8
"""DALI copies as many bytes at a time. Images that PIL has decoded are multiples of it."""
_NOTHING: Bytes = np.empty(0, np.uint8)


class Places(NamedTuple):
    """Where the bytes of N image files lie in memory.

    Attributes:
        arrays: For each file the array that contains it. Files of one shard have the same object.
        starts: ``(N,)`` int64 where each file begins in its array.
        lengths: ``(N,)`` int64 bytes of each file.
        passing: Positions of files whose arrays are of this batch alone.
    """

    arrays: list[Bytes]
    starts: IntArray
    lengths: IntArray
    passing: frozenset[int] = frozenset()

    def views(self) -> list[Bytes]:
        """Return a view of the bytes of each file."""
        places = zip(self.arrays, self.starts.tolist(), (self.starts + self.lengths).tolist(), strict=True)
        return [array[start:end] for array, start, end in places]


def join(count: int, parts: Iterable[tuple[IntArray, Places]], others: Mapping[int, Bytes] | None = None) -> Places:
    """Return the places of a batch.

    Args:
        count: The number of its files.
        parts: Places of some of them, and the positions of these in the batch.
        others: The bytes of the other files, by position.
    """
    others = others or {}
    arrays: list[Bytes] = [_NOTHING] * count
    starts, lengths = np.zeros(count, np.int64), np.zeros(count, np.int64)
    passing = {*others}
    for positions, part in parts:
        starts[positions], lengths[positions] = part.starts, part.lengths
        for position, array in zip(positions.tolist(), part.arrays, strict=True):
            arrays[position] = array
        passing.update(positions[[*part.passing]].tolist())
    for position, array in others.items():
        arrays[position], lengths[position] = array, len(array)
    return Places(arrays, starts, lengths, frozenset(passing))
