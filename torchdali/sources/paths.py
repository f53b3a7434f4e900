"""Paths as rows of bytes. The paths of a batch are one gather, and no path is a Python object."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from torchdali.transforms.spec import IntArray

__all__ = ["Paths", "Table", "build_table", "read_samples", "shrink_to_int32", "to_int64"]

Table = npt.NDArray[np.bytes_]
"""``(N,)`` paths of a NumPy type ``S``. Its width is the longest path, and shorter ones are padded with NUL."""

_CHUNK = 2**20  # rows; malloc returns a block of this size to the system when it is freed
_MIN_LENGTH = 32  # room for the path of a file descriptor


class Paths:
    """The paths of samples, by their row.

    Args:
        tables: The paths of the files. Files are numbered through all tables.
        files: ``(N,)`` for each sample the number of its file; None if samples and files have the same numbers.
    """

    def __init__(self, tables: Sequence[Table], files: npt.NDArray[Any] | None = None) -> None:
        # This is a view, also of arrays that are mapped from a file.
        self._rows: list[npt.NDArray[np.uint8]] = [
            table.view(np.uint8).reshape(len(table), table.dtype.itemsize) for table in tables
        ]
        self._ends = np.cumsum([len(table) for table in tables])
        self._files = files
        longest = max((rows.shape[1] for rows in self._rows), default=0)
        self._length = max(longest + 1, _MIN_LENGTH)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._files is None else len(self._files)

    def __getitem__(self, row: int) -> str:
        return os.fsdecode(self.gather(np.array([row]))[0].tobytes().rstrip(b"\0"))

    def equals(self, other: Paths) -> bool:
        """Return whether samples and files are the same, in the same tables."""
        if self is other:
            return True
        tables = zip(self._rows, other._rows, strict=False)
        if len(self._rows) != len(other._rows) or not all(np.array_equal(*both) for both in tables):
            return False
        if self._files is None or other._files is None:
            return self._files is other._files
        return np.array_equal(self._files, other._files)

    def gather(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        """Return ``(N, L)`` the paths of some samples, padded with at least one NUL."""
        files = rows if self._files is None else self._files[rows]
        paths = np.zeros((len(rows), self._length), np.uint8)
        if len(self._rows) == 1:
            paths[:, : self._rows[0].shape[1]] = self._rows[0][files]
            return paths
        tables: IntArray = np.searchsorted(self._ends, files, "right")
        indices: list[int] = np.unique(tables).tolist()
        for i in indices:
            mask: Any = tables == i
            table_rows = self._rows[i]
            begin = int(self._ends[i]) - table_rows.shape[0]
            paths[mask, : table_rows.shape[1]] = table_rows[files[mask] - begin]
        return paths


def build_table(paths: Sequence[Any]) -> Table:
    """Return the table of some paths."""
    if set(map(type, paths)) == {str}:
        try:
            return np.array(paths, np.bytes_)  # numpy encodes ASCII only
        except UnicodeEncodeError:
            pass
    return np.array([os.fsencode(path) for path in paths], np.bytes_)


def read_samples(samples: Iterable[tuple[Any, Any]]) -> tuple[Table, npt.NDArray[np.signedinteger[Any]] | list[Any]]:
    """Read ``(path, target)`` pairs in one pass.

    Returns:
        The paths and the targets. Targets are ``(N,)`` int32 or int64 if all are of type int and fit, else a list.
    """
    tables: list[Table] = []
    labels: list[IntArray] = []
    mixed: list[Any] | None = None
    pairs = iter(samples)
    while chunk := list(islice(pairs, _CHUNK)):
        tables.append(build_table([path for path, _ in chunk]))
        targets = [target for _, target in chunk]
        numbers = to_int64(targets) if mixed is None else None
        if numbers is not None:
            labels.append(numbers)
        else:
            mixed = [label for part in labels for label in part.tolist()] if mixed is None else mixed
            mixed += targets
    if mixed is not None:
        return _concatenate(tables), mixed
    return _concatenate(tables), shrink_to_int32(np.concatenate(labels or [np.empty(0, np.int64)]))


def to_int64(targets: Sequence[Any]) -> IntArray | None:
    """Return the targets as ``(N,)`` int64, or None if a target is not of type int, or too large."""
    try:
        return np.array(targets, np.int64) if set(map(type, targets)) == {int} else None
    except OverflowError:
        return None


def shrink_to_int32(numbers: IntArray) -> npt.NDArray[np.signedinteger[Any]]:
    """Return the numbers as int32 if all of them fit, else unchanged."""
    narrow = numbers.astype(np.int32)
    return narrow if np.array_equal(narrow, numbers) else numbers


def _concatenate(tables: list[Table]) -> Table:
    width = max((table.dtype.itemsize for table in tables), default=1)
    whole = np.empty(sum(map(len, tables)), f"S{width}")
    start = 0
    tables.reverse()
    while tables:  # each table is freed once it is copied
        table = tables.pop()
        whole[start : start + len(table)] = table
        start += len(table)
    return cast("Table", whole)
