"""How often a sample came up before in an epoch, which is a part of what its random numbers are keyed by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from torchdali.spec import IntArray

__all__ = ["DenseOccurrences", "Occurrences"]


class Occurrences:
    """Counts indices of any kind, which must be hashable."""

    def __init__(self) -> None:
        self._drawn: Counter[object] = Counter()

    def count(self, indices: Sequence[object]) -> IntArray:
        """``(N,)`` how often each index was drawn before, duplicates within the batch counted in order."""
        before: list[int] = []
        for index in indices:
            before.append(self._drawn[index])
            self._drawn[index] += 1
        return np.array(before, np.int64)


class DenseOccurrences:
    """The same for indices from 0 to ``size`` - 1, faster and with 8 bytes each.

    Args:
        size: Number of indices.
    """

    def __init__(self, size: int) -> None:
        self._drawn_before = np.zeros(size, np.uint32)
        self._last_row = np.zeros(size, np.uint32)

    def count(self, index: IntArray) -> IntArray:
        """``(N,)`` how often each index was drawn before, duplicates within the batch counted in order."""
        rows = np.arange(len(index))
        before = self._drawn_before[index].astype(np.int64)
        self._last_row[index] = rows
        if not np.array_equal(self._last_row[index], rows):
            order = np.argsort(index, kind="stable")
            ordered = index[order]
            before[order] += rows - np.searchsorted(ordered, ordered)
        self._drawn_before[index] = before + 1
        return before
