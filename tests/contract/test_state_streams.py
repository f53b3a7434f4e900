"""A stream (``IterableDataset``) goes on where it was: by its own state where it has one, else by passing over."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CROP, same
from helpers.arguments import PERSISTENT, TWO
from helpers.proxied import Pictures, difference
from helpers.resumed import through_files
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torchvision.transforms import v2

from torchdali import DALILoader, UnsupportedDatasetError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)])
CHAIN = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip()])


class Bare(IterableDataset[Any]):
    """Gives each worker a part of the pictures, of unequal length, and says how many it made.

    Args:
        files: The pictures.
        transform: What is done with them.
    """

    def __init__(self, files: list[Path], transform: Any) -> None:
        self.pictures = Pictures(files, transform)
        self.made = 0

    def part(self) -> range:
        info = get_worker_info()
        return range(info.id, len(self.pictures), info.num_workers + 1) if info else range(len(self.pictures))

    def sample(self, index: int) -> Any:
        self.made += 1
        return self.pictures[index]["image"], index, self.made

    def __iter__(self) -> Iterator[Any]:
        return (self.sample(index) for index in self.part())


class Stateful(Bare):
    """Knows its place, which it says in an object that goes on to change, and begins anew after its end."""

    def __init__(self, files: list[Path], transform: Any) -> None:
        super().__init__(files, transform)
        self.known = {"at": 0}

    @property
    def at(self) -> int:
        return self.known["at"]

    @at.setter
    def at(self, at: int) -> None:
        self.known["at"] = at

    def __iter__(self) -> Iterator[Any]:
        part = self.part()
        while self.at < len(part):
            self.at += 1
            yield self.sample(part[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return self.known

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known = dict(state)


class Places:
    """An iterator that knows its place."""

    def __init__(self, stream: Bare) -> None:
        self.stream, self.at = stream, 0

    def __iter__(self) -> Places:
        return self

    def __next__(self) -> Any:
        part = self.stream.part()
        if self.at == len(part):
            raise StopIteration
        self.at += 1
        return self.stream.sample(part[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulIterator(Bare):
    def __iter__(self) -> Iterator[Any]:
        return Places(self)


class ItsOwnIterator(Stateful):
    """Is its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return self

    def __next__(self) -> Any:
        part = self.part()
        if self.at == len(part):
            raise StopIteration
        self.at += 1
        return self.sample(part[self.at - 1])


class Counting(Stateful):
    """Counts its epochs, and gives the number as label."""

    epoch = 0

    def sample(self, index: int) -> Any:
        image, label, made = super().sample(index)
        return image, label + 100 * self.epoch, made

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


PLAIN_OR_FED = ["plain", "asked"]
# Every kind without workers, few with them, because forks take time.
ROWS: list[tuple[str, type[Bare], dict[str, Any]]] = [
    *(("plain", Bare, {}), ("asked", Stateful, {}), ("plain", StatefulIterator, {}), ("asked", ItsOwnIterator, {})),
    *(("asked", Bare, TWO), ("plain", Stateful, TWO)),
]
GO_ON = [
    *((make, kind, {"batch_size": 2}, workers) for make, kind, workers in ROWS if (make, workers) != ("asked", TWO)),
    pytest.param("asked", Bare, {"batch_size": 3, "drop_last": True}, TWO, marks=pytest.mark.slow),
    pytest.param("asked", StatefulIterator, {"batch_size": 2}, PERSISTENT, marks=pytest.mark.slow),
    *((make, kind, {"batch_size": None}, {}) for make, kind in (("asked", Bare), ("plain", ItsOwnIterator))),
]


@pytest.fixture(params=PLAIN_OR_FED)
def make(request: pytest.FixtureRequest, pictures: Path) -> Any:
    files = sorted(pictures.rglob("*.jpg"))[:17]

    def build(kind: type[Bare], number: int = 7, **options: Any) -> DALILoader[Any]:
        torch.manual_seed(number)
        if request.param == "plain":
            return DALILoader(kind(files, EXACT), device="cpu", **options)
        return DALILoader(kind(files, None), device="cpu", transform=CHAIN, **options)

    return build


