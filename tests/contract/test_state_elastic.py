"""What N ranks began, M ranks end: every sample of the epoch once, looking as it would have."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Numbered
from helpers.arguments import NONE, PERSISTENT, TWO
from helpers.forked_ranks import run_ranks
from helpers.proxied import difference
from helpers.regrouped import BATCH, BATCHES, COUNT, MOST, Seen
from helpers.resumed import KINDS, Ranks, in_group, through_files
from torch.utils.data import BatchSampler, DistributedSampler

from torchdali import DALILoader
from torchdali.state import merge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
PAIRS = list(product(range(1, MOST + 1), repeat=2))


# Processes


@pytest.fixture(scope="module")
def found(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, list[Seen]]]:
    """What each of two processes saw."""
    folder = tmp_path_factory.mktemp("regrouped")
    run_ranks("regrouped.py", *((folder, number, pictures) for number in range(MOST)), limit=110)
    return [torch.load(folder / f"seen by {number}") for number in range(MOST)]


def all_of(ranks: list[Seen]) -> Counter[tuple[int, str]]:
    return Counter(chain.from_iterable(chain.from_iterable(ranks)))


@pytest.mark.parametrize(("before", "ranks"), PAIRS)
def test_every_remaining_sample_comes_once_and_looks_as_it_would_have(found: Any, before: int, ranks: int) -> None:
    _, begun, _, following = (all_of([each[before][part] for each in found[:before]]) for part in range(4))
    _, alone, rest, next_alone = (all_of([found[0][1][part]]) for part in range(4))
    whole = alone + rest
    assert len(whole) == COUNT
    assert set(begun) <= set(whole), "a picture looks the same for any number of ranks"
    ended = [each[before, ranks][0] for each in found[:ranks]]
    assert len({len(batches) for batches in ended}) == 1, "all ranks have as many batches"
    total = begun + all_of(ended)
    padding = total - whole
    left = COUNT - BATCH * BATCHES * before
    assert whole - total == Counter(), "nothing is lost"
    assert padding.total() == -left % ranks
    assert set(padding) <= set(whole)
    if before == ranks:
        assert ended == [each[before][2] for each in found[:ranks]], "as without an interruption"
    assert set(following) == set(next_alone)
    assert [each[before, ranks][1] for each in found[:ranks]] == [each[ranks][3] for each in found[:ranks]]


# In one process


def interrupted(
    of_rank: Ranks, ranks: int, batches: int, **options: Any
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """The state of all ranks in the midst of an epoch; what they had, and what they would have had."""
    states, begun, rest = [], [], []
    for rank in range(ranks):
        with in_group(rank, ranks):
            loader = of_rank(ranks, rank, **options)
            list(loader)
            iterator = iter(loader)
            begun.append(list(islice(iterator, min(batches, len(loader)))))
            states.append(loader.state_dict())
            rest.append([list(iterator), list(loader)])
    return through_files(merge(reversed(states))), begun, rest


def resumed(of_rank: Ranks, ranks: int, state: dict[str, Any], epochs: int = 2, **options: Any) -> list[Any]:
    found: list[Any] = []
    for rank in range(ranks):
        with in_group(rank, ranks):
            loader = of_rank(ranks, rank, number=8 + rank, **options)
            loader.load_state_dict(state)
            found.append([list(loader) for _ in range(epochs)])
    return found


def looks(ranks: list[Any]) -> Counter[Any]:
    """How often each sample came, by its label and its bytes."""
    return Counter(
        (label, image.numpy().tobytes())
        for batches in ranks
        for images, labels in batches
        for image, label in zip(images, labels.tolist(), strict=True)
    )


NATIVE_OR_FED = ["read", "asked"]


@pytest.fixture(params=NATIVE_OR_FED)
def of_rank(request: pytest.FixtureRequest, pictures: Path, numbered: Numbered) -> Ranks:
    return Ranks(KINDS[request.param](pictures, numbered))


@pytest.mark.parametrize(
    ("of_rank", "workers", "seed"),
    [("read", NONE, 5), ("asked", TWO, None), ("asked", PERSISTENT, 5)],
    indirect=["of_rank"],
)
def test_as_many_ranks_go_on_as_if_nothing_had_happened(of_rank: Ranks, workers: Any, seed: int | None) -> None:
    state, _, rest = interrupted(of_rank, 2, 2, seed=seed, **workers)
    assert not difference(resumed(of_rank, 2, state, seed=seed, **workers), rest)


def test_as_many_ranks_with_seeds_of_their_own(of_rank: Ranks) -> None:
    def states_and_rest() -> Iterator[tuple[Any, Any]]:
        for rank in range(2):
            with in_group(rank, 2):
                loader = of_rank(2, rank, number=rank)
                iterator = iter(loader)
                next(iterator)
                yield loader.state_dict(), [list(iterator), list(loader)]

    states, rest = zip(*states_and_rest(), strict=True)
    state = through_files(merge(states))
    assert not difference(resumed(of_rank, 2, state), list(rest))
    with (
        in_group(2, 3),
        pytest.raises(
            ValueError,
            match=r"2 ranks with different random numbers must be loaded on as many ranks, got 3; .* give seed=",
        ),
    ):
        of_rank(3, 2).load_state_dict(state)


def test_a_seed_is_all_that_ranks_must_agree_on(of_rank: Ranks) -> None:
    states, begun = [], []
    for rank in range(2):
        with in_group(rank, 2):
            loader = of_rank(2, rank, number=rank, seed=5)
            begun.append([next(iter(loader))])
            states.append(loader.state_dict())
    ended = resumed(of_rank, 3, merge(states), seed=5)
    with in_group(0, 1):
        whole, following = ([list(loader)] for loader in [of_rank(1, 0, seed=5)] * 2)
    assert set(looks([batches for batches, _ in ended]) + looks(begun)) == set(looks(whole))
    assert set(looks([batches for _, batches in ended])) == set(looks(following))


@pytest.mark.parametrize(
    ("of_rank", "worlds", "options"),
    [
        ("read", (2, 3), {}),
        ("asked", (3, 1), {"num_workers": 1}),
        ("asked", (2, 3), {**PERSISTENT, "num_workers": 1}),
    ],
    indirect=["of_rank"],
)
def test_ranks_that_change_twice(of_rank: Ranks, worlds: tuple[int, int], options: Any) -> None:
    """And have another batch size and number of batches each time."""
    first, second = worlds
    options = {"seed": 5, **options}
    state, begun, _ = interrupted(of_rank, first, 1, batch_size=1, **options)
    states, between = [], []
    for rank in range(second):
        with in_group(rank, second):
            loader = of_rank(second, rank, batch_size=2, **options)
            loader.load_state_dict(state)
            between.append([next(iter(loader))])
            states.append(through_files(loader.state_dict()))
            true, again = (of_rank(second, rank, batch_size=2, **options) for _ in range(2))
            true.load_state_dict(state)
            again.load_state_dict(states[-1])
            assert not difference(list(again), list(true)[1:])
    ended = resumed(of_rank, 2, merge(states), batch_size=3, **options)
    with in_group(0, 1):
        loader = of_rank(1, 0, **options)
        list(loader)
        whole = looks([list(loader)])
    seen = looks(begun) + looks(between) + looks([batches for batches, _ in ended])
    assert set(seen) == set(whole)
    left = len(of_rank.dataset) - first - 2 * second
    assert (seen - whole).total() == -left % 2


@pytest.mark.parametrize(
    ("of_rank", "before", "drop_last", "batches"),
    [("read", 2, False, 0), ("asked", 5, True, 1), ("read", 2, True, 3), ("asked", 5, False, 4), ("read", 5, False, 1)],
    indirect=["of_rank"],
)
def test_what_does_not_divide(of_rank: Ranks, before: int, drop_last: bool, batches: int) -> None:
    """Is filled up from the epoch's beginning, or left out, as DistributedSampler does it."""
    options = {"seed": 5, "drop_last": drop_last, "batch_size": 2, "shuffle": False}
    state, begun, _ = interrupted(of_rank, before, batches, **options)
    given = len(looks(begun))
    for ranks in (1, 2, 3, 4):
        ended = [batches for (batches,) in resumed(of_rank, ranks, state, epochs=1, **options)]
        assert len({len(batches) for batches in ended}) == 1
        labels = sorted(label for batches in ended for _, of_batch in batches for label in of_batch.tolist())
        left = list(range(min(state["start"], len(of_rank.dataset)), len(of_rank.dataset)))
        if drop_last:
            share = len(left) // ranks // 2 * 2
            assert labels == left[: share * ranks]
        else:
            padding = list(range(-len(left) % ranks))
            assert labels == sorted(left + padding)
            assert given == min(state["start"], len(of_rank.dataset))


