"""What the samples of an epoch are known by: in their random numbers, and in errors."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from torchdali.errors import SampleError
from torchdali.transforms.occurrences import Occurrences
from torchdali.transforms.spec import IntArray
from torchdali.workers.packing import Packed

__all__ = ["BatchKeys", "SampleKeys"]

_STREAM = 2**40
"""Samples that one worker's stream may have."""


@dataclass(frozen=True)
class BatchKeys:
    """What the samples of a batch are known by.

    Attributes:
        index: ``(N,)`` what their random numbers are keyed by.
        occurrence: ``(N,)`` how often each was drawn before in this epoch.
        names: What they are called in errors: indices, or places in a stream.
        suffix: Whose places these are, if there are several streams.
    """

    index: IntArray
    occurrence: IntArray
    names: Sequence[Any]
    suffix: str = ""

    def make_error(self, sample: int, named: str, reason: str) -> SampleError:
        """The error that blames a sample: its number in the batch, what is at fault, and why."""
        return SampleError(self.names[sample], named + self.suffix, reason)


class SampleKeys:
    """What the samples of one epoch are known by.

    Args:
        batched: Whether the sampler gives the indices of a batch at once.
        stream: Whether the dataset has no indices.
        workers: Whether each of several processes has a stream of its own.
    """

    def __init__(self, batched: bool, stream: bool, workers: bool) -> None:
        self._batched, self._stream, self._workers = batched, stream, workers
        self._occurrences = Occurrences()
        self._streamed: dict[int, int] = {}
        self._sent: dict[int, Any] = {}

    def remember(self, task: int, index: Any) -> Any:
        """Keeps what the dataset is asked for; returns what can be asked for twice."""
        if isinstance(index, Iterator):  # the fetcher uses it up
            index = list(cast("Iterator[Any]", index))
        self._sent[task] = index
        return index

    def fast_forward(self, indices: Iterable[Any]) -> None:
        """Counts samples that came before the epoch was gone on with."""
        self._occurrences.fast_forward(_make_keys(indices))

    def resume_streams(self, samples: Mapping[int, int]) -> None:
        """Says how many samples came of each worker's stream before the epoch was gone on with."""
        self._streamed = dict(samples)

    def make_batch_keys(self, packed: Packed) -> BatchKeys:
        """What is known of the samples of a batch; to be asked once for each, of one that failed as of an empty one."""
        indices = self._indices(packed)
        if not self._stream:
            keys = np.array([_make_key(index) for index in indices], np.int64)
            return BatchKeys(keys, self._occurrences.count(keys.tolist()), indices)
        first = self._streamed.get(packed.worker, 0)
        self._streamed[packed.worker] = first + packed.count
        names = np.arange(first, first + packed.count, dtype=np.int64)
        suffix = f", worker {packed.worker}" if self._workers else ""
        return BatchKeys(packed.worker * _STREAM + names, np.zeros_like(names), names.tolist(), suffix)

    def _indices(self, packed: Packed) -> Sequence[Any]:
        """The sampler's indices, where there is one for each of the samples."""
        if packed.task not in self._sent:  # one that failed before it was asked for
            return []
        sent = self._sent.pop(packed.task)
        if not self._batched:
            return [sent]
        indices: list[Any] = list(cast("Iterable[Any]", sent)) if isinstance(sent, Iterable) else []
        return indices if packed.count in (len(indices), 0) else [(sent, i) for i in range(packed.count)]


def _make_key(index: Any) -> int:
    """What an index into a map-style dataset adds to the key of a sample's random numbers."""
    try:
        number = operator.index(index)
    except TypeError:
        number = 2**63
    if -(2**63) <= number < 2**63:
        return number
    return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=7).digest(), "little")


def _make_keys(indices: Iterable[IntArray | list[Any]]) -> Iterator[IntArray]:
    """The same for many indices, some at a time."""
    for some in indices:
        if isinstance(some, np.ndarray):
            yield some
        elif set(map(type, some)) == {int} and min(some) >= -(2**63) and max(some) < 2**63:
            yield np.array(some, np.int64)
        else:
            yield np.array(list(map(_make_key, some)), np.int64)
