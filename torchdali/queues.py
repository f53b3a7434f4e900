"""What workers and the main process tell each other things by: no signal leaves it locked, nothing is lost in it."""

from __future__ import annotations

import copy
import multiprocessing
import operator
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import queues, synchronize
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

__all__ = ["context_of"]

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


class _Queue(_TheirQueue):
    """As multiprocessing's, but a batch that a worker cannot send comes as an exception; there it never comes."""

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)
        if not after_fork:
            self._notempty = _Condition(threading.Lock())
            # Not a method: the thread that sends has it, and ends when the queue is garbage.
            self._on_queue_feeder_error = partial(_not_sent, weakref.ref(self))


def _not_sent(queue: Callable[[], _Queue | None], error: Exception, obj: Any) -> None:
    """Called by the thread that sends."""
    info, own = get_worker_info(), queue()
    if info is None or own is None:  # an index
        _TheirQueue._on_queue_feeder_error(error, obj)  # noqa: SLF001
        return
    task, data = obj
    try:
        _refuse(data, error)
    except RuntimeError:
        own.put((task, ExceptionWrapper(where=f"in DataLoader worker process {info.id}")))


def _refuse(data: Any, error: Exception) -> NoReturn:
    if words := getattr(data, "exc_msg", None):  # an exception's, of a class that cannot be sent
        raise RuntimeError(words) from error
    raise RuntimeError(
        f"a batch could not be sent from its worker ({type(error).__name__}: {error}); leave out in the dataset or in "
        "collate_fn what cannot be pickled, or set num_workers=0; of too many open files, raise the limit (ulimit -n)"
    ) from error


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
