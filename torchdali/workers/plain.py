"""DataLoader's own iterators, for batches with which there is nothing to do; they know where they are."""

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
from torchdali.workers.dataset import StreamBatch, StreamCollate, put_stream
from torchdali.workers.pickling import PicklingCollate
from torchdali.workers.processes import Parallel

__all__ = ["ParallelPlainIterator", "SerialPlainIterator"]

_PROFILE = "enumerate(DataLoader)#{}.__next__"


class _Plain(ResumableIterator):
    """What both have in common."""

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
    """As torch's, in this process."""

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
            self._account()
            raise
        self._account()
        return data

    def _account(self) -> None:
        self.progress.num_yielded = self._num_requested
        if self._stream:
            self.progress.advance_stream(0, 0, *self._stream.take_progress())


class ParallelPlainIterator(_Plain, Parallel, _MultiProcessingDataLoaderIter, ResumableIterator):
    """As torch's, with worker processes."""

    _share: tuple[int, int, int, dict[str, Any]] | None = None
    """What a batch was of streams: whose, of how many workers, how many samples, and where the stream was after it."""

    def __init__(self, context: EpochContext) -> None:
        super().__init__(context)
        self._profile_name = _PROFILE.format(_MultiProcessingDataLoaderIter.__name__)

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        if isinstance(data, StreamBatch):
            self._share = worker_idx, self._num_workers, data.samples, data.state
            data = data.data  # torch raises it, if it is an exception
        return super()._process_data(data, worker_idx)

    def _next_data(self) -> Any:
        self._lookahead.count_yielded()
        self._share = None
        try:
            data = cast("Any", super()._next_data())
        except StopIteration:
            self.progress.finished = True
            self._account()
            raise
        except DeferredError:
            self._account()
            raise
        self._account()
        return data

    def _account(self) -> None:
        self.progress.num_yielded = self._num_resumed + self._rcvd_idx
        if self._share:
            self.progress.advance_stream(*self._share)
