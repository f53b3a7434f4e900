"""When a state may be taken and loaded, what it is refused for, and which samplers and generators it knows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arguments import NONE, PERSISTENT, TWO
from helpers.proxied import difference
from helpers.resumed import KINDS, Asked, Remembering, read, through_files
from torch.utils.data import Dataset, DistributedSampler, RandomSampler

from torchdali import DALILoader
from torchdali.state.generators import to_text

pytestmark = [
    pytest.mark.slow,  # test_state.py has the most common moment
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

State = dict[str, Any]


class Quiet(Dataset[Any]):
    """Draws nothing."""

    def __init__(self, dataset: Asked) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            kept = random.getstate(), np.random.get_state()  # noqa: NPY002
            sample = self.dataset[index]
            random.setstate(kept[0])
            np.random.set_state(kept[1])  # noqa: NPY002
        return sample


MAKES = [
    *KINDS,
    *(pytest.param(f"{kind} cuda", id=f"{kind} cuda", marks=pytest.mark.gpu) for kind in ("read", "asked")),
]
# Each kind of dataset, each kind of workers. What else a test varies goes along.
ROWS: list[Any] = [
    *(("read", NONE), ("asked", NONE), ("plain", PERSISTENT), ("plain", NONE)),
    pytest.param("asked", TWO, marks=pytest.mark.slow),
    *(pytest.param(*row, marks=pytest.mark.gpu) for row in (("read cuda", NONE), ("asked cuda", TWO))),
]
rows = pytest.mark.parametrize(("make", "workers"), ROWS, indirect=["make"])


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest, pictures: Any, numbered: Any) -> Callable[..., DALILoader[Any]]:
    """Makes a loader of 12 or 24 samples in batches of 3, shuffled."""
    kind, *device = request.param.split()
    dataset, own = KINDS[kind](pictures, numbered)
    own = {**own, "device": device[0]} if device else own
    if isinstance(dataset, Asked):
        dataset = Quiet(dataset)

    def loader(number: int = 7, **options: Any) -> DALILoader[Any]:
        torch.manual_seed(number)
        shuffle = {} if {"sampler", "batch_sampler"} & options.keys() else {"shuffle": True}
        size = {} if "batch_sampler" in options else {"batch_size": 3}
        return DALILoader(dataset, **{**size, **shuffle, **own, **options})

    return loader


def loaded(make: Any, state: State, **options: Any) -> DALILoader[Any]:
    loader = make(number=8, **options)
    loader.load_state_dict(through_files(state))
    return loader


def epochs(loader: DALILoader[Any], count: int = 3) -> list[Any]:
    return [list(loader) for _ in range(count)]


# Moments


@rows
def test_between_epochs(make: Any, workers: Any) -> None:
    loader = make(**workers)
    first = loader.state_dict()
    true = epochs(loader, 2)
    second = loader.state_dict()
    assert not second["begun"]
    true += epochs(loader, 1)
    assert not difference(epochs(loaded(make, first, **workers)), true)
    assert not difference(epochs(loaded(make, second, **workers), 1), true[2:])
    assert difference(epochs(make(number=8, **workers)), true)


@rows
def test_before_the_first_batch_and_after_the_last(make: Any, workers: Any) -> None:
    loader = make(**workers)
    list(loader)
    iterator = iter(loader)
    begun = loader.state_dict()
    batches = [next(iterator) for _ in range(len(loader))]
    ended = loader.state_dict()
    assert (begun["batches"], ended["batches"]) == (0, len(loader))
    assert next(iterator, None) is None
    true = epochs(loader, 2)
    assert not difference(epochs(loaded(make, begun, **workers)), [batches, *true])
    assert not difference(epochs(loaded(make, ended, **workers)), [[], *true])


@rows
def test_each_batch_of_an_epoch(make: Any, workers: Any) -> None:
    loader = make(**workers)
    states, batches = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    assert [state["batches"] for state in states] == list(range(1, len(loader) + 1))
    again = make(number=8, **workers)
    for state in reversed(states):
        again.load_state_dict(state)
        rest = [(batch, again.state_dict()["batches"]) for batch in again]
        assert not difference([batch for batch, _ in rest], batches[state["batches"] :])
        assert [count for _, count in rest] == list(range(state["batches"] + 1, len(loader) + 1))


@rows
def test_after_a_break(make: Any, workers: Any) -> None:
    """The rest is what would have come, the epochs after it too."""
    own_generator = workers is NONE

    def with_generator(number: int, **options: Any) -> DALILoader[Any]:
        generator = torch.Generator().manual_seed(number) if own_generator else None
        return make(number=number, generator=generator, **options)

    true = epochs(with_generator(7, **workers))
    loader = with_generator(7, **workers)
    for _ in zip(range(2), loader, strict=False):
        pass
    state = loader.state_dict()
    again = with_generator(8, **workers)
    again.load_state_dict(state)
    assert not difference(epochs(again), [true[0][2:], *true[1:]])


@pytest.mark.parametrize("workers", [TWO])
def test_where_the_consumer_draws_before_the_sampler_does(make: Any, workers: Any) -> None:
    loader = make(**workers)
    iterator = iter(loader)
    torch.rand(5)
    list(islice(iterator, 2))
    state = loader.state_dict()
    true = [list(iterator), *epochs(loader, 2)]
    assert not difference(epochs(loaded(make, state, **workers)), true)


def test_of_a_state_that_goes_on(make: Any) -> None:
    true = list(make())
    loader = make()
    for seen, batch in enumerate(true):
        assert not difference(next(iter(loader)), batch)
        state = loader.state_dict()
        assert state["batches"] == seen + 1
        loader = loaded(make, state)
        assert loader.state_dict() == state
    assert list(loader) == []


def test_loading_again_replaces_and_nothing_takes_back(make: Any) -> None:
    loader = make(number=5)
    iterator = iter(loader)
    states, batches = [], []
    for batch in iterator:
        batches.append(batch)
        states.append(loader.state_dict())
    loader.load_state_dict(states[2])
    loader.load_state_dict(states[0])
    assert not difference(list(loader), batches[1:])
    torch.manual_seed(5)
    loader.load_state_dict(states[1])
    loader.load_state_dict({})
    assert len(list(loader)) == len(batches)


@pytest.mark.parametrize("workers", [NONE, TWO])
def test_of_the_iterator_that_was_begun_last(make: Any, workers: Any) -> None:
    loader = make(**workers)
    one, other = iter(loader), iter(loader)
    for _ in range(3):
        next(one)
    next(other)
    state = loader.state_dict()
    assert state["batches"] == 1
    rest = list(other)
    assert not difference(list(loaded(make, state, **workers)), rest)


OTHER = {"num_workers": 1, "prefetch_factor": 5}


@pytest.mark.parametrize(
    ("make", "saved", "other"),
    [("read", NONE, OTHER), ("read", TWO, {}), ("asked", TWO, OTHER), ("asked", NONE, OTHER), ("plain", TWO, {})],
    indirect=["make"],
)
def test_with_another_number_of_workers_and_window(make: Any, saved: Any, other: Any) -> None:
    loader = make(**saved)
    iterator = iter(loader)
    list(islice(iterator, 2))
    state = loader.state_dict()
    true = [list(iterator), *epochs(loader, 2)]
    assert not difference(epochs(loaded(make, state, **other)), true)


# Refusals


def refused(make: Any, text: str, state: State | None = None, **options: Any) -> bool:
    """Whether a state is refused with these words, and nothing was loaded."""
    state = state or make().state_dict()
    other = make(**options)
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    return len(list(other)) == len(other)


def test_states_of_other_loaders_are_refused(make: Any) -> None:
    assert refused(make, "batch_size is 3 in the state and 4 here", batch_size=4)
    assert refused(make, "drop_last is False in the state and True here", drop_last=True)
    assert refused(make, r"RandomSampler\(.*' in the state and 'SequentialSampler", shuffle=False)
    assert refused(make, "seed is None in the state and 5 here", seed=5)
    assert refused(make, "persistent_workers is False", num_workers=1, persistent_workers=True)
    assert refused(make, "batches is . in the state and 2 here", batch_sampler=[[0], [1]])
    for name, one, other in (
        ("replacement=.*num_samples=12", RandomSampler(range(12)), RandomSampler(range(12), True, 12)),
        ("seed=1, .* and .*seed=2, ", Derived(range(12), 2, 1, seed=1), Derived(range(12), 2, 1, seed=2)),
        (
            "got none for sampler.generator; give them",
            RandomSampler(range(12), generator=torch.Generator()),
            RandomSampler(range(12)),
        ),
    ):
        assert refused(make, name, make(sampler=one).state_dict(), sampler=other)


class Derived(DistributedSampler[Any]):
    pass


def test_states_of_other_datasets_and_versions_are_refused(pictures: Any, numbered: Any) -> None:
    def make(count: int = 24, **options: Any) -> DALILoader[Any]:
        dataset, own = read(pictures, numbered)
        dataset.samples = dataset.samples[:count]
        return DALILoader(dataset, 3, **own, **options)

    assert refused(make, "dataset is 24 in the state and 20 here", count=20)
    state = make().state_dict()
    assert refused(make, "of version 1, got version 2", {**state, "version": 2})
    assert refused(make, "version None", {"_num_yielded": 3})
    assert refused(
        make, "the state is damaged, or no DALILoader saved it.*asked", {k: v for k, v in state.items() if k != "asked"}
    )
    assert refused(make, "damaged", {**state, "generators": {"torch": "?"}})
    given = make(generator=torch.Generator()).state_dict()
    assert refused(make, "all generators of the state, got none for generator;", given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("asked", 10**12), ("asked", 0), ("worker", 10**12), ("batches", 10**6), ("batches", -1), ("batches", "x")),
        *(("epoch", None), ("start", 3), ("samplers", []), ("samplers", {"sampler": {"epoch": "x"}}), ("loader", "x")),
        *(("begun", 1), ("over", True), ("base_seed", 2**64), ("draws", [3]), ("workers", [[0, 1]]), ("of_ranks", [])),
        *(("generators", []), ("generators", {"torch": "AAAA"}), ("generators_at_begin", {"torch": 3})),
    ],
)
def test_a_damaged_state_is_refused_before_anything_changes(
    pictures: Any, numbered: Any, name: str, value: Any
) -> None:
    """Some of these values would be a loop that takes hours."""
    dataset, own = read(pictures, numbered)
    loader = DALILoader(dataset, 3, shuffle=True, **own)
    if name != "over":
        next(iter(loader))
    state = {**loader.state_dict(), name: value}
    other = DALILoader(dataset, 3, shuffle=True, **own)
    before = other.state_dict()
    with pytest.raises(
        ValueError, match=r"the state is damaged, or no DALILoader saved it|from a loader like this one"
    ):
        other.load_state_dict(state)
    assert not difference(other.state_dict(), before)


def test_no_word_of_a_state_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Remembering):
        rng: Any = None

    def text(bit_generator: str) -> str:
        return to_text(json.dumps({"bit_generator": bit_generator}))

    monkeypatch.setattr(np.random, "test", lambda: pytest.fail("called"))
    sampler = Late(12)
    sampler.rng = None
    loader = DALILoader([*range(12)], 3, sampler=sampler, device="cpu")  # pyright: ignore[reportArgumentType]
    state = {**loader.state_dict(), "generators_at_begin": {"sampler.rng": text("test")}}
    with pytest.raises(ValueError, match=r"the state of the generator sampler\.rng"):
        loader.load_state_dict(state)


def test_order_of_workers_that_nobody_knows_is_refused(pictures: Any, numbered: Any) -> None:
    dataset, own = KINDS["asked"](pictures, numbered)
    loader = DALILoader(dataset, 3, num_workers=2, in_order=False, **own)
    with pytest.raises(ValueError, match="in_order must be True"):
        loader.state_dict()
    state = DALILoader(dataset, 3, num_workers=2, **own).state_dict()
    with pytest.raises(ValueError, match="in_order must be True"):
        loader.load_state_dict(state)


# Samplers


def test_global_generators_that_no_sampler_draws_from_are_the_users(make: Any) -> None:
    loader = make(generator=torch.Generator().manual_seed(1))
    next(iter(loader))
    state = loader.state_dict()
    assert list(state["generators"]) == ["generator"]
    again = make(number=8, generator=torch.Generator())
    again.load_state_dict(state)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore # noqa: NPY002
    list(again)
    assert not difference(
        (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),  # type: ignore # noqa: NPY002
        before,
    )


class Drawing:
    """Draws from torch's global generator for each batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(40):
            yield torch.randint(12, (2,)).tolist()


@pytest.mark.parametrize("workers", [NONE, TWO])
@pytest.mark.parametrize(
    "make", ["read", "plain"], indirect=True
)  # where it does not depend on the time when it is asked
def test_a_sampler_that_shares_its_generator_with_the_consumer(make: Any, workers: Any) -> None:
    loader = make(batch_sampler=Drawing(), **workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    true = list(islice(iterator, 3))
    again = iter(loaded(make, state, batch_sampler=Drawing(), **workers))
    assert not difference(list(islice(again, 3)), true)
    for _ in islice(iterator, 20):
        torch.rand(3)
    with pytest.raises(RuntimeError, match="give the sampler a generator of its own"):
        loader.state_dict()
