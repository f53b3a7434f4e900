"""``fast_forward`` gives the rest of an epoch that torch's samplers give in whole."""

from __future__ import annotations

from itertools import chain, product

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchdali.state.fast_forward import fast_forward, restart_if_empty
from torchdali.state.remainder import RemainingShard
from torchdali.state.sharding import Shard

DATA = range(11)


class Pairs:
    """A user's own batch sampler. Each batch has one index twice."""

    def __iter__(self):
        return iter([[i, i] for i in DATA])


def seeded():
    return torch.Generator().manual_seed(5)


ONCE = {
    "in order": lambda: SequentialSampler(DATA),
    "shuffled": lambda: RandomSampler(DATA, generator=seeded()),
    "weighted": lambda: WeightedRandomSampler([1.0] * 11, 9, replacement=False, generator=seeded()),
    "ranks": lambda: DistributedSampler(DATA, 2, 1),
    "shard": lambda: Shard(DATA, 2, 1),
    "rest of a shard": lambda: RemainingShard(Shard(DATA, 2, 1), 3),
}
AGAIN = {
    "replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=11, generator=seeded()),
    "longer": lambda: RandomSampler(DATA, num_samples=25, generator=seeded()),
    "weighted again": lambda: WeightedRandomSampler([1.0] * 11, 11, generator=seeded()),
    "subset": lambda: SubsetRandomSampler([1, 1, 4], generator=seeded()),
    "a list": lambda: [3, 1, 4, 1, 5],
}
KINDS = ONCE | AGAIN


def skip(sampler, batched, count, loaded=False):
    """Return what is left, and the indices that were skipped."""
    skipped = []
    rest = fast_forward(
        sampler,
        iter(sampler),
        count,
        is_batched=batched,
        count_skipped=lambda parts: skipped.extend(chain.from_iterable(parts)),
        is_loaded=loaded,
    )
    return list(rest), skipped


@pytest.mark.parametrize("kind", KINDS)
def test_batches_after_the_first_ones_are_torchs(kind):
    for drop_last, count in product([False, True], range(7)):
        whole = list(BatchSampler(KINDS[kind](), 2, drop_last))
        rest, skipped = skip(BatchSampler(KINDS[kind](), 2, drop_last), True, count)
        assert rest == whole[count:]
        if kind in AGAIN and count <= len(whole):
            assert skipped == list(chain.from_iterable(whole[:count]))


@pytest.mark.parametrize("kind", KINDS)
def test_indices_after_the_first_ones_are_torchs(kind):
    for count in (0, 1, 4, 11):
        whole = list(KINDS[kind]())
        rest, skipped = skip(KINDS[kind](), False, count)
        assert rest == whole[count:]
        assert skipped == (whole[:count] if kind in AGAIN else [])


@pytest.mark.parametrize("kind", ["shuffled", "weighted again"])
def test_the_generator_ends_where_torch_leaves_it(kind):
    sampler, of_torch = KINDS[kind](), KINDS[kind]()
    rest, _ = skip(BatchSampler(sampler, 3, drop_last=False), True, 2)
    assert rest == list(BatchSampler(of_torch, 3, drop_last=False))[2:]
    assert torch.equal(sampler.generator.get_state(), of_torch.generator.get_state())


def test_indices_of_a_users_own_batch_sampler_are_counted():
    assert skip(Pairs(), True, 3) == ([[i, i] for i in DATA][3:], [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("chunk", [3, 100])
def test_indices_are_counted_in_chunks(monkeypatch, chunk):
    monkeypatch.setattr("torchdali.state.fast_forward._CHUNK", chunk)
    parts = []
    rest = fast_forward([3, 1, 4, 1, 5], iter([3, 1, 4, 1, 5]), 4, is_batched=False, count_skipped=parts.extend)
    assert list(rest) == [5]
    assert list(chain.from_iterable(parts)) == [3, 1, 4, 1]
    assert max(map(len, parts)) == min(chunk, 4)


class Ended:
    """A sampler that loaded the state of an epoch's end. Its first iterator is empty."""

    def __init__(self):
        self.iterators = 0

    def __iter__(self):
        self.iterators += 1
        return iter([] if self.iterators == 1 else DATA)


def test_only_an_empty_iterator_is_begun_again():
    first, iterator = restart_if_empty(iter([7, 8]), Ended())
    assert first + list(iterator) == [7, 8]
    sampler = Ended()
    first, iterator = restart_if_empty(iter(sampler), sampler)
    assert first + list(iterator) == list(DATA)
    rest, _ = skip(BatchSampler(Ended(), 2, drop_last=False), True, 2, loaded=True)
    assert rest == list(BatchSampler(DATA, 2, drop_last=False))[2:]
