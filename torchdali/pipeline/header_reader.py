"""The first bytes of many files, read by DALI's threads, which need no lock of Python's."""

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
from torchdali.sources import MANY, HeaderError

__all__ = ["HeaderReader"]

_AT_THE_BEGINNING = 8
_ENOUGH = 8
_PATIENCE = 5.0


class _Reading:
    """A pipeline, and what its next user must know of it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.pipeline: Any = None
        self.batch_size, self.vets = 0, False
        self.broken = False

    def close(self) -> None:
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is not None:
            pipeline.close()


class HeaderReader(lifecycle.Resource):
    """Reads batches of files one after another; it may be asked by several threads.

    It is built when it is first asked, and anew after a fork, which leaves its threads behind.

    Attributes:
        device: The one that the files are decoded on. The headers are not read there, but what vets them makes a
            context on CUDA's current device.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._reading = _Reading()
        self._waits: list[float] = []
        super().__init__()

    def renew(self) -> None:
        """As of :class:`torchdali.runtime.lifecycle.Resource`."""
        self._reading = _Reading()

    def __call__(
        self, paths: npt.NDArray[np.uint8], validate_headers: bool
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """The first bytes of files, and their lengths.

        Args:
            paths: ``(N, L)`` the paths, padded with NUL.
            validate_headers: Whether it is to fail where DALI's decoder would not read a header.

        Returns:
            ``(N, 2048)``, padded with 0, and ``(N,)``.

        Raises:
            HeaderError: One of them cannot be read, or is refused.
            RuntimeError: There are no threads, or there is no memory, for it.
        """
        while True:
            with lifecycle.native_call(), devices.on(self.device):  # each time: where the process ends, none is built
                reading = self._reading
                with reading.lock:
                    if reading is self._reading:  # and was not let go while this thread waited for it
                        self._build(reading, len(paths), validate_headers)
                    if reading is not self._reading:
                        reading.close()  # what was built meanwhile
                        continue
                    try:
                        return self._read_timed(reading, paths)
                    except HeaderError:
                        raise
                    except (AttributeError, RuntimeError):  # DALI's, of a pipeline that was let go just then
                        if reading is self._reading:
                            raise

    @property
    def wait(self) -> float:
        """Seconds for which a file kept a thread waiting for the storage; 0 before sixteen batches of 32 and more.

        The first eight do not count: beside them a pipeline is built, which keeps Python's lock. Of the next ones that
        is the median, as some of them wait for a training.
        """
        counted = self._waits[_AT_THE_BEGINNING:]
        return median(counted) if len(counted) >= _ENOUGH else 0.0

    def _read_timed(self, reading: _Reading, paths: npt.NDArray[np.uint8]) -> Any:
        began, worked = perf_counter(), process_time()
        read = _read(reading, paths)
        took, work = perf_counter() - began, process_time() - worked
        if len(paths) >= MANY and len(self._waits) < _AT_THE_BEGINNING + 2 * _ENOUGH:
            waited = max(0.0, took - work / min(WAITING, machine.available_cores()))
            self._waits.append(waited * WAITING / len(paths))
        return read

    def _build(self, reading: _Reading, count: int, validate_headers: bool) -> None:
        fits = reading.batch_size >= count and reading.vets == validate_headers
        if reading.pipeline is None or not fits or reading.broken:
            reading.close()
            reading.pipeline = graph.build_header_reader(count, WAITING, validate_headers)
            lifecycle.install_exit_hook()
            reading.batch_size, reading.vets, reading.broken = count, validate_headers, False

    def __reduce__(self) -> tuple[type[HeaderReader], tuple[()]]:
        return HeaderReader, ()

    def close(self) -> None:
        """Frees its threads and memory, until it is asked again; not those that wait for a file that never answers."""
        reading = self._reading
        if reading.lock.acquire(timeout=_PATIENCE):
            try:
                reading.close()
            finally:
                reading.lock.release()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Lets go of the pipeline where it waits for a file: whoever asks next has another one."""
        reading = self._reading
        if reading.lock.locked():
            self._reading = _Reading()
            pipeline, reading.pipeline = reading.pipeline, None
            if pipeline is not None:
                graph.leak(pipeline)


def _read(reading: _Reading, paths: npt.NDArray[np.uint8]) -> Any:
    pipeline = reading.pipeline
    reading.broken = True  # until the end: an interrupt leaves a run whose outputs the next one would get
    pipeline.feed_input(graph.HEADER_PATHS, paths)
    pipeline.schedule_run()
    try:
        heads, lengths = (dlpack.to_array(output) for output in pipeline.share_outputs()[:2])
        if pipeline is reading.pipeline:  # and not let go meanwhile
            pipeline.release_outputs()
    except RuntimeError as error:
        if not is_raised_by_dali(error):
            raise
        reading.broken = False
        raise HeaderError from error
    reading.broken = False
    return heads, lengths[:, 0]
