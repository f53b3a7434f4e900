"""What is left of a shared epoch, against DistributedSampler over all of it and over the rest alone."""

from __future__ import annotations

from itertools import chain, cycle, islice, zip_longest
from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from torchdali.state.remainder import RemainingShard, count_consumed, find_shared_sampler, remaining
from torchdali.state.sharding import Shard

LENGTHS = (1, 7, 12, 13)
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
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_from_the_start_it_is_the_whole_shard(length, ranks, drop_last):
    for sampler in samplers(length, ranks, drop_last):
        assert list(RemainingShard(sampler, 0)) == list(sampler)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("before", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_what_some_ranks_left_is_shared_by_others(length, before, ranks, drop_last):
    whole = order(length)
    for each in range(len(samplers(length, before, drop_last)[0]) + 1):
        earlier = samplers(length, before, drop_last)
        start = count_consumed(earlier[0], 0, each)
        had = set(chain.from_iterable(list(sampler)[:each] for sampler in earlier))
        assert had == set(whole[:start]), "what they had is the beginning of the order"
        shares = [list(RemainingShard(sampler, start)) for sampler in samplers(length, ranks, drop_last)]
        assert len({len(share) for share in shares}) == 1
        dealt = [index for row in zip_longest(*shares) for index in row]
        rest = whole[start:]
        if drop_last:
            assert dealt == rest[: len(rest) // ranks * ranks]
        else:
            assert dealt[: len(rest)] == rest
            assert len(dealt) - len(rest) < ranks
            assert dealt[len(rest) :] == [*islice(cycle(whole), len(dealt) - len(rest))]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("start", range(13))
def test_the_rest_is_dealt_out_as_distributed_sampler_deals_it(start, rank):
    rest, sampler = order(13)[start:], samplers(13, 3, drop_last=True)[rank]
    of_torch = DistributedSampler(rest, 3, rank, shuffle=False, drop_last=True)
    assert list(RemainingShard(sampler, start)) == [rest[i] for i in of_torch]


def test_it_follows_the_epoch_of_its_sampler():
    (sampler,) = samplers(12, 1, drop_last=False)
    shard = RemainingShard(sampler, 5)
    assert list(shard) == order(12)[5:]
    sampler.set_epoch(3)
    assert list(shard) == order(12, epoch=3)[5:]


def test_samples_are_counted_on_from_an_earlier_change_of_ranks():
    sampler = samplers(13, 3, drop_last=False)[1]
    assert [count_consumed(sampler, 4, each) for each in range(5)] == [4, 7, 10, 13, 13]
    assert count_consumed(samplers(13, 2, drop_last=True)[0], 4, 100) == 12


def loader(sampler=None, batch_sampler=None):
    return SimpleNamespace(sampler=sampler, batch_sampler=batch_sampler)


def test_only_torchs_own_sampler_is_shared():
    class Own(DistributedSampler):
        pass

    plain, shard, own = (kind(range(6), 2, 0) for kind in (DistributedSampler, Shard, Own))
    assert find_shared_sampler(loader(plain)) is plain
    assert find_shared_sampler(loader(batch_sampler=BatchSampler(shard, 2, drop_last=False))) is shard
    assert find_shared_sampler(loader(own)) is None
    assert find_shared_sampler(loader(SequentialSampler(range(6)))) is None
    assert find_shared_sampler(loader(plain, batch_sampler=[[0, 1]])) is None


def test_batches_of_the_rest():
    (sampler,) = samplers(12, 1, drop_last=False)
    batches = BatchSampler(sampler, 4, drop_last=False)
    assert remaining(batches, 0) is batches
    assert list(remaining(batches, 5)) == list(BatchSampler(order(12)[5:], 4, drop_last=False))
    assert list(remaining(sampler, 5)) == order(12)[5:]
