"""Samplers of one's own whose place is found again: without a length, with a state, with generators made late."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Numbered
from helpers.arguments import NONE, PERSISTENT, TWO, WORKERS
from helpers.proxied import difference
from helpers.resumed import Remembering, RememberingBatches, read, through_files
from torch.utils.data import BatchSampler, SequentialSampler

from torchdali import DALILoader
from torchdali.state import merge

pytestmark = [
    pytest.mark.slow,  # test_state.py has the most common samplers
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

Make = Callable[..., DALILoader[Any]]


@pytest.fixture
def make(pictures: Any, numbered: Numbered) -> Make:
    """Makes a loader of 24 samples; what makes its samplers is called."""
    dataset, own = read(pictures, numbered)

    def loader(number: int = 7, **options: Any) -> DALILoader[Any]:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        made = {key: value() if key in ("sampler", "batch_sampler") else value for key, value in options.items()}
        size = {} if "batch_sampler" in options else {"batch_size": 3}
        return DALILoader(dataset, **{**size, **own, **made})

    return loader


def set_epoch(loader: DALILoader[Any], epoch: int) -> None:
    for sampler in (loader.sampler, loader.batch_sampler):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def assert_goes_on(make: Make, epoch: int, batches: int | None, **options: Any) -> None:
    """A state of this moment leads to the epochs of a loader that went on; ``None`` batches are before the epoch."""
    loader, true = make(**options), []
    for number in range(epoch):
        set_epoch(loader, number)
        list(loader)
    state = through_files(loader.state_dict())
    set_epoch(loader, epoch)
    if batches is not None:
        iterator = iter(loader)
        list(islice(iterator, batches))
        state = through_files(loader.state_dict())
        true.append(list(iterator))
    for number in range(epoch + len(true), 4):
        set_epoch(loader, number)
        true.append(list(loader))
    again, found = make(number=8, **options), []
    again.load_state_dict(state)
    for number in range(epoch, 4):
        set_epoch(again, number)
        found.append(list(again))
    assert all(true)
    assert not difference(found, true)


class NoLength:
    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12).tolist()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_sampler_without_a_length(make: Make, workers: Any) -> None:
    assert "batches" in make(sampler=NoLength).state_dict()["loader"]
    assert_goes_on(make, 1, 2, sampler=NoLength, **workers)


def test_a_copy_counts_its_own_epochs(make: Make) -> None:
    true = list(make(seed=3))
    loader = make(seed=3)
    twin = copy.copy(loader)
    assert not difference(list(twin), true)
    assert not difference(list(loader), true), "an epoch of the copy is none of the loader's"
    assert difference(list(loader), true)


LATE: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "torch's": (lambda: torch.Generator().manual_seed(5), lambda rng: int(torch.randint(12, (1,), generator=rng))),
    "python's": (lambda: random.Random(5), lambda rng: rng.randrange(12)),
    "numpy's": (lambda: np.random.default_rng(5), lambda rng: int(rng.integers(12))),
    "numpy's of old": (lambda: np.random.RandomState(5), lambda rng: int(rng.randint(12))),
}


class Late:
    """A sampler that makes its generator when it is asked for indices, and goes on with it in the next epoch."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rng = kind, None

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        make, draw = LATE[self.kind]
        self.rng = self.rng or make()
        for _ in range(12):
            yield draw(self.rng)


MOMENTS = [(0, None), (0, 0), (0, 2), (1, None), (1, 0), (1, 2)]
moments = pytest.mark.parametrize(("epoch", "batches"), MOMENTS)


@pytest.mark.parametrize(
    ("kind", "epoch", "batches"),
    [(kind, *MOMENTS[(2 * i + j) % 6]) for i, kind in enumerate(LATE) for j in (0, 1, 5)],
)
def test_a_generator_that_a_sampler_makes_late(make: Make, kind: str, epoch: int, batches: int | None) -> None:
    loader = make(sampler=lambda: Late(kind))
    drawn = [[labels.tolist() for _, labels in loader] for _ in range(2)]
    assert drawn[0] != drawn[1], "the second epoch is told by the generator's state alone"
    assert_goes_on(make, epoch, batches, sampler=lambda: Late(kind))


