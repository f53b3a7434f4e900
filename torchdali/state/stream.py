"""An ``IterableDataset`` whose place is found again, in the workers and where there are none."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any, cast

from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from torchdali.state.checkpoint import is_stateful
from torchdali.state.progress import StreamProgress

__all__ = ["Stream", "is_stream"]


class Stream(IterableDataset[Any]):
    """Stands in the place of a dataset.

    Args:
        dataset: The dataset.
        saved: Where the stream of each worker is to go on, in the next epoch alone.
    """

    def __init__(self, dataset: Any, saved: Mapping[int, StreamProgress]) -> None:
        self.dataset = dataset
        self._saved: Mapping[int, StreamProgress] = saved
        self._process = os.getpid()
        self._iterator: Any = None
        self._ended = False
        self._asked = self._raised = 0
        self._failure: ExceptionWrapper | None = None

    def __iter__(self) -> Iterator[Any]:
        info = self._worker()
        place, self._saved = self._saved.get(info.id if info else 0), {}
        state: dict[str, Any] = place.state if place else {}
        if "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])
        iterator = cast("Iterator[Any]", iter(self.dataset))
        self._iterator = iterator
        self._asked, self._raised, self._failure = 0, state.get("raised", 0), None
        if "iterator" in state:
            self._iterator.load_state_dict(state["iterator"])
        elif place and not place.known:
            _fast_forward(iterator, place.samples, self._raised)
        self._ended = bool(state.get("ended"))
        return self

    def __next__(self) -> Any:
        if self._failure:
            return self._failure  # DataLoader gives such a batch up; what is left of it is not to be taken
        if self._ended:  # which an iterator that has a state may have forgotten
            raise StopIteration
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        except Exception:
            self._asked += 1
            self._raised += 1
            self._ended = getattr(self._iterator, "gi_frame", self) is None  # a generator that raised is over
            if not self._worker():
                raise
            self._failure = self._caught()
            return self._failure
        self._asked += 1
        return sample

    def batch(self, make: Callable[[Any], Any], samples: Any) -> Any:
        """What ``make`` makes of samples. In a worker it may be an exception that it, or the stream, raised.

        Such a one comes as data, because DataLoader sends nothing beside an exception.
        """
        failure, self._failure = self._failure, None
        if failure or not self._worker():
            return failure or make(samples)
        try:
            return make(samples)
        except StopIteration:
            raise
        except Exception:  # noqa: BLE001 - raised in the loader's process
            return self._caught()

    def taken(self) -> tuple[int, dict[str, Any]]:
        """How many samples it was asked for since this was called last, and what it says of itself now."""
        asked, self._asked = self._asked, 0
        return asked, self.state()

    def state(self) -> dict[str, Any]:
        """What dataset and iterator say of themselves, as torchdata's ``StatefulDataLoader`` asks for it."""
        found: dict[str, Any] = {}
        if self._iterator is not self.dataset and is_stateful(self.dataset):
            found["dataset"] = copy.deepcopy(self.dataset.state_dict())  # it is pickled later, in another thread
        if is_stateful(self._iterator):
            found["iterator"] = copy.deepcopy(self._iterator.state_dict())
        if not found:
            return {"raised": self._raised} if self._raised else {}
        return found | ({"ended": True} if self._ended else {})

    def _worker(self) -> Any:
        """What is known of the worker that this is in, if it is in one."""
        # A dataset may have a loader of its own, in a worker of another one.
        return get_worker_info() if self._process != os.getpid() else None

    def _caught(self) -> ExceptionWrapper:
        """The exception that is being handled, as DataLoader sends it."""
        return ExceptionWrapper(where=f"in DataLoader worker process {self._worker().id}")

    def __repr__(self) -> str:
        return repr(self.dataset)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a stream whose place is found again."""
    return isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)


def _fast_forward(iterator: Iterator[Any], samples: int, raised: int) -> None:
    """Asks for samples that came before, of which some raised an exception."""
    left = iter(range(samples))
    asked = map(next, repeat(iterator))  # what is its own iterator may begin anew in iter()
    while True:
        try:
            deque(zip(left, asked, strict=False), maxlen=0)
        except Exception:
            raised -= 1
            if raised < 0:
                raise
        else:
            return
