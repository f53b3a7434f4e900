"""Skip batches of a sampler without loading a sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, cast

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from torchdali.state.remainder import RemainingShard
from torchdali.state.sharding import Shard

__all__ = ["FastForward", "restart_if_empty"]

_CHUNK = 2**20


class FastForward:
    """Skips batches at the speed of C.

    From torch's own ``BatchSampler`` the indices are taken one by one from the inner sampler, so no batch is built.

    Args:
        sampler: The sampler of indices, or of batches of them.
        iterator: Its iterator, which was not asked yet.
        batched: Whether it gives batches.
        count_skipped: Consumes an iterator over lists of the skipped indices. It is not called if the sampler cannot
            give an index twice.
        loaded: Whether the sampler has loaded a state of the start of the epoch.
    """

    def __init__(
        self,
        sampler: Any,
        iterator: Iterator[Any],
        batched: bool,
        count_skipped: Callable[[Iterable[Any]], None] | None,
        loaded: bool,
    ) -> None:
        self._sampler, self._iterator, self._batched = sampler, iterator, batched
        self._inner: Iterator[Any] | None = None
        self._unwraps, self._loaded = type(sampler) is BatchSampler, loaded
        once = _gives_once(sampler.sampler if self._unwraps else sampler)
        self._consume = _drop if once or count_skipped is None else count_skipped

    def fast_forward(self, batches: int) -> None:
        """Skip some batches, or all if there are fewer."""
        if batches <= 0:
            return
        if self._unwraps:
            if self._inner is None:  # made as late as BatchSampler makes it
                self._inner = cast("Iterator[Any]", iter(self._sampler.sampler))
                if self._loaded:
                    self._inner = chain(*restart_if_empty(self._inner, self._sampler.sampler))
            self._skip(islice(self._inner, batches * self._sampler.batch_size))
        elif self._batched and self._consume is not _drop:
            skipped = islice(self._iterator, batches)
            lists = (cast("Iterable[Any]", batch) for batch in skipped if isinstance(batch, Iterable))
            self._skip(chain.from_iterable(lists))
        else:
            self._skip(islice(self._iterator, batches))

    def _skip(self, indices: Iterator[Any]) -> None:
        self._consume(indices if self._consume is _drop else iter(lambda: list(islice(indices, _CHUNK)), []))

    def remaining(self) -> Iterator[Any]:
        """Return an iterator over what was not skipped."""
        if self._inner is None:
            return self._iterator
        return iter(BatchSampler(cast("Any", self._inner), self._sampler.batch_size, self._sampler.drop_last))


def restart_if_empty(iterator: Iterator[Any], sampler: Iterable[Any]) -> tuple[list[Any], Iterator[Any]]:
    """Return the first item in a list, and the iterator of the others, of a sampler that has loaded a state.

    The state may be that of the end of the epoch before, from which nothing comes. Then the sampler is asked for
    another iterator.
    """
    first = list(islice(iterator, 1))
    return (first, iterator) if first else ([], iter(sampler))


def _drop(indices: Iterable[Any]) -> None:
    deque(indices, maxlen=0)


def _gives_once(sampler: Any) -> bool:
    """Return whether it is certain that no index comes twice in an epoch. Shards repeat only on other ranks."""
    if type(sampler) in (SequentialSampler, DistributedSampler, Shard, RemainingShard):
        return True
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) is WeightedRandomSampler and not sampler.replacement
