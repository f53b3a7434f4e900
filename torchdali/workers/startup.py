"""Worker startup: defer Ctrl-C, disable garbage collection, check that each worker started."""

from __future__ import annotations

import gc
import inspect
import mmap
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

__all__ = ["StartupCheck", "WorkerInit", "WorkerStartup"]


class WorkerStartup:
    """The context in which workers are forked: without KeyboardInterrupt and without garbage collection.

    A KeyboardInterrupt could leave a worker that no object refers to. In a worker that was just forked, it would come
    out of ``os.fork()``, and the worker would continue as a copy of the main process.

    A worker inherits both, until its ``WorkerInit``. It must not finalise objects that it inherited. The destructor of
    a CUDA tensor would end the process. The destructor of a process group or of a thread pool would wait for threads
    that only the parent has.
    """

    _handler: Any = None
    _disabled_gc = _is_pending = False

    def __enter__(self) -> None:
        self._disabled_gc = gc.isenabled()
        gc.disable()
        handler = signal.getsignal(signal.SIGINT)
        # Python raises KeyboardInterrupt in the main thread only, and sets handlers only there.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: object) -> None:
        """Handle SIGINT: note it for the end."""
        self._is_pending = True

    def end(self) -> None:
        """End both, possibly before the context ends. Call the former handler if SIGINT came meanwhile."""
        if self._disabled_gc:
            gc.enable()
            self._disabled_gc = False
        handler, self._handler = self._handler, None
        if handler is None:
            return
        signal.signal(signal.SIGINT, handler)
        if self._is_pending:
            handler(signal.SIGINT, inspect.currentframe())

    def __exit__(self, *_: object) -> None:
        self.end()


class WorkerInit:
    """A ``worker_init_fn`` that prepares a worker, and then calls the user's.

    It makes ``get_worker_info()`` show the user's dataset instead of the wrapper. It also makes the worker ignore
    Ctrl-C, which a terminal sends to all processes. A worker that it ends may hold the lock of a queue, and the main
    process would wait for that lock for ever.

    Args:
        worker_init_fn: The user's function, or None.
        is_wrapped: Whether the worker's dataset is a wrapper of the user's.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, is_wrapped: bool) -> None:
        self._init, self._is_wrapped = worker_init_fn, is_wrapped
        self._enables_gc = gc.isenabled()
        self._handler: Any = signal.getsignal(signal.SIGINT)
        self._is_forked = True

    def __getstate__(self) -> dict[str, Any]:
        # Only a worker that is not forked gets it pickled. It has Python's handler.
        return {**vars(self), "_is_forked": False, "_handler": signal.default_int_handler}

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker before it loads samples."""
        if self._is_forked:
            gc.freeze()  # never collect what was inherited, see WorkerStartup
        if self._enables_gc:
            gc.enable()
        if self._is_wrapped:
            info: Any = get_worker_info()
            # torch's WorkerInfo forbids changes. This one is safe: no other code has seen the object yet.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._handler is signal.default_int_handler:
            # Not SIG_IGN: programs that the dataset starts would inherit it.
            signal.signal(signal.SIGINT, _ignore_interrupt)
        elif self._handler is not None:  # None is a handler that no Python code has set, which stays
            signal.signal(signal.SIGINT, self._handler)
        if self._init is not None:
            self._init(worker_id)


class StartupCheck:
    """A ``worker_init_fn`` that tells the main process which forked workers have started.

    Each worker sets a byte of shared memory, which needs no lock.

    Args:
        worker_init_fn: The function to call next, or None.
        workers: Number of workers.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, workers: int) -> None:
        self._init = worker_init_fn
        self._started = mmap.mmap(-1, workers)

    def __call__(self, worker_id: int) -> None:
        """Mark this worker as started. In a worker only torch's code runs before."""
        self._started[worker_id] = 1
        if self._init is not None:
            self._init(worker_id)

    def find_missing(self) -> list[int]:
        """Return the numbers of the workers that have not started."""
        return [worker for worker, is_started in enumerate(self._started[:]) if not is_started]


def _ignore_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT in a worker: do nothing."""
