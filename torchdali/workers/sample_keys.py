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


_NO_KEYS = BatchKeys(np.empty(0, np.int64), np.empty(0, np.int64), [])


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
        self._sent: dict[int, tuple[Any, BatchKeys]] = {}

    def remember(self, task: int, index: Any) -> tuple[Any, BatchKeys]:
        """Keep the indices of a batch, and return them with their keys. The keys of a stream are not known yet.

        An iterator becomes a list, because it only lasts once.
        """
        if isinstance(index, Iterator):  # the fetcher uses it up
            index = list(cast("Iterator[Any]", index))
        keys = self._key_batch(() if self._is_stream else index if self._is_batched else [index])
        self._sent[task] = index, keys
        return index, keys

    def fast_forward(self, indices: Iterable[Any]) -> None:
        """Count the samples before the point of resumption."""
        self._occurrences.fast_forward(map(_make_keys, indices))

    def resume_streams(self, samples: Mapping[int, int]) -> None:
        """Set the number of samples of each worker's stream before the point of resumption."""
        self._stream_samples = dict(samples)

    def make_batch_keys(self, packed: Packed) -> BatchKeys:
        """Make the keys of a batch. Call it once for each batch, also for one that failed."""
        # A batch that failed before its indices were requested has none.
        index, keys = self._sent.pop(packed.task, ((), _NO_KEYS))
        if not self._is_stream:
            # Without one index for each sample, samples are numbered.
            is_numbered = packed.count not in (len(keys.names), 0)
            return self._key_batch([(index, i) for i in range(packed.count)]) if is_numbered else keys
        first = self._stream_samples.get(packed.worker, 0)
        self._stream_samples[packed.worker] = first + packed.count
        names = np.arange(first, first + packed.count, dtype=np.int64)
        suffix = f", worker {packed.worker}" if self._has_workers else ""
        return BatchKeys(packed.worker * _STREAM + names, np.zeros_like(names), names.tolist(), suffix)

    def _key_batch(self, indices: Any) -> BatchKeys:
        """Make the keys of a batch from its indices. Call it in the order of the batches."""
        names: list[Any] = list(cast("Iterable[Any]", indices)) if isinstance(indices, Iterable) else []
        keys = _make_keys(names)
        return BatchKeys(keys, self._occurrences.count(keys.tolist()), names)


def _make_key(index: Any) -> int:
    """Return the key of a sample's random numbers for an index into a map-style dataset."""
    try:
        number = operator.index(index)
    except TypeError:
        number = 2**63
    if -(2**63) <= number < 2**63:
        return number
    return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=7).digest(), "little")


def _make_keys(indices: IntArray | list[Any]) -> IntArray:
    """Return the keys of many indices."""
    if isinstance(indices, np.ndarray):
        return indices
    if set(map(type, indices)) == {int} and min(indices) >= -(2**63) and max(indices) < 2**63:
        return np.array(indices, np.int64)
    return np.array(list(map(_make_key, indices)), np.int64)
