"""Queues between a loader and its workers. A spawned worker imports this module, so it imports little."""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import queues
from multiprocessing.util import Finalize
from typing import Any, cast

from torch._utils import ExceptionWrapper

from torchdali.workers.pickling import make_picklable, pickle_indices

__all__ = ["make_context"]

_MultiprocessingQueue: Any = queues.Queue

_sending: set[Any] = set()
"""The queues of this process whose sending threads run.

The garbage collector may find an iterator, for example that of a traceback. It would then stop the sending threads
before torch tells the workers to end. DataLoader has this fault in torch 2.14: it waits 5 seconds for each worker, and
terminates it (https://github.com/pytorch/pytorch/pull/39869). No version mends it yet.
"""


class Queue(_MultiprocessingQueue):
    """A queue that loses no exception of a worker, and nothing that a worker puts before it ends.

    ``multiprocessing.Queue`` pickles in another thread. It prints what cannot be pickled, and never sends it. No
    version mends it yet: https://github.com/python/cpython/issues/84376.
    """

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
        if self._opid == os.getpid():
            _sending.add(self)
        elif self._jointhread:  # in a worker
            # multiprocessing's finalizer would wait for ever if the parent was killed and reads nothing any more.
            self._jointhread.cancel()
            arguments = [weakref.ref(self._thread), os.getppid()]
            # The priority is that of the cancelled finalizer.
            self._jointhread = Finalize(self._thread, _wait_until_sent, arguments, exitpriority=-5)

    def close(self) -> None:
        """Stop sending. torch calls this when the workers have ended."""
        super().close()
        _sending.discard(self)


def _wait_until_sent(sender: Callable[[], threading.Thread | None], parent: int) -> None:
    """Wait for the queue's sending thread when a worker ends. Stop if the parent has died: it reads nothing more."""
    while (thread := sender()) and thread.is_alive() and os.getppid() == parent:
        thread.join(1)


def make_context(loader: Any) -> Any:
    """Return the loader's ``multiprocessing_context`` with these queues."""
    original: Any = loader.multiprocessing_context or multiprocessing.get_context()
    context = copy.copy(original)
    queue: Any = Queue
    vars(context).update(Queue=partial(queue, 0, ctx=original))
    return context
