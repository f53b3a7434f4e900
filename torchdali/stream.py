"""An ``IterableDataset`` whose place is found again, in the workers and where there are none."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data import _utils as data_utils  # pyright: ignore[reportPrivateUsage]

from torchdali.packing import Packed, Packer
from torchdali.place import Place, StreamPlace
from torchdali.state import is_stateful
from torchdali.workers import WorkerStart

__all__ = ["Carried", "Carrier", "Stream", "StreamPacker", "is_stream", "put_stream"]

_pin_memory = cast("Callable[[Any], Any]", data_utils.pin_memory.pin_memory)


class Stream(IterableDataset[Any]):
    """Stands in the place of a dataset.

    Args:
        dataset: The dataset.
        saved: Where the stream of each worker is to go on, in the next epoch alone.
    """

    def __init__(self, dataset: Any, saved: Mapping[int, StreamPlace]) -> None:
        self.dataset = dataset
        self._saved: Mapping[int, StreamPlace] = saved
        self._process = os.getpid()
        self._iterator: Any = None
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        # A dataset may have a loader of its own, in a worker of another one.
        info = get_worker_info() if self._process != os.getpid() else None
        place, self._saved = self._saved.get(info.id if info else 0), {}
        state: dict[str, Any] = place.state if place else {}
        if "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])
        iterator = cast("Iterator[Any]", iter(self.dataset))
        self._iterator = iterator
        if "iterator" in state:
            self._iterator.load_state_dict(state["iterator"])
        elif place and not state:
            deque(islice(iterator, place.samples), maxlen=0)
        self._ended = bool(state.get("ended"))
        return self._watched(iterator) if is_stateful(iterator) or is_stateful(self.dataset) else iterator

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Notes the end, which an iterator that has a state may have forgotten."""
        while not self._ended:  # not a loop over it, which would ask it for an iterator anew
            try:
                sample = next(iterator)
            except StopIteration:
                self._ended = True
                return
            yield sample

    def state(self) -> dict[str, Any]:
        """What dataset and iterator say of themselves, as torchdata's ``StatefulDataLoader`` asks for it."""
        found: dict[str, Any] = {}
        if self._iterator is not self.dataset and is_stateful(self.dataset):
            found["dataset"] = copy.deepcopy(self.dataset.state_dict())  # it is pickled later, in another thread
        if is_stateful(self._iterator):
            found["iterator"] = copy.deepcopy(self._iterator.state_dict())
        return found | ({"ended": True} if found and self._ended else {})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}

    def __repr__(self) -> str:
        return repr(self.dataset)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a stream whose place is found again."""
    return isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)


def put_stream(twin: Any, place: Place) -> Stream:
    """Puts a ``Stream`` in the place of a loader's dataset.

    Args:
        twin: A copy of the loader, which is changed.
        place: Where the epoch is.
    """
    stream = Stream(twin.dataset, place.saved.streams if place.saved else {})
    vars(twin)["dataset"] = stream  # DataLoader refuses a change of its dataset; this is a copy
    if twin.num_workers:
        twin.worker_init_fn = WorkerStart(twin.worker_init_fn)
    return stream


class Carried:
    """A batch with what a stream said of itself after it."""

    def __init__(self, data: Any, state: dict[str, Any]) -> None:
        self.data, self.state = data, state

    def pin_memory(self) -> Carried:
        """Called by DataLoader."""
        return Carried(_pin_memory(self.data), self.state)


class Carrier:
    """A ``collate_fn`` that adds what a stream says of itself, where it says anything.

    Args:
        collate_fn: The user's.
        stream: The stream.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], stream: Stream) -> None:
        self._collate, self._stream = collate_fn, stream

    def __call__(self, samples: Any) -> Any:
        """Collates."""
        data, state = self._collate(samples), self._stream.state()
        return Carried(data, state) if state else data


class StreamPacker:
    """The same where workers pack.

    Args:
        packer: What packs.
        stream: The stream.
    """

    def __init__(self, packer: Packer, stream: Stream) -> None:
        self._packer, self._stream = packer, stream

    def __call__(self, samples: Any) -> Packed:
        """Packs."""
        packed = self._packer(samples)
        packed.state = self._stream.state()
        return packed
