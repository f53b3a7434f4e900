"""DataLoader's own iterators, made resumable. They serve loaders whose batches DALI does not transform."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
    _SingleProcessDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
)

from torchdali.runtime.exceptions import DeferredError, deferred_errors
from torchdali.state.context import EpochContext
from torchdali.state.iterator import ResumableIterator
from torchdali.state.stream import is_stream
from torchdali.workers.pickling import PicklingCollate
from torchdali.workers.processes import Parallel
from torchdali.workers.streams import StreamBatch, StreamCollate, put_stream

__all__ = ["ParallelPlainIterator", "SerialPlainIterator"]

_PROFILE = "enumerate(DataLoader)#{}.__next__"


class _Plain(ResumableIterator):
    """The common part of both iterators."""

    def __init__(self, context: EpochContext) -> None:
        self._context, view = context, context.view
        if view.num_workers:
            view = replace(view, collate_fn=PicklingCollate(view.collate_fn))
        if is_stream(view.dataset):
            view, stream = put_stream(view, context.progress)
            if view.num_workers:
                view = replace(view, collate_fn=StreamCollate(cast("Any", view.collate_fn), stream))
        super().__init__(view)


class SerialPlainIterator(_Plain, _SingleProcessDataLoaderIter, ResumableIterator):
    """torch's iterator without workers."""

    _needs_own_process = False

    def __init__(self, context: EpochContext) -> None:
        super().__init__(context)
        self._profile_name = _PROFILE.format(_SingleProcessDataLoaderIter.__name__)

    def _next_data(self) -> Any:
        self._lookahead.count_yielded()
        try:
            with deferred_errors:
                data = cast("Any", super()._next_data())
        except StopIteration:
            self.progress.finished = True
            raise
        except DeferredError:
            self._update_progress()
            raise
        self._update_progress()
        return data

    def _update_progress(self) -> None:
        self.progress.num_yielded = self._num_requested
        if self._stream:
            self.progress.advance_stream(0, 0, *self._stream.take_progress())


class ParallelPlainIterator(_Plain, Parallel, _MultiProcessingDataLoaderIter, ResumableIterator):
    """torch's iterator with worker processes."""

    _stream_step: tuple[int, int, int, dict[str, Any]] | None = None
    """The worker whose stream made the batch, the number of workers and of samples, and the stream's state after it."""

    def __init__(self, context: EpochContext) -> None:
        super().__init__(context)
        self._profile_name = _PROFILE.format(_MultiProcessingDataLoaderIter.__name__)

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        if isinstance(data, StreamBatch):
            self._stream_step = worker_idx, self._num_workers, data.samples, data.state
            data = data.data  # may be an ExceptionWrapper, which torch raises
        return super()._process_data(data, worker_idx)

    def _next_data(self) -> Any:
        self._lookahead.count_yielded()
        self._stream_step = None
        try:
            data = cast("Any", super()._next_data())
        except StopIteration:
            self.progress.finished = True
            self._update_progress()
            raise
        except DeferredError:
            self._update_progress()
            raise
        self._update_progress()
        return data

    def _update_progress(self) -> None:
        self.progress.num_yielded = self._num_resumed + self._rcvd_idx
        if self._stream_step:
            self.progress.advance_stream(*self._stream_step)
