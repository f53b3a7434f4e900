"""Threads for calls that may never return. The interpreter does not wait for them at exit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["DaemonThreadPoolExecutor", "wait_for"]

_Task = tuple["Future[Any]", Callable[[], Any]]
_Result = TypeVar("_Result")
_local = threading.local()


class _Waits:
    """The futures that the threads of a pool wait for. Once they are cancelled, so is each that follows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._is_cancelled = False

    def add(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.add(future)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            future.cancel()

    def discard(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled, futures = True, list(self._futures)
        for future in futures:  # outside the lock: a callback may wait for another
            future.cancel()


def wait_for(future: Future[_Result]) -> _Result:
    """Return the result of a future. Cancel it if the wait is interrupted, or if this thread's pool is shut down.

    A pool cancels the futures that its threads wait for if its own tasks are cancelled (``cancel_futures=True``).
    """
    waits: _Waits | None = getattr(_local, "waits", None)
    if waits:
        waits.add(future)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
    finally:
        if waits:
            waits.discard(future)


class DaemonThreadPoolExecutor(Executor):
    """A ``ThreadPoolExecutor`` with daemon threads.

    At exit the interpreter waits for the threads of ``ThreadPoolExecutor``. A thread that reads from storage that does
    not answer would keep the process alive.

    Args:
        max_workers: Maximum number of threads. Each is started when it is needed.
        thread_name_prefix: The prefix of their names.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        self._max_workers, self._name = max_workers, thread_name_prefix
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._waits = _Waits()
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ``concurrent.futures.Executor``."""
        assert not self._is_shut_down
        future: Future[Any] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_workers:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._tasks, self._idle, self._waits), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See ``concurrent.futures.Executor``."""
        self._is_shut_down = True
        with suppress(queue.Empty):
            while cancel_futures and (task := self._tasks.get_nowait()):
                task[0].cancel()
        if cancel_futures:
            self._waits.cancel()
        self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __del__(self) -> None:
        self._tasks.put(None)  # the threads hold the queue, not this object, so they must be told


def _work(tasks: queue.SimpleQueue[_Task | None], idle: threading.Semaphore, waits: _Waits) -> None:
    _local.waits = waits
    while task := tasks.get():
        future, call = task
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - Future.result() raises it
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, call  # hold nothing while waiting for the next task
        idle.release()
    tasks.put(None)  # ends the next thread
