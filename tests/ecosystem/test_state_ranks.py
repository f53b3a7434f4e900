"""A loader of one of several ranks resumes from its state."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Numbered
from helpers.arguments import WORKERS
from helpers.cover import cover_pairs
from helpers.proxied import difference
from helpers.resumed import KINDS, Ranks, in_group, through_files

from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


NATIVE_OR_FED = ["read", "asked"]


@pytest.fixture
def of_rank(request: pytest.FixtureRequest, pictures: Path, numbered: Numbered) -> Ranks:
    return Ranks(KINDS[getattr(request, "param", "read")](pictures, numbered))


@pytest.mark.parametrize(
    ("of_rank", "workers", "batches"), cover_pairs(NATIVE_OR_FED, WORKERS, [None, 0, 3]), indirect=["of_rank"]
)
def test_a_share_resumes(of_rank: Ranks, workers: Any, batches: int | None) -> None:
    """In its second epoch, or before the third."""
    with in_group(1, 2):
        loader = of_rank(2, 1, seed=5, **workers)
        list(loader)
        iterator = iter(loader)
        list(islice(iterator, batches))
        state = through_files(loader.state_dict())
        true = [list(iterator), list(loader), list(loader)][batches is None :]
        again = of_rank(2, 1, number=8, seed=5, **workers)
        again.load_state_dict(state)
        assert not difference([list(again) for _ in true], true)
        assert loader.sampler.epoch == again.sampler.epoch == 3  # pyright: ignore


@pytest.mark.parametrize("of_rank", NATIVE_OR_FED, indirect=True)
def test_a_share_resumes_after_set_epoch(of_rank: Ranks) -> None:
    with in_group(1, 2):
        loader = of_rank(2, 1, seed=5)
        loader.set_epoch(4)
        iterator = iter(loader)
        next(iterator)
        within = loader.state_dict()
        true = [list(iterator), list(loader)]
        between = loader.state_dict()
        true.append(list(loader))
        for epoch, state, rest in ((4, within, true), (6, between, true[2:])):
            assert state["samplers"]["sampler"]["epoch"] == epoch
            again = of_rank(2, 1, number=8, seed=5)
            again.load_state_dict(state)
            again.set_epoch(epoch)
            assert not difference([list(again) for _ in rest], rest)
        again.load_state_dict(within)
        again.set_epoch(5)
        with pytest.raises(ValueError, match=r"must be 4 as in the loaded state, got sampler.set_epoch\(5\)"):
            iter(again)
        again.load_state_dict(between)
        again.set_epoch(5)
        assert not difference(list(again), true[1]), "an epoch that has not begun may be another"


def test_a_loader_without_ranks_resumes_after_set_epoch(of_rank: Ranks) -> None:
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
    with pytest.raises(ValueError, match=r"must be 4 as in the loaded state, got set_epoch\(5\)"):
        iter(again)
    again.load_state_dict({})
    again.load_state_dict(loader.state_dict())
    again.set_epoch(5)
    assert not difference(list(again), true[1])


def test_an_empty_state_undoes_a_load(of_rank: Ranks) -> None:
    with in_group(1, 2):
        loader = of_rank(2, 1, seed=5)
        for _ in range(3):
            next(iter(loader))
        again, fresh = of_rank(2, 1, seed=5), of_rank(2, 1, seed=5)
        again.load_state_dict(loader.state_dict())
        again.load_state_dict({})
        assert not difference(list(again), list(fresh))


def test_a_state_from_before_the_group_was_initialised_resumes(of_rank: Ranks) -> None:
    torch.manual_seed(7)
    loader, again = (
        DALILoader(of_rank.dataset, 2, shuffle=True, distributed="auto", seed=5, **of_rank.own) for _ in "12"
    )
    with in_group(1, 2):
        before = loader.state_dict()
        true = list(loader)
        again.load_state_dict(before)
        assert not difference(list(again), true)


@pytest.mark.parametrize("of_rank", NATIVE_OR_FED, indirect=True)
def test_a_rank_resumes_its_share_from_the_state_of_another(of_rank: Ranks) -> None:
    """Some frameworks save on rank 0 alone."""
    with in_group(0, 2):
        first = of_rank(2, 0, seed=5)
        next(iter(first))
        state = through_files(first.state_dict())
    with in_group(1, 2):
        second, again = of_rank(2, 1, seed=5), of_rank(2, 1, number=8, seed=5)
        iterator = iter(second)
        next(iterator)
        again.load_state_dict(state)
        assert not difference([list(again), list(again)], [list(iterator), list(second)])


@pytest.mark.parametrize(
    ("world", "options", "text"),
    [
        (3, {}, "ranks is 2 in the state and 3 here"),
        (2, {"shuffle": False}, "shuffle=True.* and .*shuffle=False"),
        (2, {"distributed": None}, "distributed='auto': Dist.* in the state and 'RandomSampler"),
    ],
)
def test_a_state_of_another_share_is_refused(of_rank: Ranks, world: int, options: Any, text: str) -> None:
    with in_group(1, 2):
        state = of_rank(2, 1).state_dict()
    with in_group(1, world):
        other = of_rank(world, 1, **options)
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(state)