def test_between_epochs(of_rank: Ranks) -> None:
    states = []
    for rank in range(2):
        with in_group(rank, 2):
            loader = of_rank(2, rank, seed=5)
            list(loader)
            states.append(loader.state_dict())
    state = merge(states)
    for rank in range(3):
        with in_group(rank, 3):
            true = of_rank(3, rank, seed=5)
            true.set_epoch(1)
            again = of_rank(3, rank, seed=5)
            again.load_state_dict(state)
            assert len(again) == len(true)
            assert not difference([list(again), list(again)], [list(true), list(true)])


def test_between_epochs_with_seeds_of_their_own(pictures: Path, numbered: Numbered) -> None:
    """Of which nothing is left then for other ranks to agree on."""
    of_rank, states = Ranks(KINDS["read"](pictures, numbered)), []
    for rank in range(2):
        with in_group(rank, 2):
            loader = of_rank(2, rank, number=rank, num_workers=1, persistent_workers=True)
            list(loader)
            states.append(loader.state_dict())
    ended = resumed(of_rank, 3, merge(states), epochs=1, num_workers=1, persistent_workers=True)
    assert sorted(label for (batches,) in ended for _, labels in batches for label in labels.tolist()) == [*range(24)]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "one by one"])
def test_a_distributed_sampler_that_was_given(pictures: Path, numbered: Numbered, kind: str) -> None:
    dataset, own = KINDS["read"](pictures, numbered)

    def make(rank: int, ranks: int) -> DALILoader[Any]:
        sampler = DistributedSampler(dataset, ranks, rank, seed=3)
        sampler.set_epoch(1)
        options: dict[str, Any] = {
            "sampler": {"sampler": sampler, "batch_size": 2},
            "batch_sampler": {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)},
            "one by one": {"sampler": sampler, "batch_size": None},
        }[kind]
        return DALILoader(dataset, seed=5, **options, **own)

    def labels_of(batches: Any) -> list[int]:
        return [int(label) for _, labels in batches for label in torch.as_tensor(labels).view(-1)]

    states, seen = [], []
    for rank in range(3):
        loader = make(rank, 3)
        seen += labels_of(islice(loader, 3))
        states.append(loader.state_dict())
    for rank in range(2):
        loader = make(rank, 2)
        loader.load_state_dict(merge(states))
        seen += labels_of(loader)
    repeated = Counter(seen) - Counter(range(len(dataset)))
    assert set(seen) == set(range(len(dataset)))
    assert repeated.total() == (1 if kind == "one by one" else 0), "15 and 6 are left"


