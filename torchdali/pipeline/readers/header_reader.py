"""Read the first bytes of many files in DALI's threads, which do not need Python's global lock."""

from __future__ import annotations

from statistics import median
from threading import Lock
from time import perf_counter, process_time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchdali.pipeline import dlpack, graph
from torchdali.pipeline.tuning import WAITING
from torchdali.runtime import devices, lifecycle, machine
from torchdali.runtime.exceptions import is_raised_by_dali
from torchdali.sources.headers.batch import MIN_BATCH_READ

__all__ = ["HeaderError", "HeaderReader"]

_NUM_WARMUP = 8
_MIN_BATCHES = 8
_PATIENCE = 5.0


class HeaderError(RuntimeError):
    """One of several files cannot be read, or DALI refuses its header."""


class _Reading:
    """A pipeline, its settings, and whether it can be used again."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.pipeline: Any = None
        self.batch_size, self.validates = 0, False
        self.broken = False

    def close(self) -> None:
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is not None:
            pipeline.close()


class HeaderReader(lifecycle.Resource):
    """Reads batches of files one after another. Several threads may call it.

    The pipeline is built at the first call, and again after a fork.

    Attributes:
        device: The device that decodes the files. Headers are read on the CPU, but their validation makes a context on
            CUDA's current device.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._reading = _Reading()
        self._waits: list[float] = []
        super().__init__()

    def renew(self) -> None:
        """See :class:`torchdali.runtime.lifecycle.Resource`."""
        self._reading = _Reading()

    def __call__(
        self, paths: npt.NDArray[np.uint8], validate_headers: bool, vetted: bool = False
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Return the first bytes of files, and their lengths.

        Args:
            paths: ``(N, L)`` the paths, padded with NUL.
            validate_headers: Whether to raise if DALI's decoder would not read a header of a JPEG.
            vetted: Whether to do so for any format, because Python has found the files native.

        Returns:
            ``(N, 2048)``, padded with 0, and ``(N,)``.

        Raises:
            HeaderError: A file cannot be read, or its header is refused.
            RuntimeError: There are no threads or there is no memory for the pipeline.
        """
        while True:
            with lifecycle.native_call(), devices.use(self.device):  # in the loop, so that no pipeline is built at exit
                reading = self._reading
                with reading.lock:
                    if reading is self._reading:  # else it was abandoned while this thread waited
                        self._build(reading, len(paths), validate_headers)
                    if reading is not self._reading:
                        reading.close()  # abandoned while it was built
                        continue
                    try:
                        return self._read_timed(reading, paths, vetted)
                    except HeaderError:
                        raise
                    except (AttributeError, RuntimeError):  # the pipeline was abandoned during the call
                        if reading is self._reading:
                            raise

    @property
    def wait(self) -> float:
        """Return for how many seconds a file made a thread wait for storage: a median, or 0 before 16 large batches.

        A large batch has 32 files or more. The first eight do not count, because a pipeline is built beside them with
        Python's global lock held. The median ignores batches that waited for the training.
        """
        waits = self._waits[_NUM_WARMUP:]
        return median(waits) if len(waits) >= _MIN_BATCHES else 0.0

    def _read_timed(self, reading: _Reading, paths: npt.NDArray[np.uint8], vetted: bool) -> Any:
        begin, cpu_begin = perf_counter(), process_time()
        outputs = _read(reading, paths, vetted)
        seconds, cpu_seconds = perf_counter() - begin, process_time() - cpu_begin
        if len(paths) >= MIN_BATCH_READ and len(self._waits) < _NUM_WARMUP + 2 * _MIN_BATCHES:
            waited = max(0.0, seconds - cpu_seconds / min(WAITING, machine.count_available_cores()))
            self._waits.append(waited * WAITING / len(paths))
        return outputs

    def _build(self, reading: _Reading, count: int, validate_headers: bool) -> None:
        fits = reading.batch_size >= count and reading.validates == validate_headers
        if reading.pipeline is None or not fits or reading.broken:
            reading.close()
            reading.pipeline = graph.build_header_reader(count, WAITING, validate_headers)
            lifecycle.install_exit_hook()
            reading.batch_size, reading.validates, reading.broken = count, validate_headers, False

    def __reduce__(self) -> tuple[type[HeaderReader], tuple[()]]:
        return HeaderReader, ()

    def close(self) -> None:
        """Free threads and memory until the next call. Threads that wait for a file that never answers are leaked."""
        reading = self._reading
        if reading.lock.acquire(timeout=_PATIENCE):
            try:
                reading.close()
            finally:
                reading.lock.release()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Leak the pipeline if it waits for a file. The next call builds another one."""
        reading = self._reading
        if reading.lock.locked():
            self._reading = _Reading()
            pipeline, reading.pipeline = reading.pipeline, None
            if pipeline is not None:
                graph.leak(pipeline)


def _read(reading: _Reading, paths: npt.NDArray[np.uint8], vetted: bool) -> Any:
    pipeline = reading.pipeline
    reading.broken = True  # stays so after an interrupt: the next call would get this run's outputs
    pipeline.feed_input(graph.HEADER_PATHS, paths)
    if reading.validates:
        pipeline.feed_input(graph.HEADERS_VETTED, np.full(len(paths), vetted))
    pipeline.schedule_run()
    try:
        header_bytes, lengths = (dlpack.to_array(output) for output in pipeline.share_outputs()[:2])
        if pipeline is reading.pipeline:  # else it was abandoned meanwhile
            pipeline.release_outputs()
    except (RuntimeError, UnicodeDecodeError) as error:  # UnicodeDecodeError if DALI's message has a name not in UTF-8
        if not is_raised_by_dali(error):
            raise
        reading.broken = False
        raise HeaderError from error
    reading.broken = False
    return header_bytes, lengths[:, 0]
