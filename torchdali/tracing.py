"""Exceptions that say which sample was asked for, and exceptions that wait for their turn."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, cast

from torch.utils.data import get_worker_info

from torchdali.errors import TorchDALIError

__all__ = ["Traced", "WorkerStart", "put_by"]

_OURS = ("torchdali.", "torch.utils.data.dataloader", "torch._utils")
"""Modules whose frames are of no interest to users."""


class Traced:
    """A map-style dataset whose exceptions carry a note of the index, from Python 3.11 on.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            _note(error, f"while the dataset was asked for sample {index!r}")
            raise

    @property
    def __getitems__(self) -> Callable[[Any], Any] | None:
        """The dataset's way to give a whole batch; None where it has none, as the fetcher understands it."""
        return self._getitems if getattr(self.dataset, "__getitems__", None) else None

    def _getitems(self, indices: Any) -> Any:
        try:
            return self.dataset.__getitems__(indices)
        except Exception as error:
            _note(error, f"while the dataset was asked for samples {indices!r}")
            raise

    def __repr__(self) -> str:
        return repr(self.dataset)


def _note(error: Exception, text: str) -> None:
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
        _note(error, "".join(["raised ahead of its turn:\n", *traceback.format_tb(trace)]).rstrip())
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one and one.__traceback__:
            chain += one.__cause__, one.__context__
            one.__traceback__ = None
    return error


class WorkerStart:
    """A ``worker_init_fn`` that shows the user's dataset to ``get_worker_info()``, and then calls the user's.

    Args:
        worker_init_fn: The user's, if any.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._init = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        """Runs in each worker, before it asks for samples."""
        info: Any = get_worker_info()
        # WorkerInfo refuses to be changed, for good reasons that do not hold here: nobody has seen it yet.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._init is not None:
            self._init(worker_id)
