"""``cache="host"``: encoded files in host memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from torchdali.pipeline.cache.base import FileCache, choose_budget, scan_patience
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.pipeline.readers import EncodedBatch, EncodedFile, FileReader
from torchdali.samples.image import encode_ppm
from torchdali.sources import Header, parse_header, read_file
from torchdali.transforms.spec import IntArray

__all__ = ["EncodedCache"]

_UNKNOWN = -1
_BLOCK = 2**26

Bytes = npt.NDArray[np.uint8]


class EncodedCache(FileCache):
    """The bytes of files, in blocks of memory. A file that does not fit is read again for each batch.

    Args:
        files: As for :class:`FileCache`.
        state: As for :class:`FileCache`.
        budget: As for :class:`FileCache`.
    """

    def __init__(self, files: FileReader, state: object, budget: int | None) -> None:
        super().__init__(files, state, budget)
        self._budget: int | None = None
        self._offset = np.full(len(files.source), _UNKNOWN, np.int64)
        self._stamp = np.zeros((len(files.source), 2), np.int64)
        self._header = np.zeros((len(files.source), 3), np.int32)
        self._blocks: list[Bytes] = []
        self._bases: list[int] = []
        self._filled = 0  # bytes of the last block
        self._used = 0

    def make_prefetcher(self, prefetch_depth: int, timeout: float, sampler: Any, clock: Clock) -> Prefetcher:
        if self._budget is None:
            self._budget = choose_budget(torch.device("cpu")) if self._budget_option is None else self._budget_option
        return EncodedPrefetcher(self, prefetch_depth, timeout, clock)

    def read(self, row: int, files: FileReader) -> EncodedFile:
        """Return the bytes of a file and its header. Use the memory if the file has not changed.

        Raises:
            SampleError: The file is missing, no image, or truncated.
        """
        if black := files.black(row):
            data = encode_ppm(black)
            return data, Header(black.height, black.width, len(data), jpeg=False, native=False)
        if entry := self._find(row):
            offset, data, header = entry
            with files.blame(row, "read as an image"):
                status = os.stat(files.path(row))  # noqa: PTH116 - building a Path takes longer than this
            if (status.st_size, status.st_mtime_ns) == (header.length, header.modified):
                return data, header
            self._drop(row, offset)
        with files.blame(row, "read as an image"):
            data, modified = read_file(files.path(row))
            header = parse_header(data.data, files.adjust_orientation)._replace(modified=modified)
        files.table.update(row, header)
        if header.jpeg and header.native:
            files.check_complete(row, data)
        self._add(row, data, header)
        return data, header

    def _find(self, row: int) -> tuple[int, Bytes, Header] | None:
        """Return the offset, bytes and header of a file, under the lock: another thread may replace them."""
        with self._lock:
            offset = int(self._offset[row])
            if offset < 0:
                return None
            length, modified = self._stamp[row].tolist()
            height, width, native = self._header[row].tolist()
            header = Header(height, width, length, jpeg=False, native=bool(native), modified=modified)
            return offset, self._view(offset, length), header

    def _drop(self, row: int, offset: int) -> None:
        with self._lock:
            if self._offset[row] == offset:
                self._offset[row] = _UNKNOWN

    def _view(self, offset: int, length: int) -> Bytes:
        number = bisect_right(self._bases, offset) - 1
        start = offset - self._bases[number]
        return self._blocks[number][start : start + length]

    def _add(self, row: int, data: Bytes, header: Header) -> None:
        length, modified = len(data), header.modified
        with self._lock:
            if self._offset[row] >= 0 and self._stamp[row].tolist() == [length, modified]:
                return  # another batch or iterator has stored it
            if not self._has_room(length):
                return
            start = self._filled
            self._blocks[-1][start : start + length] = data
            self._filled += length
            self._used += length
            self._stamp[row] = length, modified
            self._header[row] = header.height, header.width, header.native
            self._offset[row] = self._bases[-1] + start

    def _has_room(self, length: int) -> bool:
        if self._blocks and self._filled + length <= len(self._blocks[-1]):
            return True
        reserved = self._reserved
        size = min(max(_BLOCK, length), (self._budget or 0) - reserved)
        if size < length:
            return False
        try:
            block: Bytes = np.empty(size, np.uint8)
        except MemoryError:
            self._budget = reserved
            return False
        # One statement, so that a KeyboardInterrupt cannot leave the three inconsistent.
        self._blocks, self._bases, self._filled = [*self._blocks, block], [*self._bases, reserved], 0
        return True

    @property
    def _reserved(self) -> int:
        return sum(map(len, self._blocks))

    def forget(self, rows: IntArray) -> None:
        """Forget files, so that they are read again."""
        self._offset[rows] = _UNKNOWN
        self.files.forget(rows)

    def close(self) -> None:
        with self._lock:
            self._offset[:] = _UNKNOWN
            self._blocks, self._bases, self._filled, self._used, self._budget = [], [], 0, 0, 0

    def describe(self) -> str:
        count = int((self._offset != _UNKNOWN).sum())
        budget = self._budget_option if self._budget is None else self._budget
        return f"encoded files, in host memory: {self._describe_size(count, self._used, self._reserved, budget)}"


class EncodedPrefetcher(Prefetcher):
    """A prefetcher that reads files through the cache, in its threads.

    Args:
        cache: The cache.
        prefetch_depth: Number of batches in flight.
        timeout: Seconds that a batch may take; 0 means no limit.
        clock: The clock of the epoch.
    """

    def __init__(self, cache: EncodedCache, prefetch_depth: int, timeout: float, clock: Clock) -> None:
        super().__init__(prefetch_depth, timeout, clock)
        self._cache = cache

    def put(self, batch: Batch) -> None:
        batch.reader = CachedFiles(self._cache, cast("FileReader", batch.reader), scan_patience(self._timeout))
        super().put(batch)


class CachedFiles(EncodedBatch):
    """The files of one batch, from the cache."""

    def __init__(self, cache: EncodedCache, files: FileReader, patience: float) -> None:
        super().__init__(files, lambda rows: [cache.read(row, files) for row in rows], patience)
        self._cache = cache

    def forget(self, rows: IntArray) -> None:
        self._cache.forget(rows)
