"""A dataset that is asked for samples is asked as DataLoader asks it, whether DALI has work behind it or not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same
from helpers.arguments import ARGUMENTS, NONE, PERSISTENT, TWO
from helpers.proxied import EXACT, RANDOM, AtOnce, Named, Pictures, Stream, decoded, difference, prepare
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT = 11


@pytest.fixture
def files(pictures: Path) -> list[Path]:
    return sorted(pictures.rglob("*.jpg"))[:COUNT]


Build = Callable[..., Any]


def unchanged(batch: Any) -> Any:
    return batch


FEW = pytest.mark.parametrize(
    ("both", "workers"),
    [
        ("nothing", TWO),
        pytest.param("batch_transform", NONE, marks=pytest.mark.slow),
        ("transform", NONE),
        pytest.param("transform", TWO, marks=pytest.mark.slow),
    ],
    indirect=["both"],
)
WITH_TRANSFORM = pytest.mark.parametrize("both", ["transform"], indirect=True)


@pytest.fixture(params=["nothing", "batch_transform", "transform"])
def both(request: pytest.FixtureRequest, files: list[Path]) -> Callable[..., tuple[Build, Build]]:
    """Makes ours and theirs: loaders of the same batches, where there is nothing for ours to do beside and where is."""

    def make(dataset: Callable[[Pictures], Any] = lambda x: x, kind: type[Pictures] = Pictures) -> Any:
        inside = dataset(kind(files, EXACT))
        bare = dataset(kind(files))

        def ours(**options: Any) -> DALILoader:
            if request.param == "transform":
                return DALILoader(bare, **options, transform=EXACT, device="cpu")
            after = unchanged if request.param == "batch_transform" else None
            return DALILoader(inside, **options, batch_transform=after, device="cpu")

        return ours, lambda **options: DataLoader(inside, **options)

    return make


def seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), *map(np.ndarray.tolist, np.random.get_state()[1:2])]  # type: ignore # noqa: NPY002


def epochs(build: Build, arguments: Any, count: int = 2, **options: Any) -> list[Any]:
    """All batches of some epochs, and the generators' states after each."""
    seed_all(7)
    generator = torch.Generator().manual_seed(5)
    loader = build(generator=generator, **arguments(COUNT, generator), **options)
    seen: list[Any] = []
    for number in range(count):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(number)
        seen.append((list(loader), states(), generator.get_state()))
    return seen


ORDERS = ["shuffle, drop_last", "batch_size=None, shuffle", "replacement", "uneven batches", "lists", "drawn at iter"]


@WITH_TRANSFORM
@pytest.mark.parametrize(
    ("order", "workers"),
    [
        pytest.param(order, workers, marks=[pytest.mark.slow] * (i > 1 and workers is not NONE))
        for i, order in enumerate(ORDERS)
        for workers in (NONE, (TWO, PERSISTENT)[i % 2])[: 1 + (i < 4)]
    ],
)
def test_batches_and_generators_are_dataloaders(both: Any, order: str, workers: dict[str, Any]) -> None:
    ours, theirs = both()
    seen, true = (epochs(build, ARGUMENTS[order], **workers) for build in (ours, theirs))
    assert not difference(seen, true)
    assert len(true[0][0]) > 1
    assert not same(true[0], true[1])


@pytest.mark.parametrize(
    ("both", "workers", "after"),
    [
        ("transform", NONE, 1),
        ("transform", TWO, 3),
        pytest.param("transform", PERSISTENT, 1, marks=pytest.mark.slow),
        pytest.param("batch_transform", TWO, 1, marks=pytest.mark.slow),
        ("nothing", NONE, 3),
        pytest.param("nothing", PERSISTENT, 3, marks=pytest.mark.slow),
    ],
    indirect=["both"],
)
def test_generators_after_a_break_are_dataloaders(both: Any, workers: dict[str, Any], after: int) -> None:
    def known(batch: dict[str, Any]) -> dict[str, Any]:
        # Workers that go on were asked further ahead than DataLoader's, and so have drawn more than they would have.
        left_out = ("torch", "numpy", "python") if "persistent_workers" in workers else ()
        return {name: value for name, value in batch.items() if name not in left_out}

    def run(build: Build) -> list[Any]:
        seed_all(3)
        generator = torch.Generator().manual_seed(5)
        loader = build(batch_size=2, shuffle=True, generator=generator, **workers)
        seen: list[Any] = []
        for _ in range(2):
            iterator = iter(loader)
            seen += [(torch.rand(1), known(next(iterator))) for _ in range(after)]
            del iterator
            seen.append((torch.rand(1), generator.get_state() if "persistent_workers" not in workers else None))
        return [seen, [known(batch) for batch in loader]]

    ours, theirs = both()
    assert not difference(run(ours), run(theirs))


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_start_methods_and_worker_init_fn(files: list[Path], method: str) -> None:
    """Against DataLoader with forked workers, which start sooner and do the same."""

    def run(build: Build, method: Any) -> list[Any]:
        options = {"multiprocessing_context": method, "worker_init_fn": prepare}
        return epochs(build, ARGUMENTS["shuffle"], 1, num_workers=1, **options)

    true = run(partial(DataLoader, Pictures(files, EXACT)), "fork")
    context = torch.multiprocessing.get_context(method) if method == "fork" else method
    seen = run(partial(DALILoader, Pictures(files), transform=EXACT, device="cpu"), context)
    assert not difference(seen, true)
    assert true[0][0][1]["mark"] == ["changed by 0 of 1"] * 5
    assert set(true[0][0][1]["worker"][3]) == {"Pictures"}


