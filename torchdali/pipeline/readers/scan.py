"""Headers that are read in the background, before their batch's turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from time import monotonic, perf_counter

__all__ = ["Scan", "ScanTimeoutError"]

_CHUNK = 16
_LOOKED_AT = 8  # before the clock is
_QUICK = 20e-6  # seconds for one file: less than it takes to leave it to another thread


class ScanTimeoutError(Exception):
    """Storage did not give headers in time. No :exc:`TimeoutError`, which a file may raise itself."""


class Scan:
    """The headers of one batch, being read.

    Args:
        indices: Samples whose files are to be read; none of them is asked for twice.
        learn: Reads the headers of some of them, one after another; may raise SampleError.
        pool: Gives the threads; not called where there is nothing to read.
        chunk: How many one thread reads at a time.
        patience: Seconds that the calling thread reads itself before it leaves the rest to the others, beside those
            that files take which are read at once. Where a file takes microseconds, the interpreter's lock goes back
            and forth longer than that. 0 leaves all to the others.
    """

    def __init__(
        self,
        indices: Sequence[int],
        learn: Callable[[Sequence[int]], None],
        pool: Callable[[], Executor],
        chunk: int = _CHUNK,
        patience: float = 0.0,
    ) -> None:
        self._futures: list[Future[None]] = []
        indices = self._read_here(indices, learn, patience) if patience else indices
        chunks = [indices[i : i + chunk] for i in range(0, len(indices), chunk)]
        if chunks:
            executor = pool()
            self._futures += [executor.submit(learn, chunk) for chunk in chunks]

    def _read_here(
        self, indices: Sequence[int], learn: Callable[[Sequence[int]], None], patience: float
    ) -> Sequence[int]:
        """Reads until patience is at an end; returns what is left. A file's error waits for :meth:`wait`."""
        begin, start = perf_counter(), 0
        while start < len(indices):
            if perf_counter() - begin >= patience + start * _QUICK:
                return indices[start:]
            end = start + (_LOOKED_AT if start else 1)  # from slow storage no more than one
            try:
                learn(indices[start:end])
            except Exception as error:  # noqa: BLE001 - raised by wait()
                failed: Future[None] = Future()
                failed.set_exception(error)
                self._futures.append(failed)
                return indices[end:]
            start = end
        return ()

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(future.done() for future in self._futures)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all headers are read.

        Raises:
            SampleError: One of them cannot be; the others may still be being read.
            ScanTimeoutError: It takes longer than ``timeout`` seconds.
        """
        end = None if timeout is None else monotonic() + timeout
        while self._futures:
            if end and not futures.wait(self._futures[:1], max(end - monotonic(), 0)).done:
                raise ScanTimeoutError(f"headers were not read in {timeout} seconds")
            self._futures.pop(0).result()