def test_a_late_generator_that_the_system_seeds(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the epoch that makes it, its first state is unknown. Later epochs begin with a state that was saved."""
    kind = "numpy's"
    monkeypatch.setitem(LATE, kind, (np.random.default_rng, LATE[kind][1]))
    loader = make(sampler=lambda: Late(kind))
    iterator = iter(loader)
    next(iterator)
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(RuntimeError, match=r"must make sampler\.rng with the same state again"):
        loader.state_dict()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert len(list(iterator)) == 12 / loader.batch_size - 1, "the epoch goes on"
    iterator = iter(loader)
    next(iterator)
    again = make(sampler=lambda: Late(kind))
    again.load_state_dict(loader.state_dict())
    assert [labels.tolist() for _, labels in again] == [labels.tolist() for _, labels in iterator]


def test_a_late_generator_that_torchs_seeds(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again from the same state of torch's generator."""

    def seeded() -> random.Random:
        return random.Random(int(torch.randint(2**40, ())))

    monkeypatch.setitem(LATE, "python's", (seeded, LATE["python's"][1]))
    assert_goes_on(make, 0, 2, sampler=lambda: Late("python's"))


@pytest.mark.parametrize(
    ("epoch", "batches", "workers"), [(*moment, (NONE, TWO)[i % 2]) for i, moment in enumerate(MOMENTS)]
)
def test_accelerates_sampler(make: Make, workers: Any, epoch: int, batches: int | None) -> None:
    loading = pytest.importorskip("accelerate.data_loader", reason="needs accelerate")
    sampler = partial(loading.SeedableRandomSampler, range(24), data_seed=4)
    assert make(sampler=sampler).state_dict()["loader"]["sampler"].startswith("SeedableRandomSampler")
    assert_goes_on(make, epoch, batches, sampler=sampler, **workers)


def torchdatas() -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader.sampler", reason="needs torchdata")
    return stateful.StatefulDistributedSampler(range(24), num_replicas=2, rank=1, shuffle=True)


class Live:
    """A sampler that goes on to change what it said, and what it was told, of its state."""

    def __init__(self) -> None:
        self.known, self.start = {"given": 0, "order": torch.randperm(12).tolist()}, 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        first, self.start = self.start, 0
        for self.known["given"] in range(first + 1, 13):
            yield self.known["order"][self.known["given"] - 1]

    def state_dict(self) -> dict[str, Any]:
        return self.known

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known, self.start = state, state["given"]


WITH_A_STATE: dict[str, dict[str, Any]] = {
    "sampler": {"sampler": lambda: Remembering(12)},
    "batch sampler": {"batch_sampler": lambda: RememberingBatches(6)},
    "one by one": {"sampler": lambda: Remembering(12), "batch_size": None},
    "torchdata's": {"sampler": torchdatas},
    "of one object": {"sampler": Live},
}


@pytest.mark.parametrize(
    ("kind", "workers", "moment"),
    [
        (kind, workers, MOMENTS[(i + 2 * j) % 6])
        for i, kind in enumerate(WITH_A_STATE)
        for j, workers in enumerate((NONE, TWO, PERSISTENT))
    ],
)
def test_a_sampler_with_a_state(make: Make, kind: str, workers: Any, moment: tuple[int, int | None]) -> None:
    """Its state after an epoch, from which nothing comes, is that before the next one."""
    options = WITH_A_STATE[kind]
    loader = make(**options)
    list(loader)
    (state,) = (about["state"] for about in loader.state_dict()["samplers"].values())
    assert state.get("given", state.get("yielded")) in (6, 12), "all of an epoch"
    assert_goes_on(make, *moment, **options, **workers)


class Shuffling:
    """A sampler that draws from a global generator that is not torch's."""

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self.shuffle = shuffle

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        self.shuffle(order)
        yield from order


SHUFFLES = {"python": random.shuffle, "numpy": np.random.shuffle}


@pytest.mark.parametrize(
    ("kind", "workers", "moment"),
    [(("python", "numpy")[i % 2], (NONE, TWO)[i > 3], moment) for i, moment in enumerate(MOMENTS)],
)
def test_a_sampler_that_was_not_asked_yet(make: Make, kind: str, workers: Any, moment: tuple[int, int | None]) -> None:
    """What it will draw from is not known, and is in the state all the same."""
    loader = make(sampler=lambda: Shuffling(SHUFFLES[kind]))
    assert set(loader.state_dict()["generators"]) == {"torch", "python", "numpy"}
    list(loader)
    assert set(loader.state_dict()["generators"]) == {"torch", kind}
    assert_goes_on(make, *moment, sampler=lambda: Shuffling(SHUFFLES[kind]), **workers)


def test_a_sampler_that_draws_from_torch_beside_a_generator(make: Make) -> None:
    loader = make(sampler=NoLength, generator=torch.Generator().manual_seed(7))
    again = make(number=8, sampler=NoLength, generator=torch.Generator().manual_seed(8))
    state = through_files(loader.state_dict())
    true = list(loader)
    again.load_state_dict(state)
    assert not difference(list(again), true)


class Doubled(BatchSampler):
    """Gives each batch twice."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch
            yield batch


def test_a_batch_sampler_derived_from_torchs(make: Make) -> None:
    assert_goes_on(make, 0, 3, batch_sampler=lambda: Doubled(SequentialSampler(range(24)), 3, False))


class Growing:
    """A batch sampler with a batch more in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3 + self.epoch

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            yield [self.epoch, number]


@moments
def test_a_length_that_depends_on_the_epoch(make: Make, epoch: int, batches: int | None) -> None:
    assert len(make(batch_sampler=Growing)) == 3
    assert_goes_on(make, epoch, batches, batch_sampler=Growing)


def test_a_state_that_is_refused_leaves_the_epoch(make: Make) -> None:
    other = make(batch_sampler=Growing, seed=3)
    other.batch_sampler.set_epoch(2)
    loader = make(batch_sampler=Growing)
    loader.batch_sampler.set_epoch(1)
    with pytest.raises(ValueError, match=r"seed is 3 in the state and None here$"):
        loader.load_state_dict(other.state_dict())
    assert loader.batch_sampler.epoch == 1
    assert len(list(loader)) == 4


@pytest.mark.parametrize("what", [None, [], 3, "loader.pt"])
def test_what_is_no_state(make: Make, what: Any) -> None:
    loader = make()
    with pytest.raises(TypeError, match=f"dictionary that state_dict.* returned, got {type(what).__name__};"):
        loader.load_state_dict(what)
    with pytest.raises(TypeError, match="dictionary that state_dict"):
        merge([what])
    assert loader.state_dict()["batches"] == 0


def test_states_to_be_merged_are_a_list(make: Make) -> None:
    state = make().state_dict()
    with pytest.raises(TypeError, match=r"a list with the states of all ranks, got one state"):
        merge(state)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="a list with the states of all ranks, got an empty one"):
        merge([])
    with pytest.raises(ValueError, match=r"got version None; no DALILoader saved it"):
        make().load_state_dict({"_num_yielded": 3})
    assert state["version"] == 1


@pytest.mark.parametrize("options", [{}, {"batch_sampler": Growing}], ids=["counted", "the sampler's"])
def test_an_epoch_that_is_set_after_loading(make: Make, options: Any) -> None:
    loader = make(seed=3, **options)
    list(loader)
    again = make(seed=3, **options)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(4)
    state = through_files(again.state_dict())
    another = make(seed=3, number=8, **options)
    another.load_state_dict(state)
    assert not difference(list(another), list(again))


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_integers_of_other_kinds(make: Make, kind: Any) -> None:
    true, loader = make(seed=3), make(seed=kind(3))
    for one, epoch in (true, 5), (loader, kind(5)):
        one.set_epoch(epoch)
    assert through_files(loader.state_dict()) == through_files(true.state_dict())
    assert not difference(list(loader), list(true))
    with pytest.raises(TypeError, match=r"^seed must be an int, got 3\.5$"):
        make(seed=3.5)
