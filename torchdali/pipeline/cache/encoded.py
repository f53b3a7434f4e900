"""``cache="host"``: encoded files, kept in memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from torchdali.pipeline.cache.base import Cache, FileBatch, patience, share_of_free
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.samples.image import ppm, ppm_of
from torchdali.sources import FolderSource, Scan, header_of, open_file
from torchdali.transforms.spec import IntArray

__all__ = ["EncodedCache"]

_UNKNOWN = -1
_BLOCK = 2**26

Bytes = npt.NDArray[np.uint8]
About = tuple[int, int, bool]
"""Height and width, and whether DALI decodes the bytes as PIL does."""


class EncodedCache(Cache):
    """The bytes of files, in blocks of memory. What is read is fed from memory, whether it is kept or not.

    Args:
        files: As for :class:`Cache`.
        state: As for :class:`Cache`.
        budget: As for :class:`Cache`.
    """

    def __init__(self, files: FolderSource, state: object, budget: int | None) -> None:
        super().__init__(files, state, budget)
        self._budget: int | None = None
        self._place = np.full(len(files), _UNKNOWN, np.int64)
        self._stamp = np.zeros((len(files), 2), np.int64)
        self._about = np.zeros((len(files), 3), np.int32)
        self._blocks: list[Bytes] = []
        self._bases: list[int] = []
        self._filled = 0  # of the last block
        self._used = 0

    def feed(self, window: int, timeout: float, sampler: Any, clock: Clock) -> Prefetcher:
        if self._budget is None:
            self._budget = share_of_free(torch.device("cpu")) if self._given is None else self._given
        return EncodedPrefetcher(self, window, timeout, clock)

    def read(self, row: int, files: FolderSource) -> tuple[Bytes, About]:
        """The bytes of a file, and what their header says, from memory where it is the one that was kept.

        Raises:
            SampleError: It is missing, no image, or truncated.
        """
        if black := files.black(row):
            return ppm_of(black), (black.height, black.width, False)
        if kept := self._kept(row):
            place, length, modified, data, about = kept
            with files.blaming(row, "read as an image"):
                now = os.stat(files.path(row))  # noqa: PTH116 - a Path takes longer to make than this takes
            if (now.st_size, now.st_mtime_ns) == (length, modified):
                return data, about
            self._drop(row, place)
        with files.blaming(row, "read as an image"):
            data, modified = _read(files.path(row))
            header = header_of(data.data)
        files.learn(row, header._replace(modified=modified))
        files.check_endings(np.array([row]), np.pad(data[-2:], (2, 0))[None, -2:])
        about = header.height, header.width, header.native
        self._keep(row, data, modified, about)
        return data, about

    def _kept(self, row: int) -> tuple[int, int, int, Bytes, About] | None:
        """All that is kept of a file at one moment: another thread may keep it anew meanwhile."""
        with self._lock:
            place = int(self._place[row])
            if place < 0:
                return None
            length, modified = self._stamp[row].tolist()
            height, width, native = self._about[row].tolist()
            return place, length, modified, self._view(place, length), (height, width, bool(native))

    def _drop(self, row: int, place: int) -> None:
        with self._lock:
            if self._place[row] == place:
                self._place[row] = _UNKNOWN

    def _view(self, place: int, length: int) -> Bytes:
        number = bisect_right(self._bases, place) - 1
        start = place - self._bases[number]
        return self._blocks[number][start : start + length]

    def _keep(self, row: int, data: Bytes, modified: int, about: About) -> None:
        length = len(data)
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
                self._stamp[row], self._about[row] = (length, modified), about
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
        budget = self._given if self._budget is None else self._budget
        return f"encoded files, in host memory: {self._described(kept, self._used, self._held, budget)}"


class EncodedPrefetcher(Prefetcher):
    """A feed whose files are read before, in its threads.

    Args:
        cache: Reads them.
        window: Batches in flight.
        timeout: Seconds that a batch may take; 0 for ever.
        clock: The epoch's.
    """

    def __init__(self, cache: EncodedCache, window: int, timeout: float, clock: Clock) -> None:
        super().__init__(window, timeout, clock)
        self._cache = cache

    def push(self, batch: Batch) -> None:
        batch.source = KeptFiles(self._cache, cast("FolderSource", batch.source), patience(self._timeout))
        super().push(batch)


class KeptFiles(FileBatch):
    """The files of one batch, in memory."""

    def __init__(self, cache: EncodedCache, files: FolderSource, patience: float) -> None:
        super().__init__(files)
        self._cache, self._patience = cache, patience
        self._data: dict[int, tuple[Bytes, About]] = {}

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Reads all files that are not kept, and looks whether the others are what they were."""
        return Scan(np.unique(rows).tolist(), self._read, pool, patience=self._patience)

    def _read(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._data[row] = self._cache.read(row, self.files)

    def images(self, rows: IntArray, by_pil: IntArray, held: ExitStack) -> list[Bytes]:
        """The bytes of each file; where PIL is to read it, of another one with its pixels."""
        images: list[Bytes] = [self._data[row][0] for row in rows.tolist()]
        for place in by_pil.tolist():
            row = int(rows[place])
            with self.files.blaming(row, "decoded"):
                images[place] = ppm(self._data[row][0])
        return images

    def sizes(self, rows: IntArray) -> IntArray:
        return np.array([self._data[row][1][:2] for row in rows.tolist()], np.int64).reshape(-1, 2)

    def foreign(self, rows: IntArray) -> IntArray:
        odd = [place for place, row in enumerate(rows.tolist()) if not self._data[row][1][2]]
        return np.union1d(np.array(odd, np.int64), self.files.foreign(rows))

    def changed(self, rows: IntArray, lengths: npt.NDArray[np.int32], sizes: IntArray) -> bool:
        return False

    def check_endings(self, rows: IntArray, endings: npt.NDArray[np.uint8]) -> None:
        pass

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
