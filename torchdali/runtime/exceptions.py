"""Exceptions that are raised in a later batch, and the reasons why an epoch has ended."""

from __future__ import annotations

import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

from torchdali.errors import TorchDALIError

__all__ = [
    "CLOSED",
    "FORKED",
    "INTERRUPTED",
    "NEW_EPOCH",
    "DeferredError",
    "EpochEndedError",
    "add_note",
    "defer",
    "is_raised_by_dali",
    "skip_own_frames",
    "to_text",
]

NEW_EPOCH = "this epoch cannot go on, a new one can be started"
INTERRUPTED = f"the loader was interrupted; {NEW_EPOCH}"
CLOSED = "the loader was closed; iterate over it again"
FORKED = "an iterator cannot be used in a forked process; iterate over the loader again there"

_OURS = ("torchdali.", "torch.utils.data.dataloader", "torch._utils")
"""Modules whose frames do not help users."""


class EpochEndedError(RuntimeError):
    """Raised by whatever can give no further batch of an epoch. The iterator ends the epoch by it."""


class DeferredError(Exception):
    """Carries what is wrong with one batch to ``next()``, which raises it and goes to the next batch afterwards.

    Whatever else leaves an iterator ends the epoch: an interrupt, a worker's death, what a signal handler raises.

    Args:
        error: The batch's error, raised by user code, a sample or a run of DALI.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _DeferredErrors:
    """See :data:`deferred_errors`. No generator: its frame would hold the exception in a cycle, and so the epoch."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, (StopIteration, EpochEndedError, DeferredError)):
            raise DeferredError(error) from None


deferred_errors = _DeferredErrors()
"""A context for user code, samples and runs of DALI: what they raise is the error of one batch."""


def add_note(error: Exception, text: str) -> None:
    """Add a note to an exception, if it takes one. Python 3.10 has no notes, and a user's class may be frozen."""
    with suppress(Exception):
        cast("Any", error).add_note(text)


def to_text(error: BaseException) -> str:
    """Return an exception's text; empty if its class cannot tell it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return ""


def skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in a user's frame; None if there is none."""
    while trace and trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        trace = trace.tb_next
    return trace


def defer(error: Exception) -> Exception:
    """Strip the traceback so that the exception can be raised in a later batch; keep the user's frames as a note.

    The frames of a traceback hold the iterator. An iterator that holds the exception would be part of a cycle, and its
    workers would live on. Python 3.10 has no notes, so there an exception with frames of the user keeps its traceback.
    """
    trace = skip_own_frames(error.__traceback__)
    if trace and not isinstance(error, TorchDALIError):
        if not hasattr(Exception, "add_note"):
            return error
        add_note(error, "".join(["raised ahead of its turn:\n", *traceback.format_tb(trace)]).rstrip())
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link and link.__traceback__:
            chain += link.__cause__, link.__context__
            BaseException.with_traceback(link, None)  # also where the class lets no attribute be set
    return error


def is_raised_by_dali(error: BaseException) -> bool:
    """Return True if DALI raised this itself, and not a signal handler that ran beside it. A run failed then."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("nvidia.")
