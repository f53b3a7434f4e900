"""Ranks share the rest of an epoch as DistributedSampler deals out the whole."""

from __future__ import annotations

from itertools import chain, cycle, islice, product
from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from torchdali.state.remainder import RemainingShard, count_consumed, find_shared_sampler, skip_consumed
from torchdali.state.sharding import Shard

RANKS = (1, 2, 3, 5)


def samplers(length, ranks, drop_last, epoch=2):
    all_ranks = [DistributedSampler(range(length), ranks, rank, seed=4, drop_last=drop_last) for rank in range(ranks)]
    for sampler in all_ranks:
        sampler.set_epoch(epoch)
    return all_ranks


def order(length, epoch=2):
    (alone,) = samplers(length, 1, drop_last=False, epoch=epoch)
    return list(alone)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 7, 12, 13])
def test_any_number_of_ranks_shares_what_another_number_left(length, drop_last):
    whole = order(length)
    for before, ranks in product(RANKS, RANKS):
        for each in range(len(samplers(length, before, drop_last)[0]) + 1):
            earlier = samplers(length, before, drop_last)
            start = count_consumed(earlier[0], 0, each)
            consumed = set(chain.from_iterable(list(sampler)[:each] for sampler in earlier))
            assert consumed == set(whole[:start]), "ranks consume the beginning of the order"
            assert_shares_rest(samplers(length, ranks, drop_last), whole, start, drop_last)


def assert_shares_rest(of_ranks, whole, start, drop_last):
    """Check that the ranks' shares are even, and that dealt out in turn they are the rest of the order."""
    ranks, rest = len(of_ranks), whole[start:]
    shares = [list(RemainingShard(sampler, start)) for sampler in of_ranks]
    if start == 0:
        assert shares == [list(sampler) for sampler in of_ranks]
    dealt = [index for row in zip(*shares, strict=True) for index in row]
    if drop_last:
        assert dealt == rest[: len(rest) // ranks * ranks]
    else:
        assert dealt == [*rest, *islice(cycle(whole), -len(rest) % ranks)]


def test_the_rest_is_dealt_out_as_distributed_sampler_deals_it():
    for start, (rank, sampler) in product(range(13), enumerate(samplers(13, 3, drop_last=True))):
        rest = order(13)[start:]
        of_torch = DistributedSampler(rest, 3, rank, shuffle=False, drop_last=True)
        assert list(RemainingShard(sampler, start)) == [rest[i] for i in of_torch]


def test_it_follows_the_epoch_of_its_sampler():
    (sampler,) = samplers(12, 1, drop_last=False)
    shard = RemainingShard(sampler, 5)
    assert list(shard) == order(12)[5:]
    sampler.set_epoch(3)
    assert list(shard) == order(12, epoch=3)[5:]


def test_samples_before_an_earlier_change_of_ranks_count():
    sampler = samplers(13, 3, drop_last=False)[1]
    assert [count_consumed(sampler, 4, each) for each in range(5)] == [4, 7, 10, 13, 13]
    assert count_consumed(samplers(13, 2, drop_last=True)[0], 4, 100) == 12


def loader(sampler=None, batch_sampler=None):
    return SimpleNamespace(sampler=sampler, batch_sampler=batch_sampler)


def test_only_samplers_of_torch_and_torchdali_are_shared():
    class Own(DistributedSampler):
        pass

    plain, shard, own = (kind(range(6), 2, 0) for kind in (DistributedSampler, Shard, Own))
    assert find_shared_sampler(loader(plain)) is plain
    assert find_shared_sampler(loader(batch_sampler=BatchSampler(shard, 2, drop_last=False))) is shard
    assert find_shared_sampler(loader(own)) is None
    assert find_shared_sampler(loader(SequentialSampler(range(6)))) is None
    assert find_shared_sampler(loader(plain, batch_sampler=[[0, 1]])) is None


def test_the_rest_has_batches_of_the_same_size():
    (sampler,) = samplers(12, 1, drop_last=False)
    batches = BatchSampler(sampler, 4, drop_last=False)
    assert skip_consumed(batches, 0) is batches
    assert list(skip_consumed(batches, 5)) == list(BatchSampler(order(12)[5:], 4, drop_last=False))
    assert list(skip_consumed(sampler, 5)) == order(12)[5:]
