"""Exceptions that wait for their turn, and why an epoch has ended."""

from __future__ import annotations

import operator
import signal
import traceback
from functools import partial
from typing import Any, cast

from torchdali.errors import TorchDALIError

__all__ = ["CLOSED", "FORKED", "INTERRUPTED", "NEW_EPOCH", "defer", "is_async_exception", "note"]

NEW_EPOCH = "this epoch cannot go on, a new one can be started"
INTERRUPTED = f"the loader was interrupted; {NEW_EPOCH}"
CLOSED = "the loader was closed; iterate over it anew"
FORKED = "an iterator cannot be used in a forked process; iterate over the loader anew there"

_OURS = ("torchdali.", "torch.utils.data.dataloader", "torch._utils")
"""Modules whose frames are of no interest to users."""


def note(error: Exception, text: str) -> None:
    """Adds to what an exception says, from Python 3.11 on."""
    if hasattr(error, "add_note"):
        cast("Any", error).add_note(text)


def defer(error: Exception) -> Exception:
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


def is_async_exception(error: BaseException) -> bool:
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
