"""Worker startup: defer Ctrl-C, disable garbage collection, check that each worker started."""

from __future__ import annotations

import gc
import inspect
import mmap
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from torch.utils.data import get_worker_info

__all__ = ["DeferInterrupt", "StartupCheck", "WorkerInit", "WorkerStartup"]


class DeferInterrupt:
    """A context without KeyboardInterrupt. If one comes, it is raised at the end.

    The object is the handler of SIGINT during the context, and the former handler returns at the end.
    """

    _is_pending = False

    def __init__(self) -> None:
        self.handler: Callable[[int, Any], Any] | None = None

    def __call__(self, *_: Any) -> None:
        """Handle SIGINT: note it for the end."""
        self._is_pending = True

    def __enter__(self) -> None:
        handler: Any = signal.getsignal(signal.SIGINT)
        # Python raises KeyboardInterrupt in the main thread only, and sets handlers only there.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self.handler = handler
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """End the time without KeyboardInterrupt, possibly before the context ends.

        Raises:
            KeyboardInterrupt: One came, and the former handler raises it.
        """
        handler = self.handler
        if handler is None:
            return
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, handler)
        # Cleared last: another thread may fork a worker now, whose WorkerInit restores this handler.
        self.handler = None
        if self._is_pending:
            handler(signal.SIGINT, inspect.currentframe())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class WorkerStartup(DeferInterrupt):
    """The context in which workers start: without KeyboardInterrupt and without garbage collection.

    A KeyboardInterrupt could leave a worker that no object refers to. In a worker that was just forked, it would come
    out of ``os.fork()``, and the worker would continue as a copy of the main process.

    Garbage collection stays off in a forked worker until its ``WorkerInit``. A worker must not finalise objects that it
    inherited. The destructor of a CUDA tensor would end the process. The destructor of a process group or of a thread
    pool would wait for threads that only the parent has.
    """

    _disabled_gc = False

    def __enter__(self) -> None:
        super().__enter__()
        if gc.isenabled():
            self._disabled_gc = True
            gc.disable()

    def end(self) -> None:
        """Enable garbage collection and KeyboardInterrupt again."""
        if self._disabled_gc:
            gc.enable()
            self._disabled_gc = False
        super().end()


class WorkerInit:
    """A ``worker_init_fn`` that prepares a worker, and then calls the user's.

    It makes ``get_worker_info()`` show the user's dataset instead of the wrapper. It also makes the worker ignore
    Ctrl-C, which a terminal sends to all processes. A worker that it ends may hold the lock of a queue, and the main
    process would wait for that lock for ever.

    Args:
        worker_init_fn: The user's function, or None.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._init = worker_init_fn
        self._enables_gc = gc.isenabled()
        self._is_forked = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_is_forked": False}  # only a worker that is not forked gets it pickled

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker before it loads samples."""
        if self._is_forked:
            gc.freeze()  # never collect what was inherited, see WorkerStartup
        if self._enables_gc:
            gc.enable()
        info: Any = get_worker_info()
        # torch's WorkerInfo forbids changes. This one is safe: no other code has seen the object yet.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        handler: Any = signal.getsignal(signal.SIGINT)
        if isinstance(handler, DeferInterrupt):
            handler = handler.handler
            signal.signal(signal.SIGINT, handler)
        if handler is signal.default_int_handler:
            # Not SIG_IGN: programs that the dataset starts would inherit it.
            signal.signal(signal.SIGINT, _ignore_interrupt)
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
