"""Skip batches of a sampler without loading a sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, cast

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from torchdali.state.remainder import RemainingShard
from torchdali.state.sharding import Shard

__all__ = ["fast_forward", "restart_if_empty"]

_CHUNK = 2**20


def fast_forward(
    sampler: Any,
    iterator: Iterator[Any],
    batches: int,
    *,
    is_batched: bool,
    count_skipped: Callable[[Iterable[Any]], None] | None = None,
    is_loaded: bool = False,
) -> Iterator[Any]:
    """Return the iterator of a sampler after some batches, or after all if there are fewer.

    From torch's own ``BatchSampler`` the indices are taken one by one from the inner sampler, so no batch is built.

    Args:
        sampler: The sampler of indices, or of batches of them.
        iterator: Its iterator, which was not asked yet.
        batches: The number of batches to skip.
        is_batched: Whether the sampler gives batches.
        count_skipped: Consumes an iterator over lists of the skipped indices. It is not called if the sampler cannot
            give an index twice.
        is_loaded: Whether the sampler has loaded a state of the start of the epoch.
    """
    if batches <= 0:
        return iterator
    unwraps = type(sampler) is BatchSampler
    consume = None if _is_without_repeats(sampler.sampler if unwraps else sampler) else count_skipped
    if unwraps:
        inner = cast("Iterator[Any]", iter(sampler.sampler))  # made as late as BatchSampler makes it
        if is_loaded:
            inner = chain(*restart_if_empty(inner, sampler.sampler))
        _skip(islice(inner, batches * sampler.batch_size), consume)
        return iter(BatchSampler(cast("Any", inner), sampler.batch_size, sampler.drop_last))
    skipped = islice(iterator, batches)
    if is_batched and consume:
        skipped = chain.from_iterable(cast("Iterable[Any]", batch) for batch in skipped if isinstance(batch, Iterable))
    _skip(skipped, consume)
    return iterator


def _skip(indices: Iterator[Any], consume: Callable[[Iterable[Any]], None] | None) -> None:
    if consume:
        consume(iter(lambda: list(islice(indices, _CHUNK)), []))
    else:
        deque(indices, maxlen=0)


def restart_if_empty(iterator: Iterator[Any], sampler: Iterable[Any]) -> tuple[list[Any], Iterator[Any]]:
    """Return the first item in a list, and the iterator of the others, of a sampler that has loaded a state.

    The state may be that of the end of the epoch before, from which nothing comes. Then the sampler is asked for
    another iterator.
    """
    first = list(islice(iterator, 1))
    return (first, iterator) if first else ([], iter(sampler))


def _is_without_repeats(sampler: Any) -> bool:
    """Return whether it is certain that no index comes twice in an epoch. Shards repeat only on other ranks."""
    if type(sampler) in (SequentialSampler, DistributedSampler, Shard, RemainingShard):
        return True
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) is WeightedRandomSampler and not sampler.replacement
