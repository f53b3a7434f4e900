"""How worker processes begin, and when there is no KeyboardInterrupt on their behalf."""

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
    """A time without KeyboardInterrupt, as a context: one that came meanwhile is raised at its end.

    It is the handler of SIGINT for that time, in the place of another one. What another signal's handler raises as the
    time begins or ends leaves it no longer: nobody would hear of an interrupt any more.
    """

    _came = False

    def __init__(self) -> None:
        self.handler: Callable[[int, Any], Any] | None = None

    def __call__(self, *_: Any) -> None:
        """The handler: nothing happens until the end."""
        self._came = True

    def __enter__(self) -> None:
        try:
            self._begin()
        except BaseException:
            self.end()
            raise

    def _begin(self) -> None:
        handler: Any = signal.getsignal(signal.SIGINT)
        # In another thread no KeyboardInterrupt is raised, and no handler can be set.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self.handler = handler
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Ends that time, before the context does.

        Raises:
            KeyboardInterrupt: By the handler in whose place this one was.
        """
        handler = self.handler
        if handler is None:
            return
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, handler)
        self.handler = None  # not before: a worker that another thread forks now finds it here
        if self._came:
            handler(signal.SIGINT, inspect.currentframe())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        except BaseException:
            self.end()
            raise


class WorkerStartup(DeferInterrupt):
    """The time in which workers are started, as a context.

    A KeyboardInterrupt would leave a worker of which nobody knows. In one that was just forked the exception would
    leave ``os.fork()``, and the worker go on as the process that it is a copy of.

    Nor is garbage collected, in a worker that is forked until its ``WorkerInit``. What it inherited is not its to
    finalise: the destructor of a CUDA tensor would end it, and that of a process group or of a pool of threads would
    wait for threads that exist in its parent alone.
    """

    _collected = False

    def _begin(self) -> None:
        super()._begin()
        if gc.isenabled():
            self._collected = True
            gc.disable()

    def end(self) -> None:
        """As of ``DeferInterrupt``; garbage is collected again."""
        if self._collected:
            gc.enable()
            self._collected = False
        super().end()


class WorkerInit:
    """A ``worker_init_fn`` that readies a worker, and then calls the user's.

    ``get_worker_info()`` shows the user's dataset. A terminal's interrupt, which reaches workers too, is left to the
    process that started them: it would wait for ever for a worker that was ended while it held the lock of a queue.

    Args:
        worker_init_fn: The user's, if any.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._init = worker_init_fn
        self._collects = gc.isenabled()
        self._inherited = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_inherited": False}  # for a worker that is spawned

    def __call__(self, worker_id: int) -> None:
        """Runs in each worker, before it asks for samples."""
        if self._inherited:
            gc.freeze()  # see Starting
        if self._collects:
            gc.enable()
        info: Any = get_worker_info()
        # WorkerInfo refuses to be changed, for good reasons that do not hold here: nobody has seen it yet.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        handler: Any = signal.getsignal(signal.SIGINT)
        if isinstance(handler, DeferInterrupt):
            handler = handler.handler
            signal.signal(signal.SIGINT, handler)
        if handler is signal.default_int_handler:
            # Not SIG_IGN, which programs that the dataset runs would inherit.
            signal.signal(signal.SIGINT, _leave_it_to_the_parent)
        if self._init is not None:
            self._init(worker_id)


class StartupCheck:
    """A ``worker_init_fn`` that tells the process which forked the workers that they have begun.

    A worker says so with a byte of shared memory, for which it waits for nobody.

    Args:
        worker_init_fn: What is called then, if anything.
        workers: Number of workers.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, workers: int) -> None:
        self._init = worker_init_fn
        self._begun = mmap.mmap(-1, workers)

    def __call__(self, worker_id: int) -> None:
        """Runs in each worker, before all else that is not torch's."""
        self._begun[worker_id] = 1
        if self._init is not None:
            self._init(worker_id)

    def missing(self) -> list[int]:
        """The numbers of the workers that have not begun."""
        return [worker for worker, begun in enumerate(self._begun[:]) if not begun]


def _leave_it_to_the_parent(number: int, frame: FrameType | None) -> None:
    """A worker's handler of SIGINT."""
