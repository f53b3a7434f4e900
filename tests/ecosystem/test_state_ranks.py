"""Where each rank of several is: the states of loaders that shard themselves, or have a DistributedSampler."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Numbered
from helpers.arguments import WORKERS
from helpers.proxied import difference
from helpers.resumed import KINDS, Ranks, in_group, through_files

from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(params=list(KINDS))
def of_rank(request: pytest.FixtureRequest, pictures: Path, numbered: Numbered) -> Ranks:
    return Ranks(KINDS[request.param](pictures, numbered))


# As many ranks


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("batches", [None, 0, 1, 3])
def test_a_share_goes_on(of_rank: Ranks, workers: Any, batches: int | None) -> None:
    """In its second epoch, or before the third."""
    with in_group(1, 2):
        loader = of_rank(2, 1, seed=5, **workers)
        list(loader)
        iterator = iter(loader)
        list(islice(iterator, batches))
        state = through_files(loader.state_dict())
        true = [list(iterator), list(loader), list(loader)]
        again = of_rank(2, 1, number=8, seed=5, **workers)
        again.load_state_dict(state)
        ours = [list(again) for _ in true[batches is None :]]
        assert not difference(ours, true[batches is None :])
        assert loader.sampler.epoch == again.sampler.epoch == 3  # pyright: ignore


def test_a_share_that_is_told_its_epoch(of_rank: Ranks) -> None:
    with in_group(1, 2):
        loader = of_rank(2, 1, seed=5)
        loader.set_epoch(4)
        iterator = iter(loader)
        next(iterator)
        states = [loader.state_dict()]
        true = [list(iterator), list(loader)]
        states.append(loader.state_dict())
        true.append(list(loader))
        assert [state["samplers"]["sampler"]["epoch"] for state in states] == [4, 6]
        for epoch, state, first in zip((4, 6), states, (0, 2), strict=True):
            again = of_rank(2, 1, number=8, seed=5)
            again.load_state_dict(state)
            again.set_epoch(epoch)
            assert not difference([list(again) for _ in true[first:]], true[first:])
        again.load_state_dict(states[0])
        again.set_epoch(5)
        with pytest.raises(ValueError, match=r"is of epoch 4, and sampler.set_epoch\(5\) was called since"):
            iter(again)
        again.load_state_dict(states[1])
        again.set_epoch(5)
        assert not difference(list(again), true[1]), "an epoch that was not begun may be another one"


def test_the_loaders_own_number_is_followed(of_rank: Ranks) -> None:
    def make(number: int) -> DALILoader[Any]:
        torch.manual_seed(number)
        return DALILoader(of_rank.dataset, 2, seed=5, **of_rank.own)

    loader = make(7)
    loader.set_epoch(4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    true = [list(iterator), list(loader)]
    again = make(8)
    again.load_state_dict(state)
    again.set_epoch(4)
    assert not difference([list(again), list(again)], true)
    again.load_state_dict(state)
    again.set_epoch(5)
    with pytest.raises(ValueError, match=r"is of epoch 4, and set_epoch\(5\) was called since"):
        iter(again)
    again.load_state_dict({})
    again.load_state_dict(loader.state_dict())
    again.set_epoch(5)
    assert not difference(list(again), true[1])


def test_what_is_taken_back_leaves_no_epoch_behind(of_rank: Ranks) -> None:
    with in_group(1, 2):
        loader = of_rank(2, 1, seed=5)
        states = [loader.state_dict()]
        for _ in range(3):
            next(iter(loader))
            states.append(loader.state_dict())
        again, fresh = of_rank(2, 1, seed=5), of_rank(2, 1, seed=5)
        again.load_state_dict(states[3])
        again.load_state_dict(states[2])
        again.load_state_dict({})
        assert not difference(list(again), list(fresh))


def test_a_group_that_is_initialised_after_the_loader_is_made(of_rank: Ranks) -> None:
    torch.manual_seed(7)
    loader, again = (
        DALILoader(of_rank.dataset, 2, shuffle=True, distributed="auto", seed=5, **of_rank.own) for _ in "12"
    )
    with in_group(1, 2):
        before = loader.state_dict()
        true = list(loader)
        again.load_state_dict(before)
        assert not difference(list(again), true)


def test_the_state_of_another_rank_is_the_place_in_its_own_share(of_rank: Ranks) -> None:
    """As frameworks need it that save on rank 0 alone."""
    ranks: list[DALILoader[Any]] = []
    for rank in range(2):
        with in_group(rank, 2):
            ranks.append(of_rank(2, rank, seed=5))
    with in_group(1, 2):
        iterators = [iter(loader) for loader in ranks]
        for iterator in iterators:
            next(iterator)
        state = through_files(ranks[0].state_dict())
        true = [list(iterators[1]), list(ranks[1])]
        again = of_rank(2, 1, number=8, seed=5)
        again.load_state_dict(state)
        assert not difference([list(again), list(again)], true)


def test_states_of_other_shares_say_so(of_rank: Ranks) -> None:
    with in_group(1, 2):
        state = of_rank(2, 1).state_dict()
    for world, rank, options, text in (
        (3, 1, {}, "ranks is 2 in the state and 3 here"),
        (2, 1, {"shuffle": False}, "shuffle=True.* and .*shuffle=False"),
        (
            2,
            1,
            {"shuffle": False, "distributed": None},
            "distributed='auto': Dist.* in the state and 'SequentialSampler",
        ),
    ):
        with in_group(rank, world):
            other = of_rank(world, rank, **options)
            with pytest.raises(ValueError, match=text):
                other.load_state_dict(state)
