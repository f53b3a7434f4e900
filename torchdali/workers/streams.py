"""Streams in workers. A spawned worker imports this module, so it imports little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch._utils import ExceptionWrapper

from torchdali.state.stream import Stream
from torchdali.workers.pickling import make_picklable, pickle_batch

if TYPE_CHECKING:
    from torchdali.state.context import LoaderView
    from torchdali.state.progress import EpochProgress

__all__ = ["StreamBatch", "StreamCollate", "put_stream"]


def put_stream(view: LoaderView, progress: EpochProgress) -> LoaderView:
    """Return a view whose dataset is wrapped in a ``Stream``, and whose workers send the stream's state, too.

    Args:
        view: The view of a loader.
        progress: The progress of the epoch.
    """
    checkpoint = progress.checkpoint
    # A dataset that has loaded a state in this process skips nothing.
    saved = checkpoint.streams if checkpoint and "stream" not in checkpoint.state else {}
    stream = Stream(view.dataset, saved, view.num_workers > 0)
    view = replace(view, dataset=stream)
    return replace(view, collate_fn=StreamCollate(view.collate_fn, stream)) if view.num_workers else view


class StreamBatch:
    """A batch of a stream, with the stream's state after it.

    Args:
        data: The collated batch, or the wrapped exception that was raised instead.
        samples: Number of samples that were requested from the stream since the previous batch.
        state: The stream's state after the batch.
    """

    def __init__(self, data: Any, samples: int, state: dict[str, Any]) -> None:
        self.data, self.samples, self.state = data, samples, state

    def pin_memory(self) -> StreamBatch:
        """Pin the batch. DataLoader calls this."""
        from torchdali.samples.transfer import pin_memory

        return StreamBatch(pin_memory(self.data), self.samples, self.state)


class StreamCollate:
    """A worker's ``collate_fn`` that adds the state of its stream.

    Args:
        collate_fn: Collates, and pickles what cannot be sent otherwise.
        stream: The stream.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], stream: Stream) -> None:
        self._collate, self._stream = collate_fn, stream

    def __call__(self, samples: Any) -> StreamBatch:
        """Collate a batch. If the stream or ``collate_fn`` raised an exception, it takes the place of the batch."""
        data = self._stream.build_batch(self._collate, samples)
        if isinstance(data, ExceptionWrapper):
            make_picklable(data)
        count, state = self._stream.take_progress()
        return StreamBatch(data, count, cast("Any", pickle_batch(state)))
