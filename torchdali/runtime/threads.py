"""Threads for what may never return, for which nobody waits when the process ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

__all__ = ["DaemonThreadPoolExecutor"]

_Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreadPoolExecutor(Executor):
    """As ``ThreadPoolExecutor``, but that nobody waits for the threads.

    The interpreter waits for those of ``ThreadPoolExecutor`` before it ends, and a thread that reads from storage that
    does not answer would keep the process alive.

    Args:
        most: The most threads; each is started when it is needed.
        name: What their names begin with.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._over = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As of ``concurrent.futures.Executor``."""
        assert not self._over
        future: Future[Any] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._tasks, self._idle), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there can be no more; the others do its work, if there are any
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of ``concurrent.futures.Executor``."""
        self._over = True
        with suppress(queue.Empty):
            while cancel_futures and (task := self._tasks.get_nowait()):
                task[0].cancel()
        self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __del__(self) -> None:
        self._tasks.put(None)  # the threads hold the tasks, and not this


def _work(tasks: queue.SimpleQueue[_Task | None], idle: threading.Semaphore) -> None:
    while task := tasks.get():
        future, call = task
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, call  # while it waits for the next one
        idle.release()
    tasks.put(None)  # for the others
