"""DataLoader's own iterators, made resumable. They serve loaders whose batches DALI does not transform."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
    _SingleProcessDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
)

from torchdali.runtime.exceptions import deferred_errors
from torchdali.state.context import EpochContext
from torchdali.state.iterator import ResumableIterator
from torchdali.state.stream import is_stream
from torchdali.workers.pickling import PicklingCollate
from torchdali.workers.processes import Parallel
from torchdali.workers.streams import put_stream

__all__ = ["ParallelPlainIterator", "SerialPlainIterator"]

_PROFILE = "enumerate(DataLoader)#{}.__next__"


class _Plain(ResumableIterator):
    """The common part of both iterators."""

    def __init__(self, context: EpochContext) -> None:
        self._context, view = context, context.view
        if view.num_workers:
            view = replace(view, collate_fn=PicklingCollate(view.collate_fn))
        if is_stream(view.dataset):
            view = put_stream(view, context.progress)
        super().__init__(view)

    def _next_data(self) -> Any:
        self._lookahead.count_yielded()
        return cast("Any", super())._next_data()  # noqa: SLF001 - its own


class SerialPlainIterator(_Plain, _SingleProcessDataLoaderIter, ResumableIterator):
    """torch's iterator without workers."""

    _needs_own_process = False

    def __init__(self, context: EpochContext) -> None:
        super().__init__(context)
        self._profile_name = _PROFILE.format(_SingleProcessDataLoaderIter.__name__)

    def _next_data(self) -> Any:
        try:
            with deferred_errors:
                return super()._next_data()
        finally:
            self._take_stream_step()


class ParallelPlainIterator(_Plain, Parallel, _MultiProcessingDataLoaderIter, ResumableIterator):
    """torch's iterator with worker processes."""

    def __init__(self, context: EpochContext) -> None:
        super().__init__(context)
        self._profile_name = _PROFILE.format(_MultiProcessingDataLoaderIter.__name__)
