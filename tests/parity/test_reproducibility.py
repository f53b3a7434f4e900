"""What random transforms make of a sample follows from seed, epoch, index and occurrence, and from nothing else."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CROP, Numbered
from helpers.proxied import difference
from helpers.resumed import KINDS, Asked, through_files
from torch.utils.data import DistributedSampler
from torchvision.transforms import v2

from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT = 23
CHAIN = [
    *(v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4), v2.RandomRotation(20)),
    v2.RandomErasing(0.5),
]
SIZES = [{"batch_size": size} for size in (1, 4, 23)]
WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 3, "batch_size": 2},
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 2, "prefetch_factor": 9, "batch_size": 1},
    {"num_workers": 2, "persistent_workers": True},
]
CACHES = [{"cache": "host"}, {"cache": "device"}, {"cache": "host", "cache_bytes": 30_000, "batch_size": 4}]


@pytest.fixture(params=["read", "asked"])
def loader_of(request: pytest.FixtureRequest, pictures: Path, numbered: Numbered, device: str) -> Any:
    """Makes loaders of the same pictures, with other arguments."""

    def make(**options: Any) -> DALILoader[Any]:
        options = {"batch_size": 7, "seed": 3, "device": device, **options}
        if request.param == "asked":
            files = sorted(pictures.rglob("*.jpg"))[:COUNT]
            return DALILoader(Asked(files), transform=v2.Compose([v2.ToImage(), *CHAIN]), **options)
        dataset = numbered(pictures, v2.Compose([v2.ToImage(), *CHAIN]))
        dataset.samples = dataset.samples[:COUNT]
        return DALILoader(dataset, **options)

    return make


Pictures = dict[int, list[torch.Tensor]]


def found(*loaders: Iterable[Any]) -> Pictures:
    """The pictures of each sample, in the order in which they came up."""
    pictures: Pictures = {}
    for images, labels in itertools.chain(*loaders):
        for image, label in zip(images, labels.tolist(), strict=True):
            pictures.setdefault(label, []).append(image.cpu())
    return dict(sorted(pictures.items()))


def test_of_any_batch_size_and_order(loader_of: Any) -> None:
    true = found(loader_of())
    assert len(true) == COUNT
    for options in SIZES:
        assert not difference(found(loader_of(**options)), true)
        assert not difference(found(loader_of(shuffle=True, **options)), true)
    assert difference(found(loader_of(seed=4)), true)


@pytest.mark.parametrize(
    ("loader_of", "options"),
    [
        ("asked", WORKERS[0]),
        *(pytest.param("asked", x, marks=pytest.mark.slow) for x in WORKERS[1:]),
        *(("read", x) for x in WORKERS[1:3]),
    ],
    indirect=["loader_of"],
)
def test_of_any_number_of_workers_and_window(loader_of: Any, options: Any) -> None:
    ours, theirs = loader_of(**options), loader_of()
    for _ in range(2):
        assert not difference(found(ours), found(theirs))


@pytest.mark.parametrize("loader_of", ["read"], indirect=True)
@pytest.mark.parametrize("options", CACHES, ids=str)
def test_with_and_without_a_cache(loader_of: Any, options: Any) -> None:
    ours, theirs = loader_of(**options), loader_of()
    for _ in range(3):
        assert not difference(found(ours), found(theirs))


@pytest.mark.parametrize(("ranks", "shuffle"), [(2, True), (3, False)])
def test_of_any_number_of_ranks(loader_of: Any, ranks: int, shuffle: bool) -> None:
    samplers = [DistributedSampler(range(COUNT), ranks, rank, shuffle=shuffle) for rank in range(ranks)]  # pyright: ignore
    loaders = [loader_of(sampler=sampler, batch_size=4) for sampler in samplers]
    alone: DistributedSampler[Any] = DistributedSampler(range(COUNT), 1, 0, shuffle=False)  # pyright: ignore
    theirs = loader_of(sampler=alone)
    for epoch in range(2):
        for sampler in [*samplers, alone]:
            sampler.set_epoch(epoch)
        true, ours = found(theirs), found(*loaders)
        repeated = [images for images in ours.values() if len(images) > 1]
        assert sum(len(images) - 1 for images in repeated) == -COUNT % ranks
        assert all(torch.equal(image, images[0]) for images in repeated for image in images), "to fill up the last rank"
        assert not difference({label: images[:1] for label, images in ours.items()}, true)


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_after_the_state_was_loaded(loader_of: Any, batches: int) -> None:
    torch.manual_seed(1)
    loader = loader_of(shuffle=True)
    list(loader)
    iterator = iter(loader)
    before = list(itertools.islice(iterator, batches))
    again = loader_of(shuffle=True)
    again.load_state_dict(through_files(loader.state_dict()))
    theirs = loader_of()
    list(theirs)
    assert not difference(found(before, again), found(theirs))


@pytest.mark.slow
def test_duplicates_in_an_epoch_differ_and_have_their_own(loader_of: Any) -> None:
    order = [4, 1, 4, 0, 4, 9, 1]
    true = found(loader_of(sampler=order))
    assert len({image.numpy().tobytes() for image in true[4]}) == 3
    assert len({image.numpy().tobytes() for image in true[1]}) == 2
    for options in (*SIZES, *WORKERS[:2]):
        assert not difference(found(loader_of(sampler=order, **options)), true)
    for batches in range(1, 7):
        loader = loader_of(sampler=order, batch_size=1)
        before = list(itertools.islice(loader, batches))
        again = loader_of(sampler=order, batch_size=1)
        again.load_state_dict(loader.state_dict())
        assert not difference(found(before, again), true)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "persistent"), [("asked", True), ("plain", False)])
def test_a_run_whose_worker_was_killed_is_repeated_from_its_state(
    pictures: Path, numbered: Numbered, kind: str, persistent: bool
) -> None:
    dataset, own = KINDS[kind](pictures, numbered)

    def make(number: int) -> DALILoader[Any]:
        torch.manual_seed(number)
        options = {"shuffle": True, "num_workers": 2, "prefetch_factor": 1, "persistent_workers": persistent}
        return DALILoader(dataset, 2, **options, **own)

    whole = make(7)
    true = [list(whole), list(whole)]
    loader, last = make(7), ([], {})
    iterator = iter(loader)

    def go_on_until_death() -> None:
        nonlocal last
        for batch in iterator:
            # DataLoader raises wherever the thread is. So a batch and the state after it are kept together.
            last = ([*last[0], batch], through_files(loader.state_dict()))
            if len(last[0]) == 2:
                os.kill(iterator._workers[1].pid, signal.SIGKILL)
                time.sleep(0.2)

    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        go_on_until_death()
    seen, state = last
    assert len(seen) < len(true[0]), "it did die in the midst"
    again = make(8)
    again.load_state_dict(state)
    assert not difference([[*seen, *again], list(again)], true)
