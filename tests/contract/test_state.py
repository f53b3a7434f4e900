"""A loader that loads the state of another goes on as that one does: the rest of the epoch and the epochs after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Numbered
from helpers.arguments import ARGUMENTS, COMBINED, WORKERS
from helpers.cover import cover_pairs
from helpers.proxied import difference
from helpers.resumed import AUGMENT, KINDS, read, set_epoch, through_files

from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


SHORT = [
    *("shuffle", "batch_size=None, shuffle", "random, many", "replacement", "subset", "distributed"),
    *("uneven batches", "lists", "drawn at iter", "batches drawn at iter", "negative"),
]


def loader_of(kind: Any, arguments: Any, seed: int, own_generator: bool, **options: Any) -> DALILoader[Any]:
    """A loader under its own seeds."""
    dataset, own = kind
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed) if own_generator else None
    return DALILoader(dataset, generator=generator, **arguments(len(dataset), generator), **own, **options)


def going_on(iterator: Iterator[Any]) -> list[Any]:
    """What comes, with a number that the consumer draws from torch's global generator after each batch."""
    return [(batch, torch.rand(1)) for batch in iterator]


def rest_and_epochs(loader: DALILoader[Any], iterator: Iterator[Any], epoch: int) -> list[Any]:
    seen = [going_on(iterator)]
    for number in (1, 2):
        set_epoch(loader, epoch + number)
        seen.append(going_on(iter(loader)))
    return seen


def assert_goes_on(make: Callable[[int], DALILoader[Any]], epochs: int, batches: int) -> None:
    """Loads a state that was taken after some epochs and batches into a loader with other seeds."""
    loader = make(7)
    for number in range(epochs):
        set_epoch(loader, number)
        going_on(iter(loader))
    set_epoch(loader, epochs)
    iterator = iter(loader)
    going_on(islice(iterator, batches))
    state = through_files(loader.state_dict())
    rng = torch.get_rng_state()
    assert state["batches"] == batches
    true = rest_and_epochs(loader, iterator, epochs)
    assert len(true[1]) > batches
    again = make(8)
    again.load_state_dict(state)
    if "torch" not in state["generators"]:  # then it is the consumer's
        torch.set_rng_state(rng)
    assert not difference(rest_and_epochs(again, iter(again), epochs), true)


@pytest.mark.parametrize(("arguments", "workers", "own_generator"), COMBINED)
def test_goes_on_with_every_sampler(
    pictures: Path, numbered: Numbered, arguments: Any, workers: dict[str, Any], own_generator: bool
) -> None:
    kind = read(pictures, numbered)
    assert_goes_on(lambda seed: loader_of(kind, arguments, seed, own_generator, **workers), int(own_generator), 2)


# Every order without workers, one with each kind of workers, because forks take time.
FED = [
    pytest.param(
        which, order, *workers.values, id=f"{which}-{order}-{workers.id}", marks=[pytest.mark.slow] * (place == 1)
    )
    for number, which in enumerate(["asked", "plain"])
    for place, workers in enumerate(WORKERS)
    for order in (SHORT[number::2] if place == 0 else SHORT[number + place :][:1])
]


@pytest.mark.parametrize(("which", "order", "workers"), FED)
def test_goes_on_where_the_dataset_is_asked(
    pictures: Path, numbered: Numbered, which: str, order: str, workers: dict[str, Any]
) -> None:
    kind = KINDS[which](pictures, numbered)
    own_generator = SHORT.index(order) % 2 == (which == "asked")
    assert_goes_on(lambda seed: loader_of(kind, ARGUMENTS[order], seed, own_generator, **workers), 1, 1)


def test_a_probe_between_leaves_the_place_alone(pictures: Path, numbered: Numbered) -> None:
    """It has an epoch of its own, which neither uses up a state that was loaded nor counts."""
    dataset, own = read(pictures, numbered)

    def make(number: int) -> DALILoader[Any]:
        torch.manual_seed(number)
        return DALILoader(dataset, 1, shuffle=True, **own)

    loader = make(7)
    iterator = iter(loader)
    list(islice(iterator, 20))  # more than a probe has, which must not skip them
    loader.stats(probe=True)
    state = loader.state_dict()
    true = [list(iterator), list(loader)]
    again = make(8)
    again.load_state_dict(state)
    rng = torch.get_rng_state()
    again.stats(probe=True)
    assert torch.equal(torch.get_rng_state(), rng)
    assert again.state_dict() == state
    assert not difference([list(again), list(again)], true)


@pytest.mark.parametrize(("mode", "workers", "which"), cover_pairs(["skip", "replace"], WORKERS[:2], ["read", "asked"]))
def test_goes_on_where_samples_are_put_up_with(
    fresh_pictures: Path, numbered: Numbered, which: str, workers: dict[str, Any], mode: str
) -> None:
    """Whether they were known to be bad or are found to be again."""
    for path in sorted(fresh_pictures.rglob("*.jpg"))[1:12:3]:
        path.write_bytes(b"no picture")
    dataset, own = read(fresh_pictures, numbered)
    samples = [(Path(path), number) for path, number in dataset.samples]
    kind = (samples, {"transform": AUGMENT, **own}) if which == "asked" else (dataset, own)
    assert_goes_on(lambda seed: loader_of(kind, ARGUMENTS["shuffle"], seed, False, on_error=mode, **workers), 1, 3)
