"""What iterators with worker processes have in common."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import connection, queues, synchronize
from multiprocessing.util import Finalize
from typing import Any, NoReturn, cast

from torch._utils import ExceptionWrapper
from torch.utils.data import _utils as data_utils  # pyright: ignore[reportPrivateUsage]

from torchdali.runtime.exceptions import INTERRUPTED, EpochEndedError, deferred_errors
from torchdali.state.context import LoaderView
from torchdali.state.iterator import ResumableIterator
from torchdali.workers.pickling import UnsendableError, make_picklable, pickle_indices
from torchdali.workers.startup import DeferInterrupt, StartupCheck, WorkerInit, WorkerStartup

__all__ = ["Parallel"]

_BEGIN_WITHIN = 60.0
"""Seconds after which a worker that was forked and has not begun never will."""

_MultiprocessingQueue: Any = queues.Queue
_MultiprocessingEvent: Any = synchronize.Event

_INTERVAL: float = data_utils.MP_STATUS_CHECK_INTERVAL

_forget_pids = cast("Callable[[int], None]", vars(data_utils.signal_handling)["_remove_worker_pids"])
"""Lets torch's handler of SIGCHLD watch the workers of an iterator, given by its ``id``, no longer."""


class Parallel(ResumableIterator):
    """Its workers are started and asked for batches without interruption; it comes before torch's class.

    A KeyboardInterrupt can come anywhere else, in the user's sampler too. In the midst of ``Queue.put`` it could leave
    a lock locked for which the end of the workers would wait for ever, or a queue that sends nothing any more.

    A worker's death is noticed at once and named. torch's handler of SIGCHLD raises it only where Python runs: a signal
    that comes just before the wait for a batch begins is seen when that wait is over, 5 seconds later.

    A worker that is forked may never begin: handlers of other libraries run in it first, and one may wait for a lock
    that a thread of theirs held in this process. It is killed then, and an error raised.

    Args:
        view: What torch's class sees of the loader.
    """

    _data_queue: Any
    _worker_queue_idx_cycle: Iterator[int]
    _pin_memory: bool
    _send_idx: int
    _task_info: dict[int, tuple[Any, ...]]
    _worker_pids_set: bool
    _workers: list[Any]
    _workers_num_tasks: list[int]
    _workers_status: list[bool]

    def __init__(self, view: LoaderView) -> None:
        self._starting = WorkerStartup()
        self._startup_check: StartupCheck | None = None
        is_ours = isinstance(view.worker_init_fn, WorkerInit)
        view = replace(view, multiprocessing_context=_make_context(view))
        if view.multiprocessing_context.get_start_method() == "fork":
            self._startup_check = StartupCheck(view.worker_init_fn, view.num_workers)
            view = replace(view, worker_init_fn=self._startup_check)
        with self._starting if is_ours else nullcontext():
            super().__init__(view)

    @property
    def lost(self) -> bool:
        """Whether the workers cannot go on, in this epoch or another one."""
        return bool(self._ended) or self._process != os.getpid()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            self._workers_status = [True] * self._num_workers  # by which torch ends them, should the next line raise
            self._starting.end()
            self._forked = time.monotonic()
        self._ended = INTERRUPTED  # until all workers are at the new epoch
        super()._reset(loader, first_iter)
        self._ended = ""

    def _try_put_index(self) -> None:
        if saved := self.progress.checkpoint:  # until the sampler is asked; the worker that was next is next again
            for _ in range(saved.state["worker"]):
                next(self._worker_queue_idx_cycle)
        try:
            self._indices = super()._next_index()
        except StopIteration:
            return
        with DeferInterrupt():
            try:
                cast("Any", super())._try_put_index()  # noqa: SLF001 - its own
            except UnsendableError as error:
                self._put_failure(_Failure(error))

    def _put_failure(self, failure: ExceptionWrapper) -> None:
        """Keep an exception as if it were a batch of the first worker that came early. torch raises it in its turn."""
        self._task_info[self._send_idx] = 0, failure
        self._workers_num_tasks[0] += 1
        self._send_idx += 1

    def _mark_worker_as_unavailable(self, *args: Any, **options: Any) -> None:
        with DeferInterrupt():  # it puts into a queue, too
            cast("Any", super())._mark_worker_as_unavailable(*args, **options)  # noqa: SLF001 - its own

    def _next_index(self) -> Any:
        """What the sampler gave to ``_try_put_index``."""
        return self._indices

    def __next__(self) -> Any:
        """Return the next batch; where the epoch ends because a worker died, say which, in torch's words."""
        live_workers = self._live_workers  # torch may strike a dead one out
        try:
            return super().__next__()
        except Exception as error:
            named = str(error).startswith("DataLoader ") and "exited unexpectedly" not in str(error)
            if self._ended and not named and (dead := _find_dead(live_workers, error)):
                self._ended = dead
                raise RuntimeError(dead) from error
            raise

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        """Return a batch. What the dataset raised in its worker, or the sampler here, is the batch's error."""
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
        """Waits until a batch comes or a worker dies; returns how long torch may still wait for a batch."""
        batches = self._data_queue._reader  # noqa: SLF001
        ready = connection.wait([batches, *(worker.sentinel for worker in self._live_workers)], timeout)
        if batches in ready:
            return timeout
        for worker in self._live_workers:
            if worker.sentinel in ready:
                worker.join()  # it is ending
                raise EpochEndedError(_describe_death(worker))
        return 0.0

    @property
    def _live_workers(self) -> list[Any]:
        """The workers that are to live."""
        return list(itertools.compress(self._workers, self._workers_status))

    def close(self) -> None:
        """Ends the epoch before its end, and the workers."""
        super().close()
        self._task_info.clear()  # where torch keeps batches that came before their turn

    def _end_workers(self) -> None:
        """Ends the workers; those that a forked process inherited are its parent's, and only forgotten."""
        if not hasattr(self, "_workers"):
            return  # none was begun
        if self._process != os.getpid():
            self._forget_workers()
            return
        cast("Any", super()).__del__()

    def _forget_workers(self) -> None:
        if self._worker_pids_set:
            _forget_pids(id(self))
            self._worker_pids_set = False

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # torch has ended its workers by then
            self._end_workers()

    def _kill_missing(self) -> None:
        """Kills workers that never began, and raises which."""
        missing = self._startup_check.missing() if self._startup_check else []
        if not missing or time.monotonic() - self._forked < _BEGIN_WITHIN:
            return
        pids = ", ".join(str(self._workers[worker].pid) for worker in missing)
        lost = (
            f"DataLoader worker (pid {pids}) did not begin within {_BEGIN_WITHIN:g} s after the fork. Most likely it "
            "waits for a lock that a thread of another library held in the main process just then: use "
            'multiprocessing_context="forkserver" or "spawn", whose workers inherit no locks'
        )
        self._forget_workers()  # torch's handler would raise what happens here
        for worker in missing:
            self._workers[worker].kill()  # it may have inherited a handler of SIGTERM, and cannot run it
            self._workers[worker].join()
        raise EpochEndedError(lost)