def known(batches: Any) -> list[Any]:
    """Batches without the number of samples that were made."""
    return [batch[:2] for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind", "size", "workers"), GO_ON, indirect=["make"])
def test_goes_on_from_every_batch(make: Any, kind: type[Bare], size: Any, workers: Any) -> None:
    loader = make(kind, **size, **workers)
    first = known(loader)
    assert len(first) >= 3
    states, batches, iterator = [], [], iter(loader)
    states.append(loader.state_dict())
    for batch in iterator:
        batches.append(batch)
        states.append(loader.state_dict())
    true = [known(batches), known(loader), known(loader)]
    for taken in (1, len(batches) - 1):
        again = make(kind, 8, **size, **workers)
        again.load_state_dict(through_files(states[taken]))
        assert not difference([known(again), known(again), known(again)], [true[0][taken:], *true[1:]])


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind", "workers"), ROWS, indirect=["make"])
def test_before_and_after_an_epoch(make: Any, kind: type[Bare], workers: Any) -> None:
    size = {"batch_size": 3, "drop_last": kind is Bare}
    loader = make(kind, **size, **workers)
    states = [loader.state_dict()]
    true = [known(loader)]
    states.append(loader.state_dict())
    true.append(known(loader))
    for number, state in enumerate(states):
        again = make(kind, 8, **size, **workers)
        again.load_state_dict(through_files(state))
        assert not difference([known(again) for _ in true[number:]], true[number:])


def test_the_end_of_an_epoch_counts_for_no_batch(make: Any) -> None:
    iterator = iter(make(Bare, batch_size=2, num_workers=1))
    assert len(list(islice(iterator, 5))) == 5
    streams = dict(iterator.progress.streams)
    assert next(iterator, None) is None
    assert iterator.progress.streams == streams
    assert streams[0].batches == 5


@pytest.mark.parametrize(
    ("make", "workers", "size"),  # a last batch that is full, or not
    [
        ("plain", {}, {"batch_size": 1}),
        ("plain", PERSISTENT, {"batch_size": 2}),
        pytest.param("asked", TWO, {"batch_size": 2}, marks=pytest.mark.slow),
    ],
    indirect=["make"],
)
def test_what_a_stream_keeps_from_epoch_to_epoch(make: Any, size: Any, workers: Any) -> None:
    loader, states, true = make(Counting, **size, **workers), [], []
    for _ in range(3):
        true.append(known(loader))
        states.append(loader.state_dict())
    iterator = iter(loader)
    before = known(islice(iterator, 3))
    midway = loader.state_dict()
    true.append([*before, *known(iterator)])
    true.append(known(loader))
    labels = [int(epoch[0][1][0]) // 100 for epoch in true]
    assert labels == [0] * 5 if workers.get("num_workers") and "persistent_workers" not in workers else list(range(5))
    for number, state in enumerate(states, 1):
        again = make(Counting, 8, **size, **workers)
        again.load_state_dict(through_files(state))
        assert not difference([known(again) for _ in true[number:]], true[number:])
    again = make(Counting, 8, **size, **workers)
    again.load_state_dict(through_files(midway))
    assert not difference([known(again), known(again)], [true[3][3:], true[4]])


@pytest.mark.parametrize(("make", "kind", "workers"), ROWS, indirect=["make"])
def test_only_streams_without_a_state_are_passed_over(make: Any, kind: type[Bare], workers: Any) -> None:
    loader = make(kind, batch_size=2, **workers)
    list(islice(loader, 2))
    again = make(kind, batch_size=2, **workers)
    again.load_state_dict(loader.state_dict())
    made = next(iter(again))[2].tolist()
    passed = 4 if workers.get("num_workers", 0) == 0 else 2
    assert made == ([passed + 1, passed + 2] if kind is Bare else [1, 2])


def test_of_other_loaders_and_datapipes_is_refused(make: Any) -> None:
    state = make(Bare, num_workers=1).state_dict()
    with pytest.raises(ValueError, match="num_workers is 1 in the state and 2 here"):
        make(Bare, num_workers=2).load_state_dict(state)
    loader = DALILoader(IterableWrapper([torch.zeros(1)]), device="cpu")
    with pytest.raises(UnsupportedDatasetError, match="datapipe"):
        loader.state_dict()
    assert same(list(loader), [torch.zeros(1, 1)])


class Failing(Bare):
    """Cannot say its state."""

    def state_dict(self) -> Any:
        raise OSError("no such file")

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(("make", "workers"), [("plain", {}), ("plain", TWO), ("asked", {})], indirect=["make"])
def test_a_state_that_fails_is_raised_when_it_is_asked_for(make: Any, workers: Any) -> None:
    loader = make(Failing, batch_size=2, **workers)
    assert not difference(known(loader), known(make(Bare, batch_size=2, **workers)))
    next(iter(loader))
    with pytest.raises(RuntimeError, match="raised OSError: no such file"):
        loader.state_dict()
