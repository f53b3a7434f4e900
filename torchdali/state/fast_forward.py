"""Passing over batches of a sampler, at the speed of C and without a sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, cast

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from torchdali.state.remainder import RemainingShard
from torchdali.state.sharding import Shard

__all__ = ["FastForward", "unless_over"]

_CHUNK = 2**20


class FastForward:
    """Passes over batches.

    Of torch's own ``BatchSampler`` the indices are taken one by one from the sampler within, so that no batch is made.

    Args:
        sampler: What gives the indices.
        iterator: Its iterator, which was not asked yet.
        batched: Whether it gives batches.
        passed: Is given an iterator over the indices of samples that are passed over, in arrays or lists of many, and
            uses it up. It is not called where the sampler cannot give an index twice.
        loaded: Whether the sampler loaded a state of the epoch's begin.
    """

    def __init__(
        self,
        sampler: Any,
        iterator: Iterator[Any],
        batched: bool,
        passed: Callable[[Iterable[Any]], None] | None,
        loaded: bool,
    ) -> None:
        self._sampler, self._iterator, self._batched = sampler, iterator, batched
        self._within: Iterator[Any] | None = None
        self._opens, self._loaded = type(sampler) is BatchSampler, loaded
        once = _gives_once(sampler.sampler if self._opens else sampler)
        self._passed = _drop if once or passed is None else passed

    def fast_forward(self, batches: int) -> None:
        """Passes over some batches, or as many as there are."""
        if batches <= 0:
            return
        if self._opens:
            if self._within is None:  # made as late as the BatchSampler would have made it
                self._within = cast("Iterator[Any]", iter(self._sampler.sampler))
                if self._loaded:
                    self._within = chain(*unless_over(self._within, self._sampler.sampler))
            self._pass(islice(self._within, batches * self._sampler.batch_size))
        elif self._batched and self._passed is not _drop:
            some = islice(self._iterator, batches)
            lists = (cast("Iterable[Any]", batch) for batch in some if isinstance(batch, Iterable))
            self._pass(chain.from_iterable(lists))
        else:
            self._pass(islice(self._iterator, batches))

    def _pass(self, indices: Iterator[Any]) -> None:
        self._passed(indices if self._passed is _drop else iter(lambda: list(islice(indices, _CHUNK)), []))

    def rest(self) -> Iterator[Any]:
        """What was not passed over."""
        if self._within is None:
            return self._iterator
        return iter(BatchSampler(cast("Any", self._within), self._sampler.batch_size, self._sampler.drop_last))


def unless_over(iterator: Iterator[Any], sampler: Iterable[Any]) -> tuple[list[Any], Iterator[Any]]:
    """The first that comes, and the iterator that goes on, of a sampler that loaded what it said before an epoch.

    That may be what it said at the end of the one before, from which nothing comes; then it is asked again.
    """
    first = list(islice(iterator, 1))
    return (first, iterator) if first else ([], iter(sampler))


def _drop(indices: Iterable[Any]) -> None:
    deque(indices, maxlen=0)


def _gives_once(sampler: Any) -> bool:
    """Whether it is certain that no index comes twice in an epoch."""
    if type(sampler) in (
        SequentialSampler,
        DistributedSampler,
        Shard,
        RemainingShard,
    ):  # which repeat on other ranks only
        return True
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) is WeightedRandomSampler and not sampler.replacement
