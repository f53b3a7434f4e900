"""A loop that catches an error and goes on can be saved, too: a loader that loads its state goes on as it does."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encoded
from helpers.proxied import difference
from helpers.resumed import through_files
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, default_collate, get_worker_info
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT, BAD = 14, 5
WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
AUGMENT = v2.RandomResizedCrop(8)
RESIZED = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(8)])


class OwnError(Exception):
    """Raised by what users write."""


def picture(number: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(number).integers(0, 256, (3, 16, 16), np.uint8))


def jpeg(number: int) -> bytes:
    data = encoded(Image.fromarray(picture(number).permute(1, 2, 0).numpy()), "JPEG")
    return data[: len(data) // 2] if number == BAD else data


class Stream(IterableDataset[Any]):
    """Gives each worker numbers of its own, the pictures of which are made by ``make``."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def numbers(self) -> range:
        info = get_worker_info()
        return range(info.id * 100, info.id * 100 + COUNT) if info else range(COUNT)

    def __iter__(self) -> Iterator[Any]:
        return ((self.make(number), number) for number in self.numbers())


class Raising:
    """An iterator that raises an exception and can be asked for more."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.left = stream, iter(stream.numbers())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number = next(self.left)
        if number % 100 == BAD:
            raise OwnError(number)
        return self.stream.make(number), number


class RaisingStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return Raising(self)


class EndingWithAState(Stream):
    """Knows its place, from which it could go on where its generator did not."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers()
        while self.at < len(numbers):
            self.at += 1
            if self.at - 1 == BAD:
                raise OwnError(BAD)
            yield self.make(numbers[self.at - 1]), numbers[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def refusing(batch: Any) -> Any:
    if any(number % 100 == BAD for _, number in batch):
        raise OwnError(BAD)
    return default_collate(batch)


def events(iterator: Iterator[Any]) -> Iterator[Any]:
    """What comes of an epoch, where errors are caught."""
    while True:
        try:
            seen = next(iterator)
        except StopIteration:
            return
        except (OwnError, SampleError) as error:
            traceback.clear_frames(error.__traceback__)  # torch's hold the iterator
            seen = type(error).__name__
        yield seen


def assert_goes_on(make: Callable[[], DALILoader[Any]], error: type[Exception]) -> None:
    """After the error, and an epoch later, as well."""
    loader = make()
    seen, states = [], [loader.state_dict()]
    for event in events(iter(loader)):
        seen.append(event)
        states.append(loader.state_dict())
    after = list(events(iter(loader)))
    at = seen.index(error.__name__)
    for taken in range(at, len(states))[: 3 if loader.num_workers else None]:
        again = make()
        again.load_state_dict(through_files(states[taken]))
        assert not difference(list(events(iter(again))), seen[taken:]), taken
        assert not difference(list(events(iter(again))), after), taken


TRANSFORM = {"transform": AUGMENT, "seed": 1}


@pytest.mark.parametrize(
    ("kind", "batch_size", "workers", "does"),
    [
        (RaisingStream, 3, {}, {}),
        (RaisingStream, None, {}, TRANSFORM),
        (EndingWithAState, 3, {}, TRANSFORM),
        pytest.param(RaisingStream, 3, WORKERS[1], TRANSFORM, marks=pytest.mark.slow),
        pytest.param(EndingWithAState, 3, WORKERS[2], {}, marks=pytest.mark.slow),
    ],
)
def test_after_an_error_of_a_stream(kind: type[Stream], batch_size: int | None, workers: Any, does: Any) -> None:
    options = {"device": "cpu", "batch_size": batch_size, **does, **workers}
    assert_goes_on(lambda: DALILoader(kind(picture), generator=torch.Generator(), **options), OwnError)


@pytest.mark.parametrize(
    ("workers", "does"), [(WORKERS[0], {}), pytest.param(WORKERS[1], TRANSFORM, marks=pytest.mark.slow)]
)
def test_after_an_error_of_what_collates(workers: Any, does: Any) -> None:
    options = {"device": "cpu", "batch_size": 4, "collate_fn": refusing, **does, **workers}
    assert_goes_on(lambda: DALILoader(Stream(picture), generator=torch.Generator(), **options), OwnError)


@pytest.mark.parametrize("workers", [WORKERS[0], pytest.param(WORKERS[1], marks=pytest.mark.slow)])
def test_after_a_damaged_sample_of_a_stream(workers: Any) -> None:
    options = {"device": "cpu", "batch_size": 4, "transform": RESIZED, "seed": 1, **workers}
    assert_goes_on(lambda: DALILoader(Stream(jpeg), **options), SampleError)
    with pytest.raises(SampleError, match=", worker 0" if workers else r"\(\[0\]\)"):
        list(DALILoader(Stream(jpeg), **options))


class Refusing(Dataset[Any]):
    """Cannot give one of its samples."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise OwnError(index)
        return picture(index), index


@pytest.mark.parametrize(
    ("workers", "batch_size"),
    [
        (WORKERS[0], None),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((WORKERS[1], 2), (WORKERS[2], None))),
    ],
)
def test_samples_of_a_batch_that_failed_count_as_drawn(batch_size: int | None, workers: Any) -> None:
    def make() -> DALILoader[Any]:
        sampler = RandomSampler(range(4), replacement=True, num_samples=16, generator=torch.Generator())
        options = {"device": "cpu", "batch_size": batch_size, "transform": AUGMENT, "seed": 1, **workers}
        return DALILoader(Refusing(), sampler=sampler, **options)

    assert_goes_on(make, OwnError)


def test_after_a_damaged_file(fresh: Any) -> None:
    Path(fresh.samples[4][0]).write_text("no picture")
    loader, again = (DALILoader(fresh, 3, seed=1, device="cpu") for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(SampleError):
        next(iterator)
    again.load_state_dict(through_files(loader.state_dict()))
    assert not difference(list(again), list(iterator))


class Shuffled(list[int]):
    """A sampler of numbers that may be shuffled.

    Args:
        rng: What its ``__iter__`` draws from.
    """

    def __init__(self, rng: Any = None) -> None:
        super().__init__(range(6))
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(super().__iter__(), key=lambda _: self.rng.random_sample() if self.rng else 0))


class Unsaved(Shuffled):
    """Cannot say its state."""

    def state_dict(self) -> Any:
        raise OSError("no such file")

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


class SystemShuffled(Shuffled):
    """Has a generator without a state, from which nothing is drawn here."""

    def __init__(self) -> None:
        super().__init__()
        self.system = random.SystemRandom()


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unsaved, "sampler raised OSError: no such file; mend it"),
        (SystemShuffled, "sampler.system must be a generator whose state can be saved, got SystemRandom"),
        (lambda: Shuffled(np.random.RandomState(np.random.PCG64(1))), "sampler.rng must be .* got RandomState"),
    ],
    ids=["state_dict", "SystemRandom", "RandomState"],
)
def test_a_sampler_that_cannot_be_saved_runs_until_it_is_asked_for(make: Any, message: str, is_fed: bool) -> None:
    dataset = [(picture(i), i) for i in range(6)]
    options: dict[str, Any] = {"transform": v2.Identity(), "device": "cpu"} if is_fed else {"device": "cpu"}
    loader = DALILoader(dataset, 2, sampler=make(), **options)  # pyright: ignore[reportArgumentType]
    theirs = DataLoader(dataset, 2, sampler=make())  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        assert [labels.tolist() for _, labels in loader] == [labels.tolist() for _, labels in theirs]
    next(iter(loader))
    with pytest.raises(RuntimeError, match=message):
        loader.state_dict()


class Settings(dict[str, Any]):
    """Has its entries as attributes, and no others."""

    __getattr__ = dict.__getitem__  # pyright: ignore[reportAssignmentType]


def test_a_sampler_may_have_attributes_that_raise_other_errors_than_attribute_error() -> None:
    sampler = Shuffled()
    sampler.rng = Settings(random_sample=lambda: 0)
    loader = DALILoader([(picture(i), i) for i in range(6)], 2, sampler=sampler, device="cpu")  # pyright: ignore[reportArgumentType]
    assert [labels.tolist() for _, labels in loader] == [[0, 1], [2, 3], [4, 5]]
    assert not loader.state_dict()["begun"]
