"""Paths as rows of bytes: a batch's are one gather, and ten million of them take what they are long."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from torchdali.transforms.spec import IntArray

__all__ = ["Paths", "Table", "as_int64", "read_samples", "smaller", "table_of"]

Table = npt.NDArray[np.bytes_]
"""``(N,)`` paths, of a NumPy type ``S``: as wide as the longest, padded with NUL."""

_AT_ONCE = 2**20  # so many rows are more than malloc keeps for later, and go back to the system when they are freed
_SHORTEST_ROW = 32  # room for the path of a file descriptor


class Paths:
    """The paths of samples, by their row.

    Args:
        tables: Paths of files, which are numbered through all tables.
        files: ``(N,)`` for each sample the number of its file; None where sample and file have the same number.
    """

    def __init__(self, tables: Sequence[Table], files: npt.NDArray[Any] | None = None) -> None:
        # Of arrays that are mapped from a file this is a view, too.
        self._rows: list[npt.NDArray[np.uint8]] = [
            table.view(np.uint8).reshape(len(table), table.dtype.itemsize) for table in tables
        ]
        self._ends = np.cumsum([len(table) for table in tables])
        self._files = files
        longest = max((rows.shape[1] for rows in self._rows), default=0)
        self._length = max(longest + 1, _SHORTEST_ROW)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._files is None else len(self._files)

    def __getitem__(self, row: int) -> str:
        return os.fsdecode(self.gather(np.array([row]))[0].tobytes().rstrip(b"\0"))

    def same(self, other: Paths) -> bool:
        """Whether samples and files are the same, in the same tables."""
        if self is other:
            return True
        tables = zip(self._rows, other._rows, strict=False)
        if len(self._rows) != len(other._rows) or not all(np.array_equal(*both) for both in tables):
            return False
        if self._files is None or other._files is None:
            return self._files is other._files
        return np.array_equal(self._files, other._files)

    def gather(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        """``(N, L)`` the paths of some samples, padded with at least one NUL."""
        files = rows if self._files is None else self._files[rows]
        found = np.zeros((len(rows), self._length), np.uint8)
        if len(self._rows) == 1:
            found[:, : self._rows[0].shape[1]] = self._rows[0][files]
            return found
        tables: IntArray = np.searchsorted(self._ends, files, "right")
        numbers: list[int] = np.unique(tables).tolist()
        for number in numbers:
            here: Any = tables == number
            of_table = self._rows[number]
            first = int(self._ends[number]) - of_table.shape[0]
            found[here, : of_table.shape[1]] = of_table[files[here] - first]
        return found


def table_of(paths: Sequence[Any]) -> Table:
    """A table of paths that are given one by one."""
    if set(map(type, paths)) == {str}:
        try:
            return np.array(paths, np.bytes_)  # which encodes ASCII only
        except UnicodeEncodeError:
            pass
    return np.array([os.fsencode(path) for path in paths], np.bytes_)


def read_samples(samples: Iterable[tuple[Any, Any]]) -> tuple[Table, npt.NDArray[np.signedinteger[Any]] | list[Any]]:
    """Paths and targets of ``(path, target)`` pairs, in one pass.

    Returns:
        The paths, and the targets: ``(N,)`` int32 or int64 where all of them are of type int and fit, else a list.
    """
    tables: list[Table] = []
    labels: list[IntArray] = []
    others: list[Any] | None = None
    rest = iter(samples)
    while chunk := list(islice(rest, _AT_ONCE)):
        tables.append(table_of([path for path, _ in chunk]))
        targets = [target for _, target in chunk]
        numbers = as_int64(targets) if others is None else None
        if numbers is not None:
            labels.append(numbers)
        else:
            others = [label for part in labels for label in part.tolist()] if others is None else others
            others += targets
    return _joined(tables), smaller(np.concatenate(labels or [np.empty(0, np.int64)])) if others is None else others


def as_int64(targets: Sequence[Any]) -> IntArray | None:
    """The targets as numbers; None where one is not of type int, or too large."""
    try:
        return np.array(targets, np.int64) if set(map(type, targets)) == {int} else None
    except OverflowError:
        return None


def smaller(numbers: IntArray) -> npt.NDArray[np.signedinteger[Any]]:
    """The same numbers as int32, where all of them fit."""
    narrow = numbers.astype(np.int32)
    return narrow if np.array_equal(narrow, numbers) else numbers


def _joined(tables: list[Table]) -> Table:
    width = max((table.dtype.itemsize for table in tables), default=1)
    whole = np.empty(sum(map(len, tables)), f"S{width}")
    start = 0
    tables.reverse()
    while tables:  # each is freed as soon as it is copied
        table = tables.pop()
        whole[start : start + len(table)] = table
        start += len(table)
    return cast("Table", whole)
