"""The common part of iterators with worker processes."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import connection
from typing import Any, cast

from torch.utils.data import _utils as data_utils  # pyright: ignore[reportPrivateUsage]

from torchdali.runtime.exceptions import INTERRUPTED, EpochEndedError, deferred_errors, to_text
from torchdali.state.context import LoaderView
from torchdali.state.iterator import ResumableIterator
from torchdali.workers.queues import make_context
from torchdali.workers.startup import StartupCheck, WorkerInit, WorkerStartup
from torchdali.workers.streams import StreamBatch

__all__ = ["Parallel"]

_START_TIMEOUT = 60.0
"""Seconds after which a forked worker that has not started is killed."""

_INTERVAL: float = data_utils.MP_STATUS_CHECK_INTERVAL

_forget_pids = cast("Callable[[int], None]", vars(data_utils.signal_handling)["_remove_worker_pids"])
"""Takes the ``id`` of an iterator. torch's handler of SIGCHLD stops watching the iterator's workers."""


class Parallel(ResumableIterator):
    """Makes torch's iterator with workers safe against interrupts, dead workers and forks that hang.

    It comes before torch's class in the order of inheritance.

    Interrupts: Workers ignore Ctrl-C, which a terminal sends to all processes. The main process ends them.

    Dead workers: A worker's death is noticed at once, and the error says how it died. torch's handler of SIGCHLD
    raises only while Python code runs. If the signal comes just before torch waits for a batch, torch notices the death
    5 seconds later.

    Forks that hang: A forked worker first runs the fork handlers of other libraries. A handler may wait for a lock that
    another thread held at the fork. Such a worker never starts, so it is killed and an error is raised.

    Args:
        view: The view of the loader that torch's class reads.
    """

    _data_queue: Any
    _worker_queue_idx_cycle: Iterator[int]
    _pin_memory: bool
    _send_idx: int
    _task_info: dict[int, tuple[Any, ...]]
    _worker_pids_set: bool
    _workers: list[Any]
    _workers_status: list[bool]

    def __init__(self, view: LoaderView) -> None:
        self._startup = WorkerStartup()
        self._startup_check: StartupCheck | None = None
        # torch ends only workers with this status. It sets it after the workers have started.
        self._workers_status = [True] * view.num_workers
        is_wrapped = view.dataset is not self._context.view.dataset
        init = WorkerInit(view.worker_init_fn, is_wrapped)
        view = replace(view, multiprocessing_context=make_context(view), worker_init_fn=init)
        if view.multiprocessing_context.get_start_method() != "fork":
            super().__init__(view)
            return
        self._startup_check = StartupCheck(init, view.num_workers)
        with self._startup:
            super().__init__(replace(view, worker_init_fn=self._startup_check))

    @property
    def is_lost(self) -> bool:
        """Whether the workers can be used no more, in this epoch or another one."""
        return bool(self._ended)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            self._startup.end()
            self._start_time = time.monotonic()
        self._ended = INTERRUPTED  # until all workers have begun the new epoch
        super()._reset(loader, first_iter)
        self._ended = ""

    def _try_put_index(self) -> None:
        # The worker that was next at the checkpoint is next again. The first request to the sampler clears checkpoint.
        if saved := self.progress.checkpoint:
            for _ in range(saved.state["worker"]):
                next(self._worker_queue_idx_cycle)
        try:
            self._indices = super()._next_index()
        except StopIteration:
            return
        cast("Any", super())._try_put_index()  # noqa: SLF001 - its own

    def _next_index(self) -> Any:
        """Return the indices that ``_try_put_index`` requested from the sampler."""
        return self._indices

    def __next__(self) -> Any:
        """Return the next batch. If a worker's death ended the epoch, the error says how it died, in torch's words."""
        live_workers = self._live_workers  # torch may remove a dead worker from them
        try:
            return super().__next__()
        except Exception as error:
            # torch's "DataLoader worker (pid(s) ...) exited unexpectedly" does not say how it died.
            text = to_text(error)
            is_described = text.startswith("DataLoader ") and "exited unexpectedly" not in text
            if self._ended and not is_described and (death := _find_death(live_workers, error)):
                self._ended = death
                self._forget_workers()  # torch's handler of SIGCHLD would raise a second error
                raise RuntimeError(death) from error
            raise

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        """Return a batch. Raise an exception of the dataset or the sampler as DeferredError."""
        if isinstance(data, StreamBatch):
            self._stream_step = worker_idx, data.samples, data.state
            data = data.data  # may be an ExceptionWrapper, which torch raises
        with deferred_errors:
            return cast("Any", super())._process_data(data, worker_idx)  # noqa: SLF001 - its own

    def _try_get_data(self, timeout: float = _INTERVAL) -> Any:
        if not self._pin_memory:
            timeout = self._wait(timeout)
        result = cast("Any", super())._try_get_data(timeout)  # noqa: SLF001 - its own
        if not result[0]:
            self._kill_missing()
        return result

    def _wait(self, timeout: float) -> float:
        """Wait until a batch comes or a worker dies. Return how long torch may still wait for a batch."""
        batches = self._data_queue._reader  # noqa: SLF001
        if batches.poll():  # most often one has come already
            return timeout
        ready = connection.wait([batches, *(worker.sentinel for worker in self._live_workers)], timeout)
        if batches in ready:
            return timeout
        for worker in self._live_workers:
            if worker.sentinel in ready:
                worker.join()  # sets its exit code
                raise EpochEndedError(_describe_death(worker))
        return 0.0

    @property
    def _live_workers(self) -> list[Any]:
        """The workers that torch has not ended."""
        return list(itertools.compress(self._workers, self._workers_status))

    def close(self) -> None:
        """End the epoch early, and the workers."""
        super().close()
        self._task_info.clear()  # torch keeps batches here that came early

    def _end_workers(self) -> None:
        """End the workers. There are none if the constructor failed before it started one."""
        if hasattr(self, "_workers"):
            cast("Any", super()).__del__()

    def _forget_workers(self) -> None:
        if self._worker_pids_set:
            _forget_pids(id(self))
            self._worker_pids_set = False

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else torch's exit handler has ended the workers
            self._end_workers()

    def _kill_missing(self) -> None:
        """Kill the workers that did not start in time, and raise an error with their process ids."""
        missing = self._startup_check.find_missing() if self._startup_check else []
        if not missing or time.monotonic() - self._start_time < _START_TIMEOUT:
            return
        pids = ", ".join(str(self._workers[worker].pid) for worker in missing)
        message = (
            f"DataLoader worker (pid {pids}) did not begin within {_START_TIMEOUT:g} s after the fork. Most likely it "
            "waits for a lock that a thread of another library held in the main process just then: use "
            'multiprocessing_context="forkserver" or "spawn", whose workers inherit no locks'
        )
        self._forget_workers()  # torch's handler of SIGCHLD would raise an error for the kills here
        for worker in missing:
            # SIGKILL, because the worker may have inherited a handler of SIGTERM that it cannot run.
            self._workers[worker].kill()
            self._workers[worker].join()
        raise EpochEndedError(message)


def _find_death(workers: list[Any], error: Exception) -> str:
    """Return how a worker died, or an empty string. torch's handler of SIGCHLD may run too early or too late to say."""
    # From the connection to a worker that is ending, or from its shared memory.
    if isinstance(error.__cause__ or error, (OSError, EOFError)):
        ending = connection.wait([worker.sentinel for worker in workers if worker.exitcode is None], timeout=1)
        for worker in workers:
            if worker.sentinel in ending:
                worker.join()
    return next((_describe_death(worker) for worker in workers if worker.exitcode is not None), "")


def _describe_death(worker: Any) -> str:
    """Describe how a worker died, in torch's words."""
    code = worker.exitcode
    how = f"is killed by signal: {signal.strsignal(-code)}" if code < 0 else f"exited with code {code}"
    return f"DataLoader worker (pid {worker.pid}) {how}"
