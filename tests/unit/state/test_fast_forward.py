"""Passing over the beginning of an epoch, against asking torch's samplers for all of it."""

from __future__ import annotations

from itertools import chain

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
    """Batches of two that a user's own batch sampler gives, each index twice in a row."""

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


def passed(sampler, batched, count, loaded=False):
    """What remains, and the indices that were passed over."""
    seen = []
    rest = fast_forward(
        sampler,
        iter(sampler),
        count,
        is_batched=batched,
        count_skipped=lambda parts: seen.extend(chain.from_iterable(parts)),
        is_loaded=loaded,
    )
    return list(rest), seen


@pytest.mark.parametrize("count", range(7))
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_after_the_first_ones(kind, drop_last, count):
    sampler = BatchSampler(KINDS[kind](), 2, drop_last)
    whole = list(BatchSampler(KINDS[kind](), 2, drop_last))
    rest, seen = passed(sampler, True, count)
    assert rest == whole[count:]
    if kind in AGAIN and count <= len(whole):
        assert seen == list(chain.from_iterable(whole[:count]))


@pytest.mark.parametrize("count", [0, 1, 4, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_single_indices_after_the_first_ones(kind, count):
    rest, seen = passed(KINDS[kind](), False, count)
    assert rest == list(KINDS[kind]())[count:]
    assert seen == (list(KINDS[kind]())[:count] if kind in AGAIN else [])


@pytest.mark.parametrize("kind", ["shuffled", "replacement", "longer", "weighted again"])
def test_the_generator_is_where_torch_leaves_it(kind):
    sampler, of_torch = KINDS[kind](), KINDS[kind]()
    rest, _ = passed(BatchSampler(sampler, 3, drop_last=False), True, 2)
    assert rest == list(BatchSampler(of_torch, 3, drop_last=False))[2:]
    assert torch.equal(sampler.generator.get_state(), of_torch.generator.get_state())


def test_batches_of_a_users_own_sampler_are_opened_for_their_indices():
    assert passed(Pairs(), True, 3) == ([[i, i] for i in DATA][3:], [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_indices_come_in_chunks(monkeypatch, chunk):
    monkeypatch.setattr("torchdali.state.fast_forward._CHUNK", chunk)
    parts = []
    rest = fast_forward([3, 1, 4, 1, 5], iter([3, 1, 4, 1, 5]), 4, is_batched=False, count_skipped=parts.extend)
    assert list(rest) == [5]
    assert list(chain.from_iterable(parts)) == [3, 1, 4, 1]
    assert max(map(len, parts)) == min(chunk, 4)


class Ends:
    """A sampler whose loaded state was that of an epoch's end: it gives nothing at first."""

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        self.asked += 1
        return iter([] if self.asked == 1 else DATA)


def test_a_sampler_that_loaded_the_end_of_an_epoch_is_asked_again():
    sampler = Ends()
    first, iterator = restart_if_empty(iter(sampler), sampler)
    assert first + list(iterator) == list(DATA)
    rest, _ = passed(BatchSampler(Ends(), 2, drop_last=False), True, 2, loaded=True)
    assert rest == list(BatchSampler(DATA, 2, drop_last=False))[2:]


def test_a_sampler_that_gives_something_is_not_asked_again():
    first, iterator = restart_if_empty(iter([7, 8]), Ends())
    assert first + list(iterator) == [7, 8]
