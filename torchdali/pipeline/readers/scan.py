"""Reading headers in the background, before their batch's turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from functools import partial
from time import monotonic, perf_counter

__all__ = ["Scan", "ScanTimeoutError"]

_CHUNK = 16
_CHECK_INTERVAL = 8  # files between two looks at the clock
_QUICK = 20e-6  # seconds for one file: less than passing it to another thread takes


class ScanTimeoutError(Exception):
    """Storage did not deliver headers in time. It is no :exc:`TimeoutError`, because reading a file may raise that."""


class Scan:
    """A scan of the headers of one batch, in progress.

    Args:
        indices: The samples whose files are read, each once.
        read: Reads the headers of some samples, one after another. It may raise SampleError.
        pool: Returns the threads. It is not called if there is nothing to read.
        chunk: Number of files that a thread reads in a row.
        patience: Seconds for which the calling thread reads files itself before it leaves them to the pool. Files that
            take microseconds do not count, because passing the interpreter's lock between threads takes longer. 0
            leaves all files to the pool.
    """

    def __init__(
        self,
        indices: Sequence[int],
        read: Callable[[Sequence[int]], None],
        pool: Callable[[], Executor],
        chunk: int = _CHUNK,
        patience: float = 0.0,
    ) -> None:
        self._futures: list[Future[None]] = []
        self.add(self._read_here(indices, read, patience) if patience else indices, read, pool, chunk)

    def add(
        self,
        indices: Sequence[int],
        read: Callable[[Sequence[int]], None],
        pool: Callable[[], Executor],
        chunk: int = _CHUNK,
    ) -> None:
        """Let the threads read something else, too. The arguments are those of the constructor."""
        chunks = [indices[i : i + chunk] for i in range(0, len(indices), chunk)]
        if chunks:
            executor = pool()
            self._futures += [executor.submit(read, chunk) for chunk in chunks]

    def _read_here(
        self, indices: Sequence[int], read: Callable[[Sequence[int]], None], patience: float
    ) -> Sequence[int]:
        """Read until the patience ends. Return the other indices. :meth:`wait` raises the error of a file."""
        begin, start = perf_counter(), 0
        while start < len(indices):
            if perf_counter() - begin >= patience + start * _QUICK:
                return indices[start:]
            end = start + (_CHECK_INTERVAL if start else 1)  # the first file alone, in case storage is slow
            self.run(partial(read, indices[start:end]))
            if self._futures:
                return indices[end:]
            start = end
        return ()

    def run(self, call: Callable[[], None]) -> None:
        """Call something here and now. :meth:`wait` raises its error."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised by wait()
            failed: Future[None] = Future()
            failed.set_exception(error)
            self._futures.append(failed)

    def is_done(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return all(future.done() for future in self._futures)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all headers are read.

        Raises:
            SampleError: A header cannot be read. Threads may still read others.
            ScanTimeoutError: It takes longer than ``timeout`` seconds.
        """
        end = None if timeout is None else monotonic() + timeout
        while self._futures:
            if end and not futures.wait(self._futures[:1], max(end - monotonic(), 0)).done:
                raise ScanTimeoutError(f"headers were not read in {timeout} seconds")
            self._futures.pop(0).result()
