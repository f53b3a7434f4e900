"""``cache="host"``: encoded files, kept in memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from torchdali.pipeline.cache.base import Cache, half_of_free, patience
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.pipeline.readers import EncodedBatch, EncodedFile, FileReader
from torchdali.samples.image import ppm_of
from torchdali.sources import Header, header_of, open_file
from torchdali.transforms.spec import IntArray

__all__ = ["EncodedCache"]

_UNKNOWN = -1
_BLOCK = 2**26

Bytes = npt.NDArray[np.uint8]


class EncodedCache(Cache):
    """The bytes of files, in blocks of memory. What is read is fed from memory, whether it is kept or not.

    Args:
        files: As for :class:`Cache`.
        state: As for :class:`Cache`.
        budget: As for :class:`Cache`.
    """

    def __init__(self, files: FileReader, state: object, budget: int | None) -> None:
        super().__init__(files, state, budget)
        self._budget: int | None = None
        self._place = np.full(len(files.source), _UNKNOWN, np.int64)
        self._stamp = np.zeros((len(files.source), 2), np.int64)
        self._about = np.zeros((len(files.source), 3), np.int32)
        self._blocks: list[Bytes] = []
        self._bases: list[int] = []
        self._filled = 0  # of the last block
        self._used = 0

    def feed(self, prefetch_depth: int, timeout: float, sampler: Any, clock: Clock) -> Prefetcher:
        if self._budget is None:
            self._budget = half_of_free(torch.device("cpu")) if self._budget_option is None else self._budget_option
        return EncodedPrefetcher(self, prefetch_depth, timeout, clock)

    def read(self, row: int, files: FileReader) -> EncodedFile:
        """Return the bytes of a file and its header, from memory if the file has not changed since.

        Raises:
            SampleError: It is missing, no image, or truncated.
        """
        if black := files.black(row):
            data = ppm_of(black)
            return data, Header(black.height, black.width, len(data), jpeg=False, native=False)
        if kept := self._find(row):
            place, data, header = kept
            with files.blame(row, "read as an image"):
                now = os.stat(files.path(row))  # noqa: PTH116 - a Path takes longer to make than this takes
            if (now.st_size, now.st_mtime_ns) == (header.length, header.modified):
                return data, header
            self._drop(row, place)
        with files.blame(row, "read as an image"):
            data, modified = _read(files.path(row))
            header = header_of(data.data)._replace(modified=modified)
        files.table.learn(row, header)
        files.check_endings(np.array([row]), np.pad(data[-2:], (2, 0))[None, -2:])
        self._keep(row, data, header)
        return data, header

    def _find(self, row: int) -> tuple[int, Bytes, Header] | None:
        """Return what is kept of a file, all of one moment: another thread may keep the file anew meanwhile."""
        with self._lock:
            place = int(self._place[row])
            if place < 0:
                return None
            length, modified = self._stamp[row].tolist()
            height, width, native = self._about[row].tolist()
            header = Header(height, width, length, jpeg=False, native=bool(native), modified=modified)
            return place, self._view(place, length), header

    def _drop(self, row: int, place: int) -> None:
        with self._lock:
            if self._place[row] == place:
                self._place[row] = _UNKNOWN

    def _view(self, place: int, length: int) -> Bytes:
        number = bisect_right(self._bases, place) - 1
        start = place - self._bases[number]
        return self._blocks[number][start : start + length]

    def _keep(self, row: int, data: Bytes, header: Header) -> None:
        length, modified = len(data), header.modified
        with self._lock:
            if self._place[row] >= 0 and self._stamp[row].tolist() == [length, modified]:
                return  # another batch, or iterator, was first
            if not self._has_room(length):
                return
            start, self._filled = self._filled, self._filled + length
            self._used += length
            block, base = self._blocks[-1], self._bases[-1]
        block[start : start + length] = data
        with self._lock:
            if any(one is block for one in self._blocks):  # it was not closed meanwhile
                self._stamp[row] = length, modified
                self._about[row] = header.height, header.width, header.native
                self._place[row] = base + start

    def _has_room(self, length: int) -> bool:
        if self._blocks and self._filled + length <= len(self._blocks[-1]):
            return True
        held = self._held
        size = min(max(_BLOCK, length), (self._budget or 0) - held)
        if size < length:
            return False
        try:
            block: Bytes = np.empty(size, np.uint8)
        except MemoryError:
            self._budget = held
            return False
        # At once, so that a KeyboardInterrupt does not come in between.
        self._blocks, self._bases, self._filled = [*self._blocks, block], [*self._bases, held], 0
        return True

    @property
    def _held(self) -> int:
        return sum(map(len, self._blocks))

    def forget(self, rows: IntArray) -> None:
        """Reads files anew when they are asked for next."""
        self._place[rows] = _UNKNOWN
        self.files.forget(rows)

    def close(self) -> None:
        with self._lock:
            self._place[:] = _UNKNOWN
            self._blocks, self._bases, self._filled, self._used, self._budget = [], [], 0, 0, 0

    def describe(self) -> str:
        kept = int((self._place != _UNKNOWN).sum())
        budget = self._budget_option if self._budget is None else self._budget
        return f"encoded files, in host memory: {self._describe_size(kept, self._used, self._held, budget)}"


class EncodedPrefetcher(Prefetcher):
    """A feed whose files are read before, in its threads.

    Args:
        cache: Reads them.
        prefetch_depth: Batches in flight.
        timeout: Seconds that a batch may take; 0 for ever.
        clock: The epoch's.
    """

    def __init__(self, cache: EncodedCache, prefetch_depth: int, timeout: float, clock: Clock) -> None:
        super().__init__(prefetch_depth, timeout, clock)
        self._cache = cache

    def put(self, batch: Batch) -> None:
        batch.reader = CachedFiles(self._cache, cast("FileReader", batch.reader), patience(self._timeout))
        super().put(batch)


class CachedFiles(EncodedBatch):
    """The files of one batch, from the cache."""

    def __init__(self, cache: EncodedCache, files: FileReader, patience: float) -> None:
        super().__init__(files, lambda rows: [cache.read(row, files) for row in rows], patience)
        self._cache = cache

    def forget(self, rows: IntArray) -> None:
        self._cache.forget(rows)


def _read(path: str) -> tuple[Bytes, int]:
    """A file's bytes, and when it was modified last, as of before."""
    file, about = open_file(path)
    try:
        data: Bytes = np.empty(about.st_size, np.uint8)
        filled = 0
        while filled < len(data) and (count := os.readv(file, [data[filled:].data])):
            filled += count
    finally:
        os.close(file)
    return data[:filled], about.st_mtime_ns
