"""Exceptions that say which sample was asked for, and exceptions that wait for their turn."""

from __future__ import annotations

import operator
import signal
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from torchdali.errors import TorchDALIError

__all__ = ["Failure", "Traced", "came_between", "note", "put_by"]

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

    def __init__(self, dataset: Any, lenient: bool) -> None:
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


def came_between(error: BaseException) -> bool:
    """Whether it is of nothing that was called: a signal's handler raised it, at any point, as a KeyboardInterrupt.

    So does torch's where a worker process dies, and a user's that bounds the time of a step.
    """
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid "):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> Any:
    while isinstance(handler, partial):
        handler = cast("partial[Any]", handler).func
    if not hasattr(handler, "__code__") and callable(handler):  # methods have the attributes of their functions
        handler = operator.attrgetter("__call__")(handler)
    return getattr(handler, "__code__", None)
