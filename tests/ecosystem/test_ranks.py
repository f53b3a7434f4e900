"""Each of several ranks gets its share of a dataset, as from DistributedSampler, or a warning; and its own GPU."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from helpers.forked_ranks import run_ranks
from helpers.ranked import AUGMENTED, CASES, EPOCHS, epochs, loader_of, numbered
from helpers.resumed import in_group
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.pipeline import graph
from torchdali.runtime.devices import use
from torchdali.state.sharding import Shard

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("wide")]
RANKS = 2
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [(folder / "store", rank, RANKS, pictures, folder / str(rank)) for rank in range(RANKS)]
    run_ranks("ranked.py", *ranks, limit=150)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_order_is_distributed_samplers_on_every_rank(seen: Seen, name: str) -> None:
    for rank in seen:
        (length, sampler, of_epochs), (true_length, *true_epochs) = rank[name]
        assert (length, sampler) == (true_length, "DistributedSampler")
        assert [labels for labels, _ in of_epochs] == true_epochs
    if name == "even":
        for epoch in range(EPOCHS):
            labels = [label for rank in seen for batch in rank[name][0][2][epoch][0] for label in batch]
            assert sorted(labels) == list(range(24))


@pytest.mark.slow
def test_a_picture_looks_the_same_for_any_number_of_ranks(seen: Seen, pictures: Path) -> None:
    """And different in each epoch."""
    for name in AUGMENTED:
        with in_group(0, 1):
            alone = [looks for _, looks in epochs(CASES[name], loader_of(CASES[name], numbered(pictures)))[2]]
        assert len({look for looks in alone for look in looks.values()}) == EPOCHS * 23
        for epoch, looks in enumerate(alone):
            shares = [rank[name][0][2][epoch][1] for rank in seen]
            assert {label: look for share in shares for label, look in share.items()} == looks


@pytest.mark.slow
def test_a_group_may_be_initialised_after_the_loader_is_made(seen: Seen) -> None:
    for number, rank in enumerate(seen):
        before, (length, labels, sampler) = rank["late"]
        assert before == ["SequentialSampler", 6, 23], "all samples, as without distributed="
        share = list(DistributedSampler(range(23), RANKS, number, shuffle=False))  # pyright: ignore
        assert [label for batch in labels for label in batch] == share
        assert (length, sampler) == (len(labels), "DistributedSampler")


@pytest.mark.slow
def test_each_loader_that_gives_all_samples_to_every_rank_warns_once(seen: Seen) -> None:
    for rank in seen:
        for (warning,) in rank["warnings"]:
            assert warning.startswith(f"ranked.py: UserWarning: Each of the {RANKS} processes gets all samples")
            assert "distributed='auto', or sampler=DistributedSampler(dataset)" in warning


@pytest.mark.slow
def test_explain_tells_the_share(seen: Seen) -> None:
    for number, rank in enumerate(seen):
        row = (
            f"ranks      {number} of 0 to 1; 12 of 23 samples to each, 1 repeated so that shares are even, shuffled by"
        )
        assert row in rank["explain"]


# In this process


def sampled(loader: DALILoader[Any]) -> list[Any]:
    return [labels.tolist() for _, labels in loader]


def explained(loader: DALILoader[Any]) -> str:
    text = io.StringIO()
    loader.explain(text)
    return next((line for line in text.getvalue().splitlines() if line.startswith("ranks")), "")


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_users_own_sampler_is_not_warned_of(dataset: ImageFolder, name: str) -> None:
    given = {"sampler": [3, 1], "batch_sampler": BatchSampler(SequentialSampler(dataset), 3, drop_last=False)}[name]
    loader = DALILoader(dataset, **{name: given}, device="cpu")
    alone = sampled(loader)
    with in_group(1, 2), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampled(loader) == alone
        assert explained(loader) == f"ranks      1 of 0 to 1; what each gets is the {name}'s own matter"


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


def test_without_a_group_auto_changes_nothing(dataset: ImageFolder) -> None:
    def run(**options: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = DALILoader(dataset, 5, shuffle=True, seed=1, device="cpu", **options)
        batches = [*loader, *loader]
        return [len(loader), type(loader.sampler), batches, torch.rand(1).item()]

    assert same(run(distributed="auto"), run())
    assert "no process group is initialised: all samples" in explained(
        DALILoader(dataset, device="cpu", distributed="auto")
    )


def test_persistent_workers_get_a_new_share_in_a_new_group() -> None:
    dataset = list(range(24))
    loader = DALILoader(dataset, 5, num_workers=1, persistent_workers=True, device="cpu", distributed="auto")
    assert torch.cat(list(loader)).tolist() == dataset
    with in_group(1, 2):
        assert torch.cat(list(loader)).tolist() == dataset[1::2]
    loader.close()


def test_set_epoch_sets_the_random_key(dataset: ImageFolder) -> None:
    def epochs_from(first: int) -> Any:
        loader = DALILoader(dataset, 24, transform=v2.RandomHorizontalFlip(), seed=1, device="cpu")
        if first:
            loader.set_epoch(first)
        return [list(loader) for _ in range(first, 3)]

    assert same(epochs_from(0)[1:], epochs_from(1))
    assert same(epochs_from(0)[2:], epochs_from(2))
    assert not same(*epochs_from(1))


def test_the_sampler_is_a_distributed_sampler(dataset: ImageFolder) -> None:
    with in_group(1, 2):
        loader = DALILoader(dataset, 5, shuffle=True, device="cpu", distributed="auto")
        assert isinstance(loader.sampler, DistributedSampler)
        assert type(loader.sampler) is Shard
        assert loader.batch_sampler.sampler is loader.sampler  # pyright: ignore
        assert loader.distributed == "auto"
        assert "distributed" not in vars(loader), "Lightning would give it to a loader with another sampler"


# The GPU of a rank


def devices(monkeypatch: pytest.MonkeyPatch, count: int, current: int, local_rank: str | None) -> None:
    monkeypatch.setattr(graph, "explain_unavailability", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "chosen"),
    [
        (4, 0, None, 0),
        (4, 0, "3", 3),
        pytest.param(4, 2, "3", 2, id="torch.cuda.set_device"),
        pytest.param(1, 0, "3", 0, id="CUDA_VISIBLE_DEVICES"),
        (4, 0, "all", 0),
    ],
)
def test_auto_is_the_ranks_own_device(
    monkeypatch: pytest.MonkeyPatch, count: int, current: int, local_rank: str | None, chosen: int
) -> None:
    devices(monkeypatch, count, current, local_rank)
    assert graph.resolve("auto") == torch.device("cuda", chosen)
    assert graph.resolve("cuda") == torch.device("cuda", current), "torch's current device"
    assert graph.resolve("cuda:1") == torch.device("cuda", 1)


def test_work_on_a_device_makes_it_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two GPUs, test_own_gpu.py shows the effect."""
    devices(monkeypatch, 4, 0, "3")
    entered: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", enter)
    for name in ("cpu", "cuda:0", "cuda:3"):
        with use(torch.device(name)):
            pass
    assert entered == [torch.device("cuda:3")]
