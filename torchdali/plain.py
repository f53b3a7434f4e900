"""DataLoader's own iterators, for batches with which there is nothing to do; they know where they are."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
    _SingleProcessDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
)

from torchdali.parallel import Parallel
from torchdali.resume import Resumable, twin_of
from torchdali.stream import Carried, Carrier, is_stream, put_stream

__all__ = ["ParallelPlain", "SerialPlain"]

_PROFILE = "enumerate(DataLoader)#{}.__next__"


class _Plain(Resumable):
    """What both have in common."""

    _worker = 0

    def __init__(self, loader: Any) -> None:
        self._size: int = loader.batch_size or 1
        self._streams = is_stream(loader.dataset)
        if self._streams:
            twin = twin_of(loader)
            stream = put_stream(twin, loader._bookmark.here(loader))  # noqa: SLF001
            twin.collate_fn = Carrier(loader.collate_fn, stream)
            loader = twin
        super().__init__(loader)

    def _taken(self, data: Any) -> Any:
        """A batch, of which account is kept."""
        state: dict[str, Any] = {}
        if isinstance(data, Carried):
            data, state = data.data, data.state
        if self._streams:
            self.place.stream_delivered(self._worker, self._num_workers, self._size, state)
        return data


class SerialPlain(_Plain, _SingleProcessDataLoaderIter, Resumable):
    """As torch's, in this process."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._profile_name = _PROFILE.format(_SingleProcessDataLoaderIter.__name__)

    def _next_data(self) -> Any:
        self._read_ahead.take()
        try:
            data = cast("Any", super()._next_data())
        except StopIteration:
            self.place.over = True
            raise
        except Exception:
            self.place.delivered = self._handed
            raise
        self.place.delivered = self._handed
        return self._taken(data)


class ParallelPlain(_Plain, Parallel, _MultiProcessingDataLoaderIter, Resumable):
    """As torch's, with worker processes."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._profile_name = _PROFILE.format(_MultiProcessingDataLoaderIter.__name__)

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        self._worker = worker_idx
        return cast("Any", super()._process_data(data, worker_idx))

    def _next_data(self) -> Any:
        self._read_ahead.take()
        try:
            data = cast("Any", super()._next_data())
        except StopIteration:
            self.place.over = True
            raise
        finally:
            self.place.delivered = self._first + self._rcvd_idx
        return self._taken(data)
