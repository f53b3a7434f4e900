"""Share the rest of an epoch among any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import cycle, islice
from typing import Any, cast

from torch.utils.data import BatchSampler, DistributedSampler

from torchdali.state.sharding import Shard

__all__ = ["RemainingShard", "count_consumed", "find_shared_sampler", "skip_consumed"]


def find_shared_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """Return the sampler that gives the ranks their shares, or None if it is neither torch's nor torchdali's."""
    first = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = first.sampler if type(first) is BatchSampler else first
    return cast("DistributedSampler[Any]", sampler) if type(sampler) in (DistributedSampler, Shard) else None


def count_consumed(sampler: DistributedSampler[Any], start: int, samples: int) -> int:
    """Return how many samples of the epoch's order all ranks together have consumed.

    Args:
        sampler: The sampler of one rank.
        start: Samples that were consumed before, by another number of ranks.
        samples: Samples that each rank has consumed since.
    """
    ranks, left = sampler.num_replicas, max(len(cast("Sized", sampler.dataset)) - start, 0)
    share = left // ranks if sampler.drop_last else -(-left // ranks)
    return start + ranks * min(samples, share)


class RemainingShard:
    """A rank's share of the rest of an epoch, computed as in ``DistributedSampler``.

    ``DistributedSampler`` deals samples out one by one. So N ranks that have consumed the same number of samples have
    together consumed the beginning of the epoch's order, and the rest can be dealt out again. If the rest cannot be
    shared evenly, samples from the beginning of the order are added. With ``drop_last`` its end is dropped instead.

    Args:
        sampler: The rank's sampler.
        start: Number of samples of the epoch's order that were consumed.
    """

    def __init__(self, sampler: DistributedSampler[Any], start: int) -> None:
        self._sampler, self._start = sampler, start

    def __iter__(self) -> Iterator[int]:
        ranks, order = self._sampler.num_replicas, _order(self._sampler)
        indices = order[self._start :]
        if self._sampler.drop_last:
            indices = indices[: len(indices) // ranks * ranks]
        else:
            indices += islice(cycle(order), -len(indices) % ranks)
        return iter(indices[self._sampler.rank :: ranks])


def _order(sampler: DistributedSampler[Any]) -> list[int]:
    """Return the order of the whole epoch, which is that of a single rank."""
    alone: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, 1, 0, sampler.shuffle, sampler.seed, drop_last=False
    )
    alone.set_epoch(sampler.epoch)
    return list(alone)


def skip_consumed(index_sampler: Any, start: int) -> Iterable[Any]:
    """Return a sampler of the rest of an epoch.

    Args:
        index_sampler: The sampler of the whole epoch: a ``DistributedSampler``, or a ``BatchSampler`` over one.
        start: Number of samples of the epoch's order that were consumed.
    """
    if not start:
        return index_sampler
    if type(index_sampler) is BatchSampler:
        shard: Any = RemainingShard(index_sampler.sampler, start)  # pyright: ignore[reportArgumentType]
        return BatchSampler(shard, index_sampler.batch_size, index_sampler.drop_last)
    return RemainingShard(index_sampler, start)