class _Failure(ExceptionWrapper):
    """An exception of this process, in the place of a batch."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def reraise(self) -> NoReturn:
        raise self._error


class _Queue(_MultiprocessingQueue):
    """A queue that loses no exception of a worker, and nothing that a worker has put into it before the worker ends."""

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(obj, tuple):
            task, data = cast("tuple[Any, Any]", obj)
            if isinstance(data, ExceptionWrapper):
                make_picklable(data)
            elif self._opid == os.getpid():  # in the main process, which sends indices
                data = pickle_indices(data)
            obj = task, data
        super().put(obj, block, timeout)

    def _start_thread(self) -> None:
        super()._start_thread()
        if self._jointhread and self._opid != os.getpid():  # in a worker
            self._jointhread.cancel()
            arguments = [weakref.ref(self._thread), os.getppid()]
            # The priority is that of the finalizer just cancelled.
            self._jointhread = Finalize(self._thread, _wait_until_sent, arguments, exitpriority=-5)


def _wait_until_sent(sender: Callable[[], threading.Thread | None], parent: int) -> None:
    """Wait at a worker's end for the thread that sends, unless the parent was killed and reads nothing any more."""
    while (thread := sender()) and thread.is_alive() and os.getppid() == parent:
        thread.join(1)


class _Event(_MultiprocessingEvent):
    """The event that ends workers, without its lock: a worker that is killed may hold it, and ``set()`` would hang.

    One process sets it and all look at it. Nobody waits for it, and ``wait()`` would not return.
    """

    def is_set(self) -> bool:
        return not self._flag._semlock._is_zero()  # noqa: SLF001

    def set(self) -> None:
        self._flag.acquire(False)
        self._flag.release()


def _make_context(loader: Any) -> Any:
    """Return the loader's ``multiprocessing_context`` with these queues and events."""
    original: Any = loader.multiprocessing_context or multiprocessing.get_context()
    context = copy.copy(original)
    queue: Any = _Queue
    event: Any = _Event
    vars(context).update(Queue=partial(queue, 0, ctx=original), Event=partial(event, ctx=original))
    return context


def _find_dead(workers: list[Any], error: Exception) -> str:
    """Return how a worker died, if one did. torch's handler of signals may have come too early or too late to say."""
    if isinstance(error, (OSError, EOFError)):  # from a connection to one that is just ending
        ending = connection.wait([worker.sentinel for worker in workers if worker.exitcode is None], timeout=1)
        for worker in workers:
            if worker.sentinel in ending:
                worker.join()
    return next((_describe_death(worker) for worker in workers if worker.exitcode is not None), "")


def _describe_death(worker: Any) -> str:
    """How a worker ended that should not have, in torch's words."""
    code = worker.exitcode
    how = f"is killed by signal: {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"DataLoader worker (pid {worker.pid}) {how}"
