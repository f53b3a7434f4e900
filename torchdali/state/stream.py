"""An ``IterableDataset`` that can be resumed, in worker processes and without them."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, cast

from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

__all__ = ["Stream", "StreamProgress", "is_stateful", "is_stream"]


@dataclass
class StreamProgress:
    """Progress of one worker's part of an ``IterableDataset``.

    Attributes:
        batches: Number of its batches that were yielded.
        samples: Number of samples that it was asked for in these batches.
        state: States of the dataset and of its iterator, under the names "dataset" and "iterator"; "ended" if the
            stream has ended. Without such states, "raised": the number of exceptions that the stream raised. "failed":
            what ``state_dict`` raised.
    """

    batches: int = 0
    samples: int = 0
    state: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def has_state(self) -> bool:
        """Whether the dataset or its iterator has a state of its own."""
        return "dataset" in self.state or "iterator" in self.state

    def advance(self, samples: int, state: dict[str, Any]) -> StreamProgress:
        """Return the progress one batch later."""
        return StreamProgress(self.batches + 1, self.samples + samples, state)


class Stream(IterableDataset[Any]):
    """Wraps a dataset, counts its samples and resumes it.

    Args:
        dataset: The dataset.
        saved: The progress from which each worker's stream resumes, in the next epoch only.
        in_worker: Whether it runs in a worker. A loader without workers may itself be used in another loader's worker.
    """

    def __init__(self, dataset: Any, saved: Mapping[int, StreamProgress], in_worker: bool) -> None:
        self.dataset = dataset
        self._saved: Mapping[int, StreamProgress] = saved
        self._in_worker = in_worker
        self._iterator: Any = None
        self._has_ended = False
        self._num_requested = self._num_raised = 0
        self._failure: ExceptionWrapper | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self._in_worker else None
        progress, self._saved = self._saved.get(info.id if info else 0), {}
        state: dict[str, Any] = progress.state if progress else {}
        if "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])
        iterator = cast("Iterator[Any]", iter(self.dataset))
        self._iterator = iterator
        self._num_requested, self._num_raised, self._failure = 0, state.get("raised", 0), None
        if "iterator" in state:
            self._iterator.load_state_dict(state["iterator"])
        elif progress and not progress.has_state:
            _fast_forward(iterator, progress.samples, self._num_raised)
        self._has_ended = bool(state.get("ended"))
        return self

    def __next__(self) -> Any:
        if self._failure:
            return self._failure  # DataLoader drops such a batch, so take no more samples for it
        if self._has_ended:  # an iterator that has loaded a state may not know that it has ended
            raise StopIteration
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._has_ended = True
            raise
        except Exception:
            self._num_requested += 1
            self._num_raised += 1
            self._has_ended = getattr(self._iterator, "gi_frame", self) is None  # a generator that raised has ended
            if not self._in_worker:
                raise
            self._failure = self._wrap_exception()
            return self._failure
        self._num_requested += 1
        return sample

    def build_batch(self, build: Callable[[Any], Any], samples: Any) -> Any:
        """Return ``build(samples)``. In a worker, return an exception of ``build`` or of the stream instead of raising.

        DataLoader sends nothing beside an exception that is raised, and the stream's progress must be sent with it.
        """
        failure, self._failure = self._failure, None
        if failure or not self._in_worker:
            return failure or build(samples)
        try:
            return build(samples)
        except StopIteration:
            raise
        except Exception:  # noqa: BLE001 - the loader's process raises it
            return self._wrap_exception()

    def take_progress(self) -> tuple[int, dict[str, Any]]:
        """Return how many samples were requested since the last call, and the present state."""
        count, self._num_requested = self._num_requested, 0
        return count, self.state()

    def state(self) -> dict[str, Any]:
        """Return the states of the dataset and its iterator that torchdata's ``StatefulDataLoader`` would save."""
        states: dict[str, Any] = {}
        try:
            if self._iterator is not self.dataset and is_stateful(self.dataset):
                states["dataset"] = copy.deepcopy(self.dataset.state_dict())  # another thread pickles it later
            if is_stateful(self._iterator):
                states["iterator"] = copy.deepcopy(self._iterator.state_dict())
        except Exception as error:  # noqa: BLE001 - only a script that saves the loader's state needs to know
            return {"failed": f"{type(error).__name__}: {error}"}
        if not states:
            return {"raised": self._num_raised} if self._num_raised else {}
        return states | ({"ended": True} if self._has_ended else {})

    def _wrap_exception(self) -> ExceptionWrapper:
        """Return the exception that is being handled, wrapped as DataLoader wraps it."""
        info: Any = get_worker_info()
        return ExceptionWrapper(where=f"in DataLoader worker process {info.id}")

    def __repr__(self) -> str:
        return repr(self.dataset)


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset is a stream that can be resumed."""
    return isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)


def _fast_forward(iterator: Iterator[Any], samples: int, raised: int) -> None:
    """Skip samples. Some of them raised an exception the first time, and may do so again."""
    left = iter(range(samples))
    requests = map(next, repeat(iterator))  # without iter(), which may restart an object that is its own iterator
    while True:
        try:
            deque(zip(left, requests, strict=False), maxlen=0)
        except Exception:
            raised -= 1
            if raised < 0:
                raise
        else:
            return


def is_stateful(value: Any) -> bool:
    """Return whether an object has the two methods of torchdata's ``Stateful``.

    The ``state_dict`` of Mosaic's and of LitData's ``StreamingDataset`` needs arguments that their own loaders give.
    """
    save, load = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    if not callable(save) or not callable(load):
        return False
    try:
        inspect.signature(save).bind()
    except TypeError:
        return False
    except ValueError:  # a function written in C may have no signature
        pass
    return True
