"""Several processes: each gets its share of a dataset, as with DistributedSampler, or a warning; and its own GPU."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import same
from helpers.processes import run_ranks
from helpers.ranked import AUGMENTED, CASES, EPOCHS
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.pipeline import graph
from torchdali.runtime.devices import on
from torchdali.state.sharding import Shard

pytestmark = pytest.mark.timeout(240)
WORLDS = (1, 3)

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By the number of processes, for each rank what it saw."""
    results: Found = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"of_{world}")
        ranks = [(folder / "store", rank, world, pictures, folder / str(rank)) for rank in range(world)]
        run_ranks("ranked.py", *ranks, limit=150)
        results[world] = [torch.load(folder / str(rank)) for rank in range(world)]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_order_is_distributed_samplers_on_every_rank(found: Found, world: int, name: str) -> None:
    for rank in found[world]:
        (length, sampler, epochs), (true_length, *true_epochs) = rank[name]
        assert (length, sampler) == (true_length, "DistributedSampler")
        assert [labels for labels, _ in epochs] == true_epochs


@pytest.mark.slow
def test_shuffled_epochs_differ_and_ranks_share_them(found: Found) -> None:
    for world in WORLDS:
        ranks = [rank["shuffled"][0][2] for rank in found[world]]
        for epoch in range(EPOCHS):
            seen = Counter(label for rank in ranks for batch in rank[epoch][0] for label in batch)
            assert seen == Counter(range(24))
        assert all(rank[0][0] != rank[1][0] != rank[2][0] for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", range(EPOCHS))
def test_a_picture_looks_the_same_for_any_number_of_ranks(found: Found, epoch: int) -> None:
    def looks(world: int, names: tuple[str, ...]) -> dict[Any, str]:
        kept: dict[Any, str] = {}
        for rank in found[world]:
            for name in names:
                of_rank = rank[name] if name == "torch.manual_seed" else rank[name][0]
                for label, look in of_rank[2][epoch][1].items():
                    kept.setdefault((name.startswith("asked"), label), look)
                    assert kept[name.startswith("asked"), label] == look, (world, name, label)
        return kept

    of_all = [looks(world, AUGMENTED) for world in WORLDS]
    assert of_all[0] == of_all[1]
    assert len(of_all[0]) == 2 * 23
    by_torch = [looks(world, ("torch.manual_seed",)) for world in WORLDS]
    assert by_torch[0] == by_torch[1]
    assert set(by_torch[0].values()).isdisjoint(of_all[0].values())


@pytest.mark.slow
def test_augmentations_differ_between_epochs(found: Found) -> None:
    first, second, third = (looks for _, looks in found[1][0]["read"][0][2])
    assert first.keys() == second.keys() == third.keys()
    assert len({look for looks in (first, second, third) for look in looks.values()}) == 3 * 23


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_group_that_is_initialised_after_the_loader_is_made(found: Found, world: int) -> None:
    for number, rank in enumerate(found[world]):
        before, (length, labels, sampler) = rank["late"]
        assert before == ["SequentialSampler", 6, 23], "all samples, as without distributed="
        share = list(DistributedSampler(range(23), world, number, shuffle=False))  # pyright: ignore
        assert [label for batch in labels for label in batch] == share
        assert (length, sampler) == (len(labels), "DistributedSampler")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_all_samples_for_each_of_several_ranks_is_said_once_by_each_loader(found: Found, world: int) -> None:
    for rank in found[world]:
        for said in rank["warnings"]:
            if world == 1:
                assert said == []
                continue
            (warning,) = said
            assert warning.startswith(f"ranked.py: UserWarning: Each of the {world} processes gets all samples")
            assert "distributed='auto', or sampler=DistributedSampler(dataset)" in warning


@pytest.mark.slow
def test_explain_tells_the_share(found: Found) -> None:
    said = [[line for line in rank["explain"].splitlines() if line.startswith("ranks")] for rank in found[3]]
    row = "{} of 0 to 2; 8 of 23 samples to each, 1 repeated so that shares are even, shuffled by seed 0 + epoch"
    assert said == [[f"ranks      {row.format(rank)}"] for rank in (0, 1, 2)]
    assert "ranks      0 of 0 to 0; 23 of 23 samples to each, shuffled" in found[1][0]["explain"]


# In this process


def in_group(rank: int, world: int) -> Any:
    return mock.patch("torchdali.state.sharding.rank_and_world_size", return_value=(rank, world))


def sampled(loader: DALILoader[Any]) -> list[Any]:
    return [labels.tolist() for _, labels in loader]


def explained(loader: DALILoader[Any]) -> str:
    text = io.StringIO()
    loader.explain(text)
    return next((line for line in text.getvalue().splitlines() if line.startswith("ranks")), "")


Make = Callable[[ImageFolder], dict[str, Any]]
TRUSTED: dict[str, Make] = {
    "DistributedSampler": lambda d: {"sampler": DistributedSampler(d, 2, 1)},
    "a sampler": lambda d: {"sampler": SequentialSampler(d)},
    "a list": lambda d: {"sampler": [3, 1]},
    "a batch sampler": lambda d: {"batch_sampler": BatchSampler(SequentialSampler(d), 3, drop_last=False)},
}


@pytest.mark.parametrize("make", TRUSTED.values(), ids=TRUSTED.keys())
def test_what_the_user_gave_is_trusted(dataset: ImageFolder, make: Make) -> None:
    loader = DALILoader(dataset, **make(dataset), device="cpu")
    given = next(iter(make(dataset)))
    alone = sampled(loader)
    with in_group(1, 2), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampled(loader) == alone
        assert explained(loader) == f"ranks      1 of 0 to 1; what each gets is the {given}'s own matter"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_an_iterable_dataset_shards_itself() -> None:
    with in_group(1, 2):
        loader = DALILoader(Stream(), batch_size=4, device="cpu")
        assert torch.cat(list(loader)).tolist() == list(range(9))
        assert explained(loader) == "ranks      1 of 0 to 1; what each gets is the dataset's own matter"


def test_all_samples_for_each_rank_is_explained(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, shuffle=True, device="cpu")
    assert explained(loader) == ""
    with in_group(1, 2):
        assert explained(loader) == "ranks      1 of 0 to 1; all samples to each"


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_a_group_auto_changes_nothing(dataset: ImageFolder, shuffle: bool) -> None:
    def run(**options: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = DALILoader(dataset, 5, shuffle=shuffle, seed=1, device="cpu", **options)
        batches = [*loader, *loader]
        return [len(loader), type(loader.sampler), batches, torch.rand(1).item()]

    assert same(run(distributed="auto"), run())
    assert "no process group is initialised: all samples" in explained(
        DALILoader(dataset, device="cpu", distributed="auto")
    )


def test_auto_without_a_group_where_torchrun_started_several(
    dataset: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = DALILoader(dataset, device="cpu", distributed="auto")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 4.*init_process_group") as caught:
        assert len(sampled(loader) + sampled(loader)) == 2 * len(dataset)
    assert len(caught) == 1
    assert len(sampled(DALILoader(dataset, device="cpu"))) == len(dataset), "and no warning where nothing was asked for"


@pytest.mark.parametrize("number", [None, 4])
def test_a_group_of_another_size_makes_other_shares(dataset: ImageFolder, number: int | None) -> None:
    with in_group(1, 2):
        loader = DALILoader(dataset, 5, shuffle=True, device="cpu", distributed="auto")
        sampled(loader)
        if number is not None:
            loader.set_epoch(number)
    with in_group(2, 3):
        sampler = DistributedSampler(dataset, 3, 2)
        sampler.set_epoch(1 if number is None else number)
        assert len(loader) == 2
        assert [label for batch in sampled(loader) for label in batch] == list(sampler)


def test_persistent_workers_get_the_new_share() -> None:
    dataset = list(range(24))
    loader = DALILoader(dataset, 5, num_workers=1, persistent_workers=True, device="cpu", distributed="auto")
    assert torch.cat(list(loader)).tolist() == dataset
    with in_group(1, 2):
        assert torch.cat(list(loader)).tolist() == dataset[1::2]
    loader.close()


def test_set_epoch_goes_to_samplers_and_to_the_random_key(dataset: ImageFolder) -> None:
    class Batches(BatchSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    ours, theirs = Batches(SequentialSampler(dataset), 3, drop_last=False), DistributedSampler(dataset, 2, 1)
    DALILoader(dataset, batch_sampler=ours, device="cpu").set_epoch(5)
    DALILoader(dataset, sampler=theirs, device="cpu").set_epoch(6)
    assert (ours.epoch, theirs.epoch) == (5, 6)

    def epochs(first: int) -> Any:
        loader = DALILoader(dataset, 24, transform=v2.RandomHorizontalFlip(), seed=1, device="cpu")
        if first:
            loader.set_epoch(first)
        return [list(loader) for _ in range(first, 3)]

    assert same(epochs(0)[1:], epochs(1))
    assert same(epochs(0)[2:], epochs(2))
    assert not same(*epochs(1))


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "another word": (lambda d: {"distributed": "ddp"}, "distributed must be None or 'auto', got 'ddp'"),
    "sampler": (lambda d: {"sampler": SequentialSampler(d)}, "leaves no room for sampler=: leave one out"),
    "batch_sampler": (lambda d: {"batch_sampler": [[1]]}, "leaves no room for batch_sampler=: leave one out"),
}


@pytest.mark.parametrize(("options", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(dataset: ImageFolder, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DALILoader(dataset, **{"distributed": "auto", "device": "cpu", **options(dataset)})
    with pytest.raises(ValueError, match="an IterableDataset has none: let it skip"):
        DALILoader(Stream(), device="cpu", distributed="auto")


def test_is_seen_by_those_who_look_for_a_distributed_sampler(dataset: ImageFolder) -> None:
    with in_group(1, 2):
        loader = DALILoader(dataset, 5, shuffle=True, device="cpu", distributed="auto")
        assert isinstance(loader.sampler, DistributedSampler)
        assert type(loader.sampler) is Shard
        assert loader.batch_sampler.sampler is loader.sampler  # pyright: ignore
        assert loader.distributed == "auto"
        assert "distributed" not in vars(loader), "Lightning would give it to a loader with another sampler"


# The GPU of a rank


def devices(monkeypatch: pytest.MonkeyPatch, count: int, current: int, local_rank: str | None) -> None:
    monkeypatch.setattr(graph, "unavailable_on", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "chosen"),
    [
        (4, 0, None, 0),
        (4, 0, "0", 0),
        (4, 0, "3", 3),
        pytest.param(4, 2, "3", 2, id="torch.cuda.set_device"),
        pytest.param(1, 0, "3", 0, id="CUDA_VISIBLE_DEVICES"),
        (4, 0, "", 0),
        (4, 0, "all", 0),
    ],
)
def test_auto_is_the_ranks_own_device(
    monkeypatch: pytest.MonkeyPatch, count: int, current: int, local_rank: str | None, chosen: int
) -> None:
    devices(monkeypatch, count, current, local_rank)
    assert graph.resolve("auto") == torch.device("cuda", chosen)
    assert graph.resolve("cuda") == torch.device("cuda", current), "which says torch's current one"
    assert graph.resolve("cuda:1") == torch.device("cuda", 1)


def test_work_on_a_device_is_done_with_it_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be seen without two GPUs: see test_own_gpu.py."""
    devices(monkeypatch, 4, 0, "3")
    entered: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", enter)
    for name in ("cpu", "cuda:0", "cuda:3"):
        with on(torch.device(name)):
            pass
    assert entered == [torch.device("cuda:3")]
