"""A feed that puts up with samples that cannot be read or decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from torchdali.errors import SampleError
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.samples.on_error import SIZE, ErrorPolicy, drawable
from torchdali.transforms.spec import IntArray

__all__ = ["RetryingPrefetcher"]

_Faults = list[SampleError]
"""Holds an error where it is handed on: the frames of its traceback must not, which would be a cycle."""


class RetryingPrefetcher:
    """Runs a batch again, beside those that are on their way, without the samples of it that are at fault.

    Args:
        feed: The batches of the epoch.
        another: Makes a feed for those that are run again.
        tolerance: What is done about them.
    """

    def __init__(self, feed: Prefetcher, another: Callable[[], Prefetcher], tolerance: ErrorPolicy) -> None:
        self._feed, self._another, self._tolerance = feed, another, tolerance
        self._beside: Prefetcher | None = None
        self._asked: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._feed)

    def push(self, batch: Batch) -> None:
        """As of :class:`torchdali.pipeline.feed.Prefetcher`."""
        self._asked.append(batch)
        self._feed.push(self._without(batch) or replace(batch))

    def pop(self) -> Batch:
        """The next batch; where a sample had to be left out, its rows say by which it was replaced.

        Raises:
            SampleError: There are more than there may be, or no sample of the batch is left.
        """
        asked, faults, tried = self._asked.popleft(), _Faults(), set[int]()
        try:
            return self._feed.pop()
        except SampleError as error:
            if not self._tolerance.takes(error):
                raise
            faults.append(error)
        return self._again(asked, faults, tried)

    def _again(self, asked: Batch, faults: _Faults, tried: set[int]) -> Batch:
        if self._beside is None:  # an empty one is false
            self._beside = self._another()
        while True:
            self._beside.push(self._given_up(asked, faults, tried))
            try:
                return self._beside.pop()
            except SampleError as error:
                if not self._tolerance.takes(error):
                    raise
                faults.append(error)

    def _given_up(self, asked: Batch, faults: _Faults, tried: set[int]) -> Batch:
        """The batch without the sample that an error names; ``tried`` are those that were given up before."""
        reader, rows, error = asked.reader, asked.rows, faults.pop()
        try:
            blamed = [row for row in dict.fromkeys(rows.tolist()) if _names(reader.error(row, ""), error)]
            if tried.issuperset(blamed):
                raise error
            tried.update(blamed)
            self._tolerance.note(error)
            if self._tolerance.mode == "replace":
                for row in blamed:
                    reader.substitute_black(row, drawable(reader.read_size(row)) or _size_beside(asked, row))
            reader.bad_rows = reader.bad_rows.union(blamed)
            batch = self._without(asked)
            if batch is None:
                raise SampleError(
                    error.index,
                    error.path,
                    f"{error.reason}, and no other sample of its batch can take its place "
                    "(on_error='replace' needs none)",
                ) from error
            return batch
        finally:
            del error

    def _without(self, batch: Batch) -> Batch | None:
        """The batch with others in the places of rows that are known to be bad; None where there are none."""
        reader = batch.reader
        if self._tolerance.mode == "replace" or not reader.bad_rows:
            return replace(batch)
        places = reader.find_substitutes(np.isin(batch.rows, list(reader.bad_rows)))
        return None if places is None else replace(batch, rows=batch.rows[places])

    def end(self) -> None:
        """As of :class:`torchdali.pipeline.feed.Prefetcher`."""
        self.close()
        self._feed.end()

    def close(self) -> None:
        """As of :class:`torchdali.pipeline.feed.Prefetcher`."""
        self._feed.close()
        if self._beside is not None:
            self._beside.close()
            self._beside = None


def _names(one: SampleError, other: SampleError) -> bool:
    return (one.index, one.path) == (other.index, other.path)


def _size_beside(batch: Batch, row: int) -> tuple[int, int]:
    """Height and width of the next image of a batch that can be read, because images are often of one size."""
    order: IntArray = np.roll(batch.rows, -int(np.flatnonzero(batch.rows == row)[0]))
    sizes = (drawable(batch.reader.read_size(other)) for other in order.tolist() if other != row)
    return next(filter(None, sizes), SIZE)
