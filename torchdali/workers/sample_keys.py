"""Keys of samples: for their random numbers, and to name them in errors."""

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
from torchdali.workers.packed import Packed

__all__ = ["BatchKeys", "SampleKeys"]

_STREAM = 2**40
"""The most samples that a worker's stream can have."""


@dataclass(frozen=True)
class BatchKeys:
    """Keys of the samples of a batch.

    Attributes:
        index: ``(N,)`` keys of their random numbers.
        occurrence: ``(N,)`` how often the sampler drew each before in this epoch.
        names: Their names in errors: indices, or positions in a stream.
        suffix: Names the worker if there are several streams.
    """

    index: IntArray
    occurrence: IntArray
    names: Sequence[Any]
    suffix: str = ""

    def make_error(self, sample: int, name: str, reason: str) -> SampleError:
        """Build the error that blames a sample, by its number in the batch."""
        return SampleError(self.names[sample], name + self.suffix, reason)


class SampleKeys:
    """Keys of the samples of one epoch.

    Args:
        is_batched: Whether the sampler yields the indices of a whole batch.
        is_stream: Whether the dataset has no indices.
        has_workers: Whether each of several processes has a stream of its own.
    """

    def __init__(self, is_batched: bool, is_stream: bool, has_workers: bool) -> None:
        self._is_batched, self._is_stream, self._has_workers = is_batched, is_stream, has_workers
        self._occurrences = Occurrences()
        self._stream_samples: dict[int, int] = {}
        self._sent: dict[int, Any] = {}

    def remember(self, task: int, index: Any) -> Any:
        """Keep the indices of a batch. Return them as a list if they are an iterator, which only lasts once."""
        if isinstance(index, Iterator):  # the fetcher uses it up
            index = list(cast("Iterator[Any]", index))
        self._sent[task] = index
        return index

    def fast_forward(self, indices: Iterable[Any]) -> None:
        """Count the samples before the point of resumption."""
        self._occurrences.fast_forward(_make_keys(indices))

    def resume_streams(self, samples: Mapping[int, int]) -> None:
        """Set the number of samples of each worker's stream before the point of resumption."""
        self._stream_samples = dict(samples)

    def make_batch_keys(self, packed: Packed) -> BatchKeys:
        """Make the keys of a batch. Call it once for each batch; a failed batch counts as empty."""
        indices = self._pop_indices(packed)
        if not self._is_stream:
            keys = np.array([_make_key(index) for index in indices], np.int64)
            return BatchKeys(keys, self._occurrences.count(keys.tolist()), indices)
        first = self._stream_samples.get(packed.worker, 0)
        self._stream_samples[packed.worker] = first + packed.count
        names = np.arange(first, first + packed.count, dtype=np.int64)
        suffix = f", worker {packed.worker}" if self._has_workers else ""
        return BatchKeys(packed.worker * _STREAM + names, np.zeros_like(names), names.tolist(), suffix)

    def _pop_indices(self, packed: Packed) -> Sequence[Any]:
        """Return the sampler's indices, or numbers if there is not one index for each sample."""
        if packed.task not in self._sent:  # it failed before indices were requested
            return []
        sent = self._sent.pop(packed.task)
        if not self._is_batched:
            return [sent]
        indices: list[Any] = list(cast("Iterable[Any]", sent)) if isinstance(sent, Iterable) else []
        return indices if packed.count in (len(indices), 0) else [(sent, i) for i in range(packed.count)]


def _make_key(index: Any) -> int:
    """Return the key of a sample's random numbers for an index into a map-style dataset."""
    try:
        number = operator.index(index)
    except TypeError:
        number = 2**63
    if -(2**63) <= number < 2**63:
        return number
    return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=7).digest(), "little")


def _make_keys(indices: Iterable[IntArray | list[Any]]) -> Iterator[IntArray]:
    """Yield the keys of many indices, in chunks."""
    for chunk in indices:
        if isinstance(chunk, np.ndarray):
            yield chunk
        elif set(map(type, chunk)) == {int} and min(chunk) >= -(2**63) and max(chunk) < 2**63:
            yield np.array(chunk, np.int64)
        else:
            yield np.array(list(map(_make_key, chunk)), np.int64)