# Refusals


class Derived(DistributedSampler[Any]):
    """May deal in another way."""


def test_states_that_do_not_belong_together(of_rank: Ranks) -> None:
    states = []
    for rank in range(2):
        with in_group(rank, 2):
            loader = of_rank(2, rank, seed=5)
            list(islice(loader, 2))
            states.append(loader.state_dict())
    alone = DALILoader(of_rank.dataset, 2, **of_rank.own).state_dict()
    own = DALILoader(of_rank.dataset, 2, sampler=Derived(of_rank.dataset, 1, 0), **of_rank.own)
    of_own = own.state_dict()
    ahead = copy.deepcopy(states[1]) | {"batches": 3, "asked": 3}
    for given, text in (
        ([], "a list with the states of all ranks, got an empty one"),
        (states[:1], r"must be of ranks 0 to 1, one of each, got ranks \[0\]"),
        (states[1:], r"got ranks \[1\]"),
        ([*states, states[0]], r"got ranks \[0, 0, 1\]"),
        ([states[0], ahead], "batches is 2 on rank 0 and 3 on rank 1"),
        ([states[0], {**states[1], "epoch": 9}], "epoch is 0 on rank 0 and 9 on rank 1"),
        ([states[0], {**states[1], "begun": False}], "begun is True on rank 0 and False on rank 1"),
        ([states[0], {**states[1], "start": 4}], "start is 0 on rank 0 and 4 on rank 1"),
        ([states[0], {**states[1], "samplers": {}}], "samplers is .* on rank 0 and {} on rank 1"),
        ([states[0], {**states[1], "loader": {**states[1]["loader"], "seed": 6}}], "loader is .* on rank 0 and .* on"),
        ([of_own], "must be of one rank"),
        ([alone], "must be of one rank, got one without a rank; save it from a loader with distributed='auto'"),
        ([merge(states)], "must be of one rank"),
        ([{**states[0], "version": 9}, states[1]], "got version 9"),
    ):
        with pytest.raises(ValueError, match=text):
            merge(given)


def test_states_of_all_ranks_are_for_loaders_that_share_alike(of_rank: Ranks) -> None:
    state, _, _ = interrupted(of_rank, 2, 1, seed=5)
    for options, text in (
        ({"seed": 6}, "seed is 5 in the state and 6 here"),
        ({"seed": 5, "shuffle": False}, "shuffle=True.*shuffle=False"),
        ({"seed": 5, "distributed": None}, "'RandomSampler"),
        ({"seed": 5, "drop_last": True}, "drop_last"),
    ):
        with in_group(0, 3), pytest.raises(ValueError, match=text):
            of_rank(3, 0, **options).load_state_dict(state)


def test_refusals_say_what_helps(of_rank: Ranks) -> None:
    with in_group(0, 2):
        own = of_rank(2, 0).state_dict()
    with (
        in_group(0, 3),
        pytest.raises(ValueError, match=r"can load the result of torchdali\.state\.merge of all 2 ranks"),
    ):
        of_rank(3, 0).load_state_dict(own)
    with in_group(0, 1):
        state = merge([of_rank(1, 0).state_dict()])
    alone: DALILoader[Any] = DALILoader(of_rank.dataset, 2, shuffle=True, distributed="auto", **of_rank.own)
    assert "ranks" not in alone.state_dict()["loader"]
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group before; a single process"):
        alone.load_state_dict(state)
