"""A prefetcher that runs a batch again without the samples that cannot be read or decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from torchdali.errors import SampleError
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.samples.on_error import SIZE, ErrorPolicy, limit_size
from torchdali.transforms.spec import IntArray

__all__ = ["RetryingPrefetcher"]


class RetryingPrefetcher:
    """Runs a batch again, beside the batches in flight, without its bad samples.

    Args:
        prefetcher: The batches of the epoch.
        make_prefetcher: Makes the prefetcher of batches that run again.
        error_policy: Decides what happens to bad samples.
    """

    def __init__(
        self, prefetcher: Prefetcher, make_prefetcher: Callable[[], Prefetcher], error_policy: ErrorPolicy
    ) -> None:
        self._prefetcher, self._make_prefetcher, self._error_policy = prefetcher, make_prefetcher, error_policy
        self._retries: Prefetcher | None = None
        self._batches: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._prefetcher)

    def put(self, batch: Batch) -> None:
        """See :class:`torchdali.pipeline.feed.Prefetcher`."""
        self._batches.append(batch)
        self._prefetcher.put(self._substitute(batch) or replace(batch))

    def get(self) -> Batch:
        """Return the next batch. Its rows name the substitutes of samples that were left out.

        Raises:
            SampleError: There are more than ``max_errors``, or no sample of the batch is left.
        """
        original, excluded, source = self._batches.popleft(), set[int](), self._prefetcher
        while True:
            try:
                return source.get()
            except SampleError as error:
                if not self._error_policy.is_bad_sample(error):
                    raise
                batch = self._exclude(original, error, excluded)
            if self._retries is None:  # an empty one is false
                self._retries = self._make_prefetcher()
            source = self._retries
            source.put(batch)

    def _exclude(self, original: Batch, error: SampleError, excluded: set[int]) -> Batch:
        """Return the batch without the sample that an error names, and add that sample to ``excluded``."""
        reader, rows = original.reader, original.rows
        try:
            blamed = [row for row in dict.fromkeys(rows.tolist()) if _is_same_sample(reader.error(row, ""), error)]
            if excluded.issuperset(blamed):
                raise error
            excluded.update(blamed)
            self._error_policy.record(error, reader.substitute)
            if self._error_policy.mode == "replace":
                for row in blamed:
                    reader.substitute_black(row, limit_size(reader.read_size(row)) or _guess_size(original, row))
            reader.mark_bad(blamed, error)
            batch = self._substitute(original)
            if batch is None:
                raise SampleError(
                    error.index,
                    error.path,
                    f"{error.reason}, and no other sample of its batch can take its place "
                    "(on_error='replace' needs none)",
                ) from error
            return batch
        finally:
            del error  # its traceback would hold this frame in a cycle

    def _substitute(self, batch: Batch) -> Batch | None:
        """Return the batch with substitutes for its bad rows, or None if no good row is left."""
        reader = batch.reader
        if self._error_policy.mode == "replace" or not reader.bad_rows:
            return replace(batch)
        positions = reader.find_substitutes(np.isin(batch.rows, list(reader.bad_rows)))
        return None if positions is None else replace(batch, rows=batch.rows[positions])

    def end(self) -> None:
        """See :class:`torchdali.pipeline.feed.Prefetcher`."""
        self.close()
        self._prefetcher.end()

    def close(self) -> None:
        """See :class:`torchdali.pipeline.feed.Prefetcher`."""
        self._prefetcher.close()
        if self._retries is not None:
            self._retries.close()
            self._retries = None


def _is_same_sample(error: SampleError, other: SampleError) -> bool:
    return (error.index, error.path) == (other.index, other.path)


def _guess_size(batch: Batch, row: int) -> tuple[int, int]:
    """Return the size of the next readable image of a batch, because images are often of one size."""
    order: IntArray = np.roll(batch.rows, -int(np.flatnonzero(batch.rows == row)[0]))
    sizes = (limit_size(batch.reader.read_size(other)) for other in order.tolist() if other != row)
    return next(filter(None, sizes), SIZE)
