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
    """The same for indices from 0 to ``size`` - 1, faster and with a byte for each.

    Args:
        size: Number of indices.
    """

    _MANY = 255

    def __init__(self, size: int) -> None:
        self._drawn_before = np.zeros(size, np.uint8)
        self._more: Counter[int] = Counter()  # of those that came up 255 times

    def count(self, index: IntArray) -> IntArray:
        """``(N,)`` how often each index was drawn before, duplicates within the batch counted in order."""
        before = self._drawn_before[index].astype(np.int64)
        for place in np.flatnonzero(before == self._MANY).tolist():
            before[place] += self._more[int(index[place])]
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        if (ordered[1:] == ordered[:-1]).any():
            before[order] += np.arange(len(index)) - np.searchsorted(ordered, ordered)
        # Of an index that is drawn more than once the last one counts.
        self._drawn_before[index] = np.minimum(before + 1, self._MANY)
        for place in np.flatnonzero(before >= self._MANY).tolist():
            self._more[int(index[place])] = int(before[place]) + 1 - self._MANY
        return before
