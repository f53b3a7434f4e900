"""What stands in the place of the user's dataset in a worker, and what it adds to a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from torchdali.runtime.exceptions import note
from torchdali.samples.transfer import pin_memory
from torchdali.state.context import LoaderView
from torchdali.state.progress import EpochProgress
from torchdali.state.stream import Stream
from torchdali.workers.packing import Packed, Packer, SampleFailure
from torchdali.workers.queues import Parcel
from torchdali.workers.startup import WorkerInit

__all__ = ["AnnotatedDataset", "StreamBatch", "StreamCollate", "StreamPacker", "put_stream"]


class AnnotatedDataset:
    """A map-style dataset whose exceptions carry a note of the index, from Python 3.11 on.

    Args:
        dataset: The dataset.
        lenient: Whether it returns a :class:`SampleFailure` where a sample raises an exception.
    """

    def __init__(self, dataset: Any, lenient: bool) -> None:
        self.dataset, self._lenient = dataset, lenient

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            if self._lenient and not isinstance(error, StopIteration):
                return SampleFailure(type(self.dataset).__name__, f"the dataset raised {error!r}")
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


def put_stream(view: LoaderView, place: EpochProgress) -> tuple[LoaderView, Stream]:
    """Wrap the dataset of a view in a ``Stream``.

    Args:
        view: The view of a loader.
        place: Where the epoch is.

    Returns:
        A view whose dataset is the stream, and the stream.
    """
    stream = Stream(view.dataset, place.checkpoint.streams if place.checkpoint else {})
    init = WorkerInit(view.worker_init_fn) if view.num_workers else view.worker_init_fn
    return replace(view, dataset=stream, worker_init_fn=init), stream


class StreamBatch(Parcel):
    """What came of a stream, and where the stream was after it.

    Args:
        data: The collated batch, or the exception in its place.
        samples: How many the stream had been asked for since the batch before.
        state: What the stream said of itself after it.
    """

    def __init__(self, data: Any, samples: int, state: dict[str, Any]) -> None:
        self.data, self.samples, self.state = data, samples, state

    def unsent(self, failed: Callable[[Any], ExceptionWrapper]) -> StreamBatch:
        """As of :class:`torchdali.workers.queues.Parcel`."""
        return StreamBatch(failed(self.data), self.samples, self.state)

    def pin_memory(self) -> StreamBatch:
        """Called by DataLoader."""
        return StreamBatch(pin_memory(self.data), self.samples, self.state)


class StreamCollate:
    """A worker's ``collate_fn`` that adds where its stream is.

    Args:
        collate_fn: The user's.
        stream: The stream.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], stream: Stream) -> None:
        self._collate, self._stream = collate_fn, stream

    def __call__(self, samples: Any) -> StreamBatch:
        """Collates a batch; what is raised, by the stream or by ``collate_fn``, is carried in its place."""
        data = self._stream.build_batch(self._collate, samples)
        return StreamBatch(data, *self._stream.take_progress())


class StreamPacker:
    """The same where batches are packed; an exception is in the place of their samples.

    Args:
        packer: What packs.
        stream: The stream.
    """

    def __init__(self, packer: Packer, stream: Stream) -> None:
        self._packer, self._stream = packer, stream

    def __call__(self, samples: Any) -> Packed:
        """Packs a batch; of one in whose place there is an exception, ``rest`` is that and nothing else is known."""
        packed: Packed | ExceptionWrapper = self._stream.build_batch(self._packer, samples)
        asked, state = self._stream.take_progress()
        if isinstance(packed, ExceptionWrapper):
            info = get_worker_info()
            packed = Packed(packed, asked, worker=info.id if info else 0)
        packed.state = state
        return packed
