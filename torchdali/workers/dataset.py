"""Wrappers of the user's dataset and ``collate_fn`` in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch._utils import ExceptionWrapper

from torchdali.runtime.exceptions import add_note
from torchdali.samples.transfer import pin_memory
from torchdali.state.context import LoaderView
from torchdali.state.progress import EpochProgress
from torchdali.state.stream import Stream
from torchdali.workers.packing import Packed, Packer, SampleFailure
from torchdali.workers.pickling import PicklingCollate, make_picklable, pickle_batch
from torchdali.workers.startup import WorkerInit

__all__ = ["AnnotatedDataset", "StreamBatch", "StreamCollate", "StreamPacker", "put_stream"]


class AnnotatedDataset:
    """A map-style dataset whose exceptions have a note with the index. Notes need Python 3.11.

    Args:
        dataset: The dataset.
        returns_failures: Whether a :class:`SampleFailure` is returned for a sample that raises an exception.
    """

    def __init__(self, dataset: Any, returns_failures: bool) -> None:
        self.dataset, self._returns_failures = dataset, returns_failures

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            if self._returns_failures and not isinstance(error, StopIteration):
                return SampleFailure(type(self.dataset).__name__, f"the dataset raised {error!r}")
            add_note(error, f"while the dataset was asked for sample {index!r}")
            raise

    @property
    def __getitems__(self) -> Callable[[Any], Any] | None:
        """The method that returns the samples of a batch. None if the dataset has none, as torch's fetcher expects."""
        return self._get_items if getattr(self.dataset, "__getitems__", None) else None

    def _get_items(self, indices: Any) -> Any:
        try:
            return self.dataset.__getitems__(indices)
        except Exception as error:
            if self._returns_failures and callable(getattr(self.dataset, "__getitem__", None)):
                return [self[index] for index in indices]
            add_note(error, f"while the dataset was asked for samples {indices!r}")
            raise

    def __repr__(self) -> str:
        return repr(self.dataset)


def put_stream(view: LoaderView, progress: EpochProgress) -> tuple[LoaderView, Stream]:
    """Wrap the dataset of a view in a ``Stream``.

    Args:
        view: The view of a loader.
        progress: The progress of the epoch.

    Returns:
        A view whose dataset is the stream, and the stream.
    """
    stream = Stream(view.dataset, progress.checkpoint.streams if progress.checkpoint else {}, view.num_workers > 0)
    init = WorkerInit(view.worker_init_fn) if view.num_workers else view.worker_init_fn
    return replace(view, dataset=stream, worker_init_fn=init), stream


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
        return StreamBatch(pin_memory(self.data), self.samples, self.state)


class StreamCollate:
    """A worker's ``collate_fn`` that adds the state of its stream.

    Args:
        collate_fn: Collates and pickles.
        stream: The stream.
    """

    def __init__(self, collate_fn: PicklingCollate, stream: Stream) -> None:
        self._collate, self._stream = collate_fn, stream

    def __call__(self, samples: Any) -> StreamBatch:
        """Collate a batch. If the stream or ``collate_fn`` raised an exception, it takes the place of the batch."""
        data = self._stream.build_batch(self._collate, samples)
        if isinstance(data, ExceptionWrapper):
            make_picklable(data)
        count, state = self._stream.take_progress()
        return StreamBatch(data, count, cast("Any", pickle_batch(state)))


class StreamPacker:
    """A ``collate_fn`` that packs batches and adds the state of their stream.

    Args:
        packer: Packs a batch.
        stream: The stream.
    """

    def __init__(self, packer: Packer, stream: Stream) -> None:
        self._packer, self._stream = packer, stream

    def __call__(self, samples: Any) -> Packed:
        """Pack a batch. If an exception was raised, it is the ``data`` of a batch that has only a sample count."""
        packed: Packed | ExceptionWrapper = self._stream.build_batch(self._packer, samples)
        count, state = self._stream.take_progress()
        worker = self._packer.worker
        if isinstance(packed, ExceptionWrapper):
            packed = Packed(make_picklable(packed), count, worker=worker.id if worker else 0)
        packed.state = cast("Any", pickle_batch(state)) if worker else state
        return packed
