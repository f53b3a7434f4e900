"""Exceptions that say which sample was asked for, and exceptions that wait for their turn."""

from __future__ import annotations

import contextlib
import gc
import signal
import traceback
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, cast

from torch.utils.data import get_worker_info

from torchdali.errors import TorchDALIError

__all__ = ["Failure", "Traced", "WorkerStart", "keeping_garbage", "note", "put_by"]

_OURS = ("torchdali.", "torch.utils.data.dataloader", "torch._utils")
"""Modules whose frames are of no interest to users."""


class Failure(NamedTuple):
    """In the place of a sample: what the dataset raised.

    Attributes:
        named: What raised it.
        reason: What it raised.
    """

    named: str
    reason: str


class Traced:
    """A map-style dataset whose exceptions carry a note of the index, from Python 3.11 on.

    Args:
        dataset: The dataset.
        lenient: Whether it returns a :class:`Failure` where a sample raises an exception.
    """

    def __init__(self, dataset: Any, lenient: bool = False) -> None:
        self.dataset, self._lenient = dataset, lenient

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            if self._lenient and not isinstance(error, StopIteration):
                return Failure(type(self.dataset).__name__, f"the dataset raised {error!r}")
            note(error, f"while the dataset was asked for sample {index!r}")
            raise

    @property
    def __getitems__(self) -> Callable[[Any], Any] | None:
        """The dataset's way to give a whole batch; None where it has none, as the fetcher understands it."""
        return self._getitems if getattr(self.dataset, "__getitems__", None) else None

    def _getitems(self, indices: Any) -> Any:
        try:
            return self.dataset.__getitems__(indices)
        except Exception as error:
            if self._lenient and callable(getattr(self.dataset, "__getitem__", None)):
                return [self[index] for index in indices]
            note(error, f"while the dataset was asked for samples {indices!r}")
            raise

    def __repr__(self) -> str:
        return repr(self.dataset)


def note(error: Exception, text: str) -> None:
    """Adds to what an exception says, from Python 3.11 on."""
    if hasattr(error, "add_note"):
        cast("Any", error).add_note(text)


def put_by(error: Exception) -> Exception:
    """An exception to be raised later, without its tracebacks; what users want to know of them becomes a note.

    Before Python 3.11, which has no notes, it keeps them instead.

    The frames of a traceback hold the iterator. Holding the exception it would hold itself, and its workers, in a
    cycle.
    """
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        trace = trace.tb_next
    if trace and not isinstance(error, TorchDALIError):
        if not hasattr(error, "add_note"):
            return error
        note(error, "".join(["raised ahead of its turn:\n", *traceback.format_tb(trace)]).rstrip())
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one and one.__traceback__:
            chain += one.__cause__, one.__context__
            one.__traceback__ = None
    return error


def _leave_it_to_the_parent(number: int, frame: Any) -> None:
    """A worker's handler of SIGINT."""


class WorkerStart:
    """A ``worker_init_fn`` that readies a worker, and then calls the user's.

    ``get_worker_info()`` shows the user's dataset. A terminal's interrupt, which reaches workers too, is left to the
    process that started them: it would wait for ever for a worker that was ended while it held the lock of a queue.

    Args:
        worker_init_fn: The user's, if any.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._init = worker_init_fn
        self._collects = gc.isenabled()

    def __call__(self, worker_id: int) -> None:
        """Runs in each worker, before it asks for samples."""
        gc.freeze()  # see keeping_garbage
        if self._collects:
            gc.enable()
        info: Any = get_worker_info()
        # WorkerInfo refuses to be changed, for good reasons that do not hold here: nobody has seen it yet.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Not SIG_IGN, which programs that the dataset runs would inherit.
            signal.signal(signal.SIGINT, _leave_it_to_the_parent)
        if self._init is not None:
            self._init(worker_id)


@contextlib.contextmanager
def keeping_garbage(twin: Any) -> Generator[None]:
    """No garbage is collected while workers are started, nor in one that is forked, until its ``WorkerStart``.

    What a forked process inherited is not its to finalise: the destructor of a CUDA tensor would end it, and that of a
    process group or of a pool of threads would wait for threads that exist in its parent alone.

    Args:
        twin: The loader that starts them.
    """
    if not gc.isenabled() or not isinstance(twin.worker_init_fn, WorkerStart):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