@FEW
def test_whole_batches_are_asked_of_a_dataset_that_gives_them(both: Any, workers: dict[str, Any]) -> None:
    ours, theirs = both(kind=AtOnce)
    seen, true = (epochs(build, lambda n, g: {"batch_size": 4}, **workers) for build in (ours, theirs))
    assert true[0][0][1]["beside"] == ["[4, 5, 6, 7]"] * 4
    assert not difference(seen, true)


@pytest.mark.slow
@pytest.mark.parametrize("both", ["transform", "nothing", "batch_transform"], indirect=True)
def test_out_of_order_is_as_dataloader_and_pairs_stay_pairs(both: Any, files: list[Path]) -> None:
    def run(build: Build) -> list[Any]:
        return list(build(batch_size=1, num_workers=2, in_order=False))

    ours, theirs = both(lambda pictures: vars(pictures).update(slow=0) or pictures)
    seen, true = run(ours), run(theirs)
    assert [batch["index"].item() for batch in seen] == [batch["index"].item() for batch in true]
    assert seen[0]["index"].item() == 1, "the first worker is the slow one"
    whole = Pictures(files, EXACT)
    assert all(torch.equal(batch["image"][0], whole[batch["index"].item()]["image"]) for batch in seen)


@WITH_TRANSFORM
@pytest.mark.parametrize(
    ("size", "shares", "workers"),
    [
        ({"batch_size": 3}, False, NONE),
        ({"batch_size": 3, "drop_last": True}, False, NONE),
        ({"batch_size": None}, True, NONE),
        ({"batch_size": 3}, True, TWO),
        pytest.param({"batch_size": 3, "drop_last": True}, True, PERSISTENT, marks=pytest.mark.slow),
        pytest.param({"batch_size": None}, False, TWO, marks=pytest.mark.slow),
    ],
)
def test_streams_are_dataloaders(both: Any, workers: dict[str, Any], shares: bool, size: Any) -> None:
    ours, theirs = both(lambda pictures: Stream(pictures, shares))
    seen, true = (epochs(build, lambda n, g: size, **workers) for build in (ours, theirs))
    assert not difference(seen, true)


