"""What is left of an epoch that several ranks share, for any number of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import cycle, islice
from typing import Any, cast

from torch.utils.data import BatchSampler, DistributedSampler

from torchdali.state.sharding import Shard

__all__ = ["RemainingShard", "reached", "remaining", "shared"]


def shared(loader: Any) -> DistributedSampler[Any] | None:
    """The sampler that deals an epoch's order out to the ranks one by one; None where another one has a say."""
    first = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    found = first.sampler if type(first) is BatchSampler else first
    return cast("DistributedSampler[Any]", found) if type(found) in (DistributedSampler, Shard) else None


def reached(sampler: DistributedSampler[Any], start: int, samples: int) -> int:
    """Samples of an epoch's order that all ranks together have had.

    Args:
        sampler: That of one rank.
        start: What was had by those that there were before them.
        samples: What each of them has had since.
    """
    ranks, left = sampler.num_replicas, max(len(cast("Sized", sampler.dataset)) - start, 0)
    share = left // ranks if sampler.drop_last else -(-left // ranks)
    return start + ranks * min(samples, share)


class RemainingShard:
    """A rank's share of what is left, by ``DistributedSampler``'s arithmetic.

    The samples are dealt out one by one, so that what N ranks had after as many samples each is the beginning of the
    epoch's order, and the rest can be dealt out again. Where it cannot be shared evenly, it is filled up from the
    epoch's beginning, or with ``drop_last`` its end left out.

    Args:
        sampler: The rank's.
        start: Samples of the epoch's order that were delivered.
    """

    def __init__(self, sampler: DistributedSampler[Any], start: int) -> None:
        self._sampler, self._start = sampler, start

    def __iter__(self) -> Iterator[int]:
        ranks, order = self._sampler.num_replicas, _order(self._sampler)
        rest = order[self._start :]
        if self._sampler.drop_last:
            rest = rest[: len(rest) // ranks * ranks]
        else:
            rest += islice(cycle(order), -len(rest) % ranks)
        return iter(rest[self._sampler.rank :: ranks])


def _order(sampler: DistributedSampler[Any]) -> list[int]:
    """All samples of the epoch, as one rank alone would have them."""
    alone: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, 1, 0, sampler.shuffle, sampler.seed, drop_last=False
    )
    alone.set_epoch(sampler.epoch)
    return list(alone)


def remaining(index_sampler: Any, start: int) -> Iterable[Any]:
    """What gives the indices, or batches of them, that come after the beginning of an epoch.

    Args:
        index_sampler: What gives them in a whole epoch: a ``DistributedSampler``, or a ``BatchSampler`` of one.
        start: Samples of the epoch's order that were delivered.
    """
    if not start:
        return index_sampler
    if type(index_sampler) is BatchSampler:
        rest: Any = RemainingShard(index_sampler.sampler, start)  # pyright: ignore[reportArgumentType]
        return BatchSampler(rest, index_sampler.batch_size, index_sampler.drop_last)
    return RemainingShard(index_sampler, start)
