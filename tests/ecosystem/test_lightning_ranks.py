"""Lightning's Trainer gives each of two ranks the share that it gives it of a DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from helpers.forked_ranks import run_ranks
from torch.utils.data import DistributedSampler

pytest.importorskip("lightning.pytorch", reason="needs lightning")

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
COUNT, SHARE = 23, 12


def run(strategy: str, pictures: Path, results: Path, device: str = "cpu") -> None:
    """Runs the script, which starts the other rank."""
    run_ranks("lightning_ranks.py", (strategy, pictures, results), limit=150, TRAINED_ON=device)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def seen(request: Any, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    results = tmp_path_factory.mktemp("ddp")
    run("ddp", pictures, results, request.param)
    return [torch.load(results / str(rank)) for rank in range(2)]


@pytest.mark.parametrize("kind", ["read, workers"])
def test_shares_are_dataloaders(seen: list[dict[str, Any]], kind: str) -> None:
    assert all(rank[kind] == rank["true"] for rank in seen)
    assert {label for rank in seen for *_, labels in rank[kind]["seen"] for label in labels} == set(range(COUNT))
    predicted = [label for rank in seen for labels in rank[kind]["predicted"] for label in labels]
    assert sorted(predicted) == list(range(COUNT)), "Lightning repeats nothing in predictions"


def test_a_loader_that_is_shared_already_is_not_shared_again(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["auto"]["seen"] == rank["true"]["seen"]
        assert rank["auto"]["validated"] == rank["true"]["validated"]
        assert sum(map(len, rank["auto"]["predicted"])) == SHARE


def test_arguments_are_kept(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert all(rank["kept"]["same"].values()), rank["kept"]["same"]
        assert rank["kept"]["type"] == "DALILoader"
        assert rank["kept"]["sampler"] == "DistributedSampler"
        assert rank["kept"]["window"] is None


@pytest.mark.parametrize("name", ["plain, 4", "module, 4"])
def test_every_rank_resumes_from_what_the_first_saved(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        ours, true = rank["resumed"][name]
        assert len(ours) == 6 - int(name[-1])
        assert same([batch[2:] for batch in ours], [batch[2:] for batch in true])


GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two CUDA devices, as Lightning's FSDPStrategy does"
    ),
]


@pytest.mark.parametrize(("strategy", "device"), [pytest.param("fsdp", "cuda", marks=GPUS)])
def test_other_strategies_get_the_loaders(pictures: Path, tmp_path: Path, strategy: str, device: str) -> None:
    run(strategy, pictures, tmp_path, device)
    for rank in range(2):
        sampler, share = DistributedSampler(range(COUNT), 2, rank), []  # pyright: ignore
        for epoch in range(2):
            sampler.set_epoch(epoch)
            share += sampler
        assert [label for *_, labels in torch.load(tmp_path / str(rank)) for label in labels] == share