@FEW
def test_warns_of_a_stream_longer_than_it_says_as_dataloader_does(both: Any, workers: dict[str, Any]) -> None:
    def run(build: Build) -> list[Any]:
        loader = build(batch_size=2, **workers)
        length = len(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said = [(batch["index"].tolist(), len(caught)) for batch in loader]
        texts = [" ".join(str(one.message).split()) for one in caught if issubclass(one.category, UserWarning)]
        return [length, said, [text.split("was reported")[1] for text in texts]]

    ours, theirs = both(lambda pictures: Stream(pictures, shares=False, length=5))
    seen, true = run(ours), run(theirs)
    assert seen == true
    assert true[2]


@FEW
@pytest.mark.slow
def test_datapipes(both: Any, workers: dict[str, Any]) -> None:
    ours, theirs = both(lambda p: IterableWrapper(range(COUNT)).map(p.__getitem__).shuffle().sharding_filter())
    seen, true = (epochs(build, lambda n, g: {"batch_size": 3, "shuffle": True}, **workers) for build in (ours, theirs))
    assert not difference(seen, true)
    ours, theirs = both(lambda p: SequenceWrapper(range(COUNT), deepcopy=False).map(p.__getitem__))
    seen, true = (epochs(build, ARGUMENTS["shuffle"], **workers) for build in (ours, theirs))
    assert not difference(seen, true)


@FEW
def test_keys_that_are_no_integers(both: Any, workers: dict[str, Any]) -> None:
    keys = [f"picture {i}" for i in (3, 0, 7, 7, 2)]
    ours, theirs = both(kind=Named)
    arguments = {"sampler": keys, "batch_size": 2, **workers}
    assert not difference(*(epochs(build, lambda n, g: arguments) for build in (ours, theirs)))


def crops(dataset: Any, **options: Any) -> dict[Any, list[torch.Tensor]]:
    """Of one epoch, what a random chain made of each picture, in order of its occurrence."""
    found: dict[Any, list[torch.Tensor]] = {}
    for batch in DALILoader(dataset, transform=RANDOM, device="cpu", **{"seed": 3, **options}):
        for image, index in zip(batch["image"], batch["index"].tolist(), strict=True):
            found.setdefault(index, []).append(image)
    return found


@pytest.mark.parametrize(("workers", "size"), [(0, 1), (1, 4), (3, 3)])
def test_random_numbers_follow_from_the_index_alone(files: list[Path], workers: int, size: int) -> None:
    dataset = Pictures(files)
    order = [4, 1, 4, 0, 9, 4, 1]
    true = crops(dataset, batch_size=7, sampler=order)
    assert same(crops(dataset, batch_size=size, num_workers=workers, sampler=order), true)
    assert len({image.numpy().tobytes() for image in true[4]}) == 3, "each occurrence has numbers of its own"
    assert not same(crops(dataset, batch_size=7, sampler=order, seed=4), true)
    keys = [f"picture {i}" for i in order]
    named = [crops(Named(files), batch_size=s, num_workers=w, sampler=keys) for s, w in ((7, 0), (size, workers))]
    assert same(*named)
    assert len({image.numpy().tobytes() for image in named[0][4]}) == 3
    alone = crops(Named(files), batch_size=1, sampler=["picture 9"])
    assert same(alone[9], named[0][9]), "what came before does not matter"


@pytest.mark.parametrize("workers", [1, 2])
def test_random_numbers_of_a_stream_follow_from_worker_and_place(files: list[Path], workers: int) -> None:
    true = crops(Stream(Pictures(files), shares=False), batch_size=4)
    seen = crops(Stream(Pictures(files), shares=False), batch_size=3, num_workers=workers)
    assert same([images[0] for images in seen.values()], [images[0] for images in true.values()])
    second = [images[1] for images in seen.values() if len(images) > 1]
    assert len(second) == (COUNT if workers == 2 else 0), "two workers have everything twice"
    differ = [not torch.equal(*images) for images in seen.values() if len(images) > 1]
    assert sum(differ) >= len(differ) / 2


def test_epochs_differ_and_follow_the_sampler(files: list[Path]) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(range(COUNT), num_replicas=1, rank=0, shuffle=False)  # pyright: ignore
    loader = DALILoader(Pictures(files), 4, sampler=sampler, transform=RANDOM, seed=1, device="cpu")
    seen: list[Any] = []
    for number in (0, 1, 0):
        sampler.set_epoch(number)
        seen.append([batch["image"] for batch in loader])
    assert same(seen[0], seen[2])
    assert not same(seen[0], seen[1])


class InBulk:
    """Gives batches for whatever it is asked for: slices, and each sample twice."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __getitems__(self, asked: Any) -> list[Any]:
        asked = range(len(self.files))[asked] if isinstance(asked, slice) else [i for i in asked for _ in range(2)]
        return [(self.files[i % COUNT], torch.tensor(i % COUNT)) for i in asked]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches", [[slice(0, 4), slice(4, 7)], [[0, 1], [2]], [[2**70, 3], [-1, 2**63]]])
def test_indices_may_be_anything(files: list[Path], batches: Any, workers: int) -> None:
    dataset: Any = InBulk(files)
    theirs = list(DataLoader(dataset, batch_sampler=batches, collate_fn=unchanged))
    loader = DALILoader(dataset, batch_sampler=batches, transform=EXACT, num_workers=workers, device="cpu")
    for (images, labels), samples in zip(loader, theirs, strict=True):
        assert labels.tolist() == [label for _, label in samples]
        true = [EXACT(decoded(path.read_bytes())) for path, _ in samples]
        assert all(map(torch.equal, images, true))
