"""Lightning's Trainer with two processes: each rank's share is the one that DataLoader would give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from helpers.processes import run_ranks

pytest.importorskip("lightning.pytorch", reason="needs lightning")

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
SHARE = 12


def run(strategy: str, pictures: Path, results: Path, device: str = "cpu") -> None:
    """Runs the script, which starts the other rank."""
    run_ranks("lightning_ranks.py", (strategy, pictures, results), limit=150, TRAINED_ON=device)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def found(request: Any, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank kept."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    results = tmp_path_factory.mktemp("ddp")
    run("ddp", pictures, results, request.param)
    return [torch.load(results / str(rank)) for rank in range(2)]


@pytest.mark.parametrize("kind", ["read", "read, workers", "asked", "asked, workers"])
def test_shares_are_dataloaders(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        assert rank[kind] == rank["true"]
    assert len({label for rank in found for _, _, labels in rank[kind]["seen"] for label in labels}) == 23
    assert [len(rank["true"]["seen"]) for rank in found] == [6, 6]
    predicted = [label for rank in found for labels in rank[kind]["predicted"] for label in labels]
    assert sorted(predicted) == list(range(23)), "which Lightning repeats nothing of"


@pytest.mark.parametrize("kind", ["read", "asked"])
def test_nothing_is_shared_twice(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        assert rank[f"{kind}, auto"]["seen"] == rank["true"]["seen"]
        assert rank[f"{kind}, auto"]["validated"] == rank["true"]["validated"]
        assert sum(map(len, rank[f"{kind}, auto"]["predicted"])) == SHARE


def test_arguments_are_kept(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert all(rank["kept"]["same"].values()), rank["kept"]["same"]
        assert rank["kept"]["type"] == "DALILoader"
        assert rank["kept"]["sampler"] == "DistributedSampler"
        assert rank["kept"]["window"] is None


@pytest.mark.parametrize("run", ["plain", "module, 3", "module, 4"])
@pytest.mark.parametrize("kind", ["read", "asked, workers"])
def test_every_rank_goes_on(found: list[dict[str, Any]], kind: str, run: str) -> None:
    """In the midst of an epoch, and the data module's at its end, from what rank 0 had saved."""
    for rank in found:
        ours, true = rank[f"{kind}, resumed"][run]
        assert same([seen[2:] for seen in ours], [seen[2:] for seen in true])
        assert len(ours) in (2, 3)


def test_spawned_processes_get_the_loaders(found: list[dict[str, Any]], pictures: Path, tmp_path: Path) -> None:
    run("ddp_spawn", pictures, tmp_path)
    for number, rank in enumerate(found):
        assert torch.load(tmp_path / str(number)) == rank["true"]["seen"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, as Lightning's FSDPStrategy does")
def test_fsdp_gets_the_loaders(found: list[dict[str, Any]], pictures: Path, tmp_path: Path) -> None:
    run("fsdp", pictures, tmp_path, "cuda")
    for number, rank in enumerate(found):
        assert torch.load(tmp_path / str(number)) == rank["true"]["seen"]
