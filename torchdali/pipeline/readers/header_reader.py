"""Read the first bytes of files, and ask DALI whether it reads their headers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from statistics import median
from threading import Lock
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchdali.pipeline import graph
from torchdali.pipeline.readers.memory_files import KeptFiles, MemoryFile
from torchdali.pipeline.readers.scan import Scan
from torchdali.runtime import devices, lifecycle, machine
from torchdali.runtime.exceptions import is_raised_by_dali
from torchdali.sources import HEADER_BYTES, OPEN_FLAGS
from torchdali.transforms.spec import InputStats

__all__ = ["FirstBytes", "HeaderReader", "HeaderValidator"]

Bytes = npt.NDArray[np.uint8]
_PATIENCE, _QUICK = 5e-3, 3e-5
"""Seconds that one thread may read a batch, and more for each file. A file in the page cache takes 4 us."""
_LATE, _NUM_LATE, _MAX_LATE = 1e-3, 4, 5e-2
"""A few files that take longer do not count, up to so many seconds each. A thread that loses its core is late, too."""
_NUM_BY_THREADS = 16
"""Batches that threads read after one that took long. Then the calling thread tries again."""
_CHUNK = 16
"""Files that each of several threads reads in a row."""
_TURN = 0.1
_NUM_WARMUP, _NUM_MEASURED, _MIN_MEASURED, _NUM_LAST = 64, 64, 8, 8


class FirstBytes:
    """The first bytes of some files.

    Args:
        paths: Their paths.
        kept: Takes copies of whole files, as long as it has room; None if there are to be none.

    Attributes:
        makes_copies: Whether files are copied into ``kept`` from now on.
        data: ``(N, 2048)``, padded with 0. All 0 if the file was not read, or cannot be.
        lengths: ``(N,)`` lengths of the files, modulo 2**32.
        copies: The copies, by the number of their file.
    """

    def __init__(self, paths: Sequence[str | bytes], kept: KeptFiles | None = None) -> None:
        self._paths, self._kept = paths, kept
        self.makes_copies = False
        self.copies: dict[int, MemoryFile] = {}
        self.data: Bytes = np.zeros((len(paths), HEADER_BYTES), np.uint8)
        self.lengths: npt.NDArray[np.uint32] = np.zeros(len(paths), np.uint32)

    def read(self, begin: int, end: int, patience: float = math.inf) -> int:
        """Read files one after another. Return where that ended: before ``end`` only if they took too long.

        Args:
            begin: First file.
            end: Where to end.
            patience: Seconds that all may take together, beyond 30 us for each and 50 ms for each of four.
        """
        now, num_late = perf_counter(), 0
        deadline = now + patience
        for i in range(begin, end):
            before = now
            try:
                self._read(i)
            except OSError as error:
                if error.errno is None:  # of a signal's handler, and not of the system
                    raise
                continue  # whoever reads the file next names it
            now = perf_counter()
            deadline += _QUICK
            if now - before > _LATE and num_late < _NUM_LATE:
                num_late += 1
                deadline += min(now - before, _MAX_LATE)
            if now > deadline:
                return i + 1
        return end

    def _read(self, i: int) -> None:
        file = os.open(self._paths[i], OPEN_FLAGS)
        try:
            length = os.lseek(file, 0, os.SEEK_END)  # 1 us less than os.fstat(); raises OSError for a pipe
            copy = self._kept.copy(file, length) if self._kept and self.makes_copies else None
            if copy:
                self.copies[i], length = copy, copy.length
                copy.read_first(self.data[i].data)
            else:
                os.preadv(file, [self.data[i]], 0)
            self.lengths[i] = length & 0xFFFFFFFF
        finally:
            os.close(file)


class HeaderReader:
    """Reads the first bytes of batches of files. It measures how long a thread waits for a file.

    Threads that read from the page cache hinder each other, and the thread that iterates, because each needs Python's
    global lock several times for a file. So the calling thread reads a batch, until files take long. Several threads
    then read its rest. One thread reads each of the next batches, also until files take long.

    Attributes:
        is_on_network: Whether the first file that was asked for lies on a network file system. Other folders are not
            looked at: one may lie elsewhere, and then the calling thread may wait for it.
    """

    is_on_network = False

    def __init__(self) -> None:
        self._turn, self._num_by_threads = Lock(), 1  # the first batch, whose storage is not known
        self._turn_began = 0.0
        self._waits: list[float] = []
        self._unmeasured = 0.0, 0  # seconds waited for files since the last of them, and these files
        self._was_asked = False

    def scan(
        self,
        paths: Sequence[bytes],
        learn: Callable[[FirstBytes, Scan], None],
        pool: Callable[[], Executor],
        kept: KeptFiles | None = None,
        has_time_limit: bool = False,
    ) -> Scan:
        """Read a batch here or in the threads of ``pool()``. Whoever reads the last file calls ``learn``.

        Args:
            paths: The files.
            learn: Gets what was read. It adds to the scan what would take long.
            pool: Returns the threads.
            kept: Takes copies of the files, if the storage is slow.
            has_time_limit: Whether only threads may read, because a file may never answer.
        """
        if not self._was_asked:
            self._was_asked = True
            self.is_on_network = machine.is_on_network(os.path.dirname(os.fsdecode(paths[0])) or ".")  # noqa: PTH120
        first, scan = FirstBytes(paths, kept), Scan([], lambda _: None, pool)
        left, count = [len(paths)], Lock()

        def begin() -> bool:
            end = self._read_timed(first, 0, len(paths), _PATIENCE)
            scan.add(range(end, len(paths)), read, pool, _CHUNK)
            finish(end)
            return end == len(paths)

        def begin_here() -> None:
            if not begin():
                self._num_by_threads = _NUM_BY_THREADS

        def begin_in_turn(_: Sequence[int]) -> None:
            is_alone = self._turn.acquire(timeout=_TURN)  # no longer, because a file may never answer
            if is_alone:
                self._turn_began = perf_counter()
            try:
                begin()
            finally:
                if is_alone:
                    self._turn.release()

        def read(chunk: Sequence[int]) -> None:
            finish(self._read_timed(first, chunk[0], chunk[-1] + 1) - chunk[0])

        def finish(num_read: int) -> None:
            with count:
                left[0] -= num_read
                is_last = not left[0]
            if is_last:
                learn(first, scan)

        # A file on a network file system may never answer, nor one that a thread has been reading for long.
        is_stuck = self._turn.locked() and perf_counter() - self._turn_began > _TURN
        if has_time_limit or self.is_on_network or is_stuck or self._num_by_threads:
            self._num_by_threads = max(0, self._num_by_threads - 1)
            scan.add([0], begin_in_turn, pool)
        else:
            scan.run(begin_here)
        return scan

    def _read_timed(self, first: FirstBytes, begin: int, end: int, patience: float = math.inf) -> int:
        first.makes_copies = self.is_slow
        start, cpu_start = perf_counter(), thread_time()
        end = first.read(begin, end, patience)
        waited = perf_counter() - start - (thread_time() - cpu_start)
        waited, count = self._unmeasured[0] + max(0.0, waited), self._unmeasured[1] + end - begin
        if count >= _MIN_MEASURED and len(self._waits) < _NUM_WARMUP + _NUM_MEASURED:
            self._waits.append(waited / count)
            waited, count = 0.0, 0
        self._unmeasured = waited, count  # of several threads, one may be lost
        return end

    @property
    def wait(self) -> float:
        """Return for how many seconds a file made a thread wait: a median, or 0 before enough files were read.

        The first measurements do not count, because pipelines are built beside them with Python's global lock held.
        """
        waits = self._waits[_NUM_WARMUP:]
        return median(waits) if len(waits) >= _NUM_MEASURED else 0.0

    @property
    def is_slow(self) -> bool:
        """Whether files make a thread wait long. Before all measurements are made, the last few tell."""
        wait, last = self.wait, self._waits[-_NUM_LAST:]
        if not wait and not self.is_on_network and len(last) == _NUM_LAST:
            wait = median(last)
        return InputStats(wait=wait, is_on_network=self.is_on_network).is_slow


class HeaderValidator(lifecycle.Resource):
    """Finds files whose headers DALI's decoder would not read: DALI 2.4 may end the process for one of them.

    Several threads may call it. Its pipeline is built at the first call, and again after a fork. That takes 0.56 s
    beside an H200. JPEGs need no validator: DALI refuses none whose markers we can follow. A test asks DALI itself.

    Attributes:
        device: The device that decodes the files. Validation runs on the CPU, but makes a context on CUDA's current
            device.
        is_on: Whether files are validated before DALI decodes them. If not, the pipelines that decode them do it.
    """

    device = torch.device("cpu")
    is_on = False

    def __init__(self) -> None:
        self._lock, self._pipeline, self._batch_size = Lock(), None, 0
        super().__init__()

    def renew(self) -> None:
        """See :class:`torchdali.runtime.lifecycle.Resource`."""
        self._lock, self._pipeline, self._batch_size = Lock(), None, 0

    def turn_on(self, has_read: bool = False) -> bool:
        """Validate files from now on, if a GPU decodes. Return whether they are validated.

        Args:
            has_read: Whether headers are known that were not validated.
        """
        # It stays on, because iterators rely on it.
        self.is_on = self.is_on or (self.device.type == "cuda" and not has_read)
        return self.is_on

    def find_refused(self, files: Sequence[Bytes]) -> list[int]:
        """Return the positions of the files whose headers DALI refuses.

        Args:
            files: The bytes of each file, at least those of its header.

        Raises:
            RuntimeError: There are no threads or there is no memory for the pipeline.
        """
        if not len(files) or self._is_accepted(files):
            return []
        if len(files) == 1:
            return [0]
        half = len(files) // 2
        return [*self.find_refused(files[:half]), *(half + i for i in self.find_refused(files[half:]))]

    def _is_accepted(self, files: Sequence[Bytes]) -> bool:
        with lifecycle.native_call(), devices.use(self.device), self._lock:
            if self._pipeline is None or self._batch_size < len(files):
                self._close()
                self._batch_size = 2 ** (len(files) - 1).bit_length()  # so that few larger batches build another
                self._pipeline = graph.build_header_validator(self._batch_size)
                lifecycle.install_exit_hook()
            pipeline: Any = self._pipeline
            self._pipeline = None  # stays so after an interrupt: the next call would get this run's result
            pipeline.feed_images(graph.HEADERS, files)
            pipeline.schedule_run()
            try:
                pipeline.share_outputs()
                pipeline.release_outputs()
                is_accepted = True
            except RuntimeError as error:
                if not is_raised_by_dali(error):
                    raise
                is_accepted = False
            self._pipeline = pipeline
            return is_accepted

    def _close(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()

    def __reduce__(self) -> tuple[type[HeaderValidator], tuple[()]]:
        return HeaderValidator, ()

    def close(self) -> None:
        """Free threads and memory until the next call."""
        with self._lock:
            self._close()
