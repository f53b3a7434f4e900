"""Exceptions that say which sample was asked for, and exceptions that wait for their turn."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torchdali.errors import TorchDALIError

__all__ = ["Failure", "Traced", "note", "put_by"]

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
