"""Count how often each index came up in an epoch. The count is a part of the key of a sample's random numbers."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from torchdali.transforms.spec import IntArray


class Occurrences:
    """Counter of indices of any kind, which must be hashable."""

    def __init__(self) -> None:
        self._drawn: Counter[object] = Counter()
        self._passed, self._times = np.empty(0, np.int64), np.empty(0, np.int64)

    def count(self, indices: Sequence[object]) -> IntArray:
        """Return ``(N,)`` how often each index was drawn before. Duplicates within the batch count in order."""
        before: list[int] = []
        for index in indices:
            before.append(self._drawn[index])
            self._drawn[index] += 1
        counts = np.array(before, np.int64)
        if len(self._passed):
            index = np.array(indices, np.int64)
            place = np.minimum(np.searchsorted(self._passed, index), len(self._passed) - 1)
            counts += np.where(self._passed[place] == index, self._times[place], 0)
        return counts

    def fast_forward(self, indices: Iterable[IntArray]) -> None:
        """Count integers without returning their counts. After that, ``count`` takes integers only."""
        every = np.concatenate([np.repeat(self._passed, self._times), *indices])
        self._passed, self._times = _count_values(every)


class DenseOccurrences:
    """Faster counter for indices from 0 to ``size`` - 1, with two bytes for each. It begins again after 65,535.

    Args:
        size: Number of indices.
    """

    def __init__(self, size: int) -> None:
        self._drawn_before = np.zeros(size, np.uint16)

    def count(self, index: IntArray) -> IntArray:
        """Return ``(N,)`` how often each index was drawn before. Duplicates within the batch count in order."""
        before = self._drawn_before[index].astype(np.int64)
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        if (ordered[1:] == ordered[:-1]).any():
            before[order] += np.arange(len(index)) - np.searchsorted(ordered, ordered)
        # An index may occur more than once in the batch. Its last occurrence is assigned last and stays.
        self._drawn_before[index] = before + 1
        return before

    def fast_forward(self, indices: Iterable[IntArray | list[Any]]) -> None:
        """Count indices without returning their counts. Negative ones count from the end; others are ignored."""
        size = len(self._drawn_before)
        for some in indices:
            index = some if isinstance(some, np.ndarray) else np.fromiter(map(operator.index, some), np.int64)
            index = np.where(index < 0, index + size, index)
            which, times = _count_values(index[(index >= 0) & (index < size)])
            self._drawn_before[which] += times.astype(np.uint16)


def _count_values(every: IntArray) -> tuple[IntArray, IntArray]:
    """Return ``numpy.unique`` with counts. Dense indices are not sorted, which takes a tenth of the time."""
    if not len(every) or every.min() < 0 or every.max() > 4 * len(every):
        return np.unique(every, return_counts=True)
    counts = np.bincount(every)
    which = np.flatnonzero(counts)
    return which, counts[which]
