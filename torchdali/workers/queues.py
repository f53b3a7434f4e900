"""What workers and the main process tell each other things by: no signal leaves it locked, nothing is lost in it."""

from __future__ import annotations

import copy
import multiprocessing
import operator
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import queues, synchronize
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, NoReturn, cast

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

__all__ = ["Parcel", "context_of"]

_TheirCondition: Any = threading.Condition
_TheirQueue: Any = queues.Queue
_TheirEvent: Any = synchronize.Event


class _Condition(_TheirCondition):
    """Its lock is taken and released by C alone, between which and a ``with`` Python runs no handler of a signal.

    ``threading.Condition`` has methods in Python for it. What a handler raises as the second of them begins leaves the
    lock locked, and whoever ends the queue waits for it for ever.
    """

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))


class Parcel:
    """A batch, as a worker sends it with what belongs to it."""

    def unsent(self, failed: Callable[[Any], ExceptionWrapper]) -> Any:
        """What is sent in its place if it cannot be.

        Args:
            failed: Makes an exception of the batch.
        """
        raise NotImplementedError


class _Queue(_TheirQueue):
    """As multiprocessing's, but of what cannot be sent an exception comes in its turn; there it never comes."""

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)
        if not after_fork:
            self._notempty = _Condition(threading.Lock())
            # Not a method: the thread that sends has it, and ends when the queue is garbage.
            self._on_queue_feeder_error = partial(_not_sent, weakref.ref(self))

    @property
    def ours(self) -> bool:
        """Whether this is the process that made the queue, which sends indices; a worker sends batches."""
        return self._opid == os.getpid()

    def _start_thread(self) -> None:
        super()._start_thread()
        if self._jointhread and not self.ours:
            self._jointhread.cancel()
            about = [weakref.ref(self._thread), os.getppid()]
            self._jointhread = Finalize(self._thread, _all_sent, about, exitpriority=-5)  # theirs has that priority

    def put_first(self, obj: Any) -> None:
        """For the thread that sends: it sends this next, before what was put meanwhile."""
        self._sem.acquire()
        self._buffer.appendleft(obj)


def _all_sent(sender: Callable[[], threading.Thread | None], parent: int) -> None:
    """A worker that ends waits until all is sent; not for a parent that was killed, which reads nothing any more."""
    while (thread := sender()) and thread.is_alive() and os.getppid() == parent:
        thread.join(1)


def _not_sent(queue: Callable[[], _Queue | None], error: Exception, obj: Any) -> None:
    """Called by the thread that sends."""
    own: Any = queue()
    if own is None or not isinstance(obj, tuple):  # bytes, which nobody reads any more
        _TheirQueue._on_queue_feeder_error(error, obj)  # noqa: SLF001
        return
    task, data = cast("tuple[Any, Any]", obj)
    own.put_first((task, _Unsent(f"{type(error).__name__}: {error}") if own.ours else _instead(data, error)))


def _instead(data: Any, error: Exception) -> Any:
    failed = partial(_failed, error)
    if not isinstance(data, Parcel):
        return failed(data)
    instead = data.unsent(failed)
    try:
        ForkingPickler.dumps(instead)
    except Exception:  # noqa: BLE001 - what cannot be sent is what belongs to the batch, such as a stream's state
        return failed(None)
    return instead


def _failed(error: Exception, batch: Any) -> ExceptionWrapper:
    info = get_worker_info()
    try:
        _refuse(batch, error)
    except RuntimeError:
        return ExceptionWrapper(where=f"in DataLoader worker process {info.id}" if info else "in a DataLoader worker")


def _refuse(batch: Any, error: Exception) -> NoReturn:
    if words := batch.exc_msg if isinstance(batch, ExceptionWrapper) else "":  # of a class that cannot be sent
        raise RuntimeError(words) from error
    raise RuntimeError(
        f"a batch could not be sent from its worker ({type(error).__name__}: {error}); leave out in the dataset or in "
        "collate_fn what cannot be pickled, or set num_workers=0; of too many open files, raise the limit (ulimit -n)"
    ) from error


class _Unsent:
    """In the place of what a sampler gave and cannot be sent to a worker: whoever uses it there raises that.

    Args:
        why: What was raised as it was sent.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"the indices of a batch could not be sent to a worker ({self._why}); leave out in the sampler what cannot "
            "be pickled, or set num_workers=0"
        )

    __iter__ = __len__ = __getitem__ = __contains__ = __index__ = __int__ = __float__ = __bool__ = _refuse
    __hash__ = __eq__ = __lt__ = __str__ = __fspath__ = __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = _refuse

    def __repr__(self) -> str:
        return "<what could not be sent>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # of which pickle asks for some
            raise AttributeError(name)
        self._refuse()


class _Event(_TheirEvent):
    """As multiprocessing's, without its lock, which a worker may hold that is killed.

    It is set by one process and looked at by all, as torch does; nobody waits for it, who would not be woken.
    """

    def is_set(self) -> bool:
        return not self._flag._semlock._is_zero()  # noqa: SLF001

    def set(self) -> None:
        self._flag.acquire(False)
        self._flag.release()


def context_of(loader: Any) -> Any:
    """The loader's ``multiprocessing_context``, with these queues and events."""
    given: Any = loader.multiprocessing_context or multiprocessing.get_context()
    context = copy.copy(given)
    queue: Any = _Queue
    event: Any = _Event
    vars(context).update(Queue=partial(queue, 0, ctx=given), Event=partial(event, ctx=given))
    return context
