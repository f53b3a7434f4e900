"""Random numbers: Philox itself, what they depend on, and their distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from torchdali.transforms.rng import Draws, epoch_key, philox

# Known answers of philox4x32-10 published with Random123 (kat_vectors).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, words):
    many = np.repeat(np.array(counter, np.uint32)[:, None], 3, axis=1)
    found = philox(many, np.array(key, np.uint32))
    assert found.tolist() == [[word] * 3 for word in words]


def draws(index, seed=0, epoch=0, occurrence=0, position=0):
    index = np.asarray(index, np.int64)
    return Draws(epoch_key(seed, epoch), index, np.full_like(index, occurrence), position)


def test_numbers_depend_on_the_sample_and_not_on_its_batch():
    together = draws([5, 9, 2**40 + 5]).uniform(7)
    alone = np.concatenate([draws([i]).uniform(7) for i in (5, 9, 2**40 + 5)])
    assert np.array_equal(together, alone)
    assert len(np.unique(together)) == together.size


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"occurrence": 1}, {"position": 1}, {"seed": 2**63 - 1}])
def test_every_part_of_the_key_matters(change):
    assert not np.isin(draws(range(50), **change).uniform(8), draws(range(50)).uniform(8)).any()


def test_calls_continue_where_the_last_one_ended():
    one = draws(range(4))
    first, second = one.uniform(4), one.uniform(4)
    assert np.array_equal(np.hstack((first, second)), draws(range(4)).uniform(8))


def test_numbers_made_ahead_are_those_made_in_turn():
    index, blocks = [5, 9, 2**40 + 5], {}
    for _ in range(3):  # nothing is known, then what was taken, and then as much is there
        early = draws(index).precompute(blocks)
        for position, counts in {0: (7, 3), 2: (1,), 65535: (30, 30)}.items():
            together, alone = early.select_position(position), draws(index, position=position)
            some = early.select_rows(np.array([2, 0])).select_rows(np.array([1])).select_position(position)
            for count in counts:
                assert np.array_equal(together.words(count), expected := alone.words(count))
                assert np.array_equal(some.words(count), expected[:1])
    assert blocks.keys() == {0, 2, 65535}


def test_some_of_the_samples_get_what_they_get_among_all():
    index, often, some = np.array([5, 9, 5, 9, 5]), np.array([0, 3, 1, 0, 2]), np.array([3, 4, 1])
    of_all, of_some = (Draws(epoch_key(0, 0), index, often) for _ in range(2))
    assert np.array_equal(of_some.select_rows(some).words(7), of_all.words(7)[some])


def test_numbers_are_uniform_along_samples_and_along_draws():
    numbers = draws(range(4000)).uniform(5)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for column in numbers.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    assert np.abs(np.corrcoef(numbers.T) - np.eye(5)).max() < 0.08
    by_epoch = np.array([draws([3], epoch=epoch).uniform(1)[0, 0] for epoch in range(2000)])
    assert stats.kstest(by_epoch, "uniform").pvalue > 1e-4


def test_permutations_are_equally_likely():
    orders = draws(range(24_000)).permutation(4)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


def test_uniform_range_and_bernoulli():
    assert stats.kstest(draws(range(5000)).uniform_range(-2, 3), stats.uniform(-2, 5).cdf).pvalue > 1e-4
    assert draws(range(20_000)).bernoulli(0.3).mean() == pytest.approx(0.3, abs=0.015)
    assert not draws(range(1000)).bernoulli(0.0).any()
    assert draws(range(1000)).bernoulli(1.0).all()


def test_seeds_are_distinct_and_fit_every_generator():
    seeds = draws(range(5000)).seeds()
    assert len(np.unique(seeds)) == 5000
    assert seeds.min() >= 0
