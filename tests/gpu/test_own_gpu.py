"""Every rank uses its own GPU: batches lie there, and there is no context on another one, which would take memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
REPOSITORY = Path(__file__).parents[2]
CONTEXT_MIB = 100
"""A context takes several times as much."""


def run(pictures: Path, folder: Path, ranks: dict[int, str], **variables: str) -> list[dict[str, Any]]:
    """What each rank found, by its LOCAL_RANK; the value says how it comes by its device."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, REPOSITORY / "tests" / "helpers" / "own_gpu.py", pictures, folder / f"{rank} {how}", how],
            env={**os.environ, "PYTHONPATH": path, "LOCAL_RANK": str(rank), "RANK": str(rank), **variables},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, how in ranks.items()
    ]
    try:
        said = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(ranks), "\n".join(said)
    return [json.loads((folder / f"{rank} {how}").read_text()) for rank, how in ranks.items()]


def devices(found: dict[str, Any]) -> dict[str, set[str]]:
    """By what was done, where the tensors of the batches lay."""
    batches = {
        name: batches for name, batches in found["batches"].items() if name not in ("explain", "probe", "compile")
    }
    kept = {name: {device for where, _ in each for device in where} for name, each in batches.items()}
    return kept | {"compile": {found["batches"]["compile"][0]}}


@pytest.fixture(scope="module")
def alone(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process with LOCAL_RANK=1 and nobody beside it, which leaves torch's current device as it is."""
    return run(pictures, tmp_path_factory.mktemp("alone"), {1: "auto"})[0]


def test_local_rank_says_where_batches_are(alone: dict[str, Any]) -> None:
    assert (alone["current"], alone["current at the end"]) == (0, 0)
    assert set(map(frozenset, devices(alone).values())) == {frozenset({"cuda:1"})}, devices(alone)
    assert "cuda:1 (LOCAL_RANK; torch's current device is cuda:0)" in alone["batches"]["explain"]


def test_nothing_is_on_the_first_gpu(alone: dict[str, Any]) -> None:
    print(f"MiB in use on the first GPU, before and after: {alone['first']}")
    guilty = [name for name, contexts in alone["contexts"].items() if 0 in contexts]
    assert not guilty, f"a context on the first GPU since: {guilty[0]}"
    before, after = alone["first"]
    assert after - before < CONTEXT_MIB


def test_batches_are_those_of_a_current_device(alone: dict[str, Any], pictures: Path, tmp_path: Path) -> None:
    (chosen,) = run(pictures, tmp_path, {1: "set_device"})
    assert (chosen["current"], chosen["current at the end"]) == (1, 1)
    assert not [name for name, contexts in chosen["contexts"].items() if 0 in contexts]
    for found in (alone, chosen):
        found["batches"].pop("explain", None)
    assert chosen["batches"] == alone["batches"]


@pytest.mark.parametrize("how", ["auto", "set_device"])
def test_two_ranks_keep_apart(pictures: Path, tmp_path: Path, how: str) -> None:
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = run(pictures, tmp_path, {0: how, 1: how}, **store)
    for number, found in enumerate(ranks):
        assert set(map(frozenset, devices(found).values())) == {frozenset({f"cuda:{number}"})}
        assert [name for name, contexts in found["contexts"].items() if set(contexts) - {number}] == []
        assert f"ranks      {number} of 0 to 1; 12 of 24 samples to each" in found["batches"]["explain"]
