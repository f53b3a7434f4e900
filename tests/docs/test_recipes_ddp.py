"""The recipe that is killed goes on: the same images in every epoch, whoever died and however many processes go on."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers.proxied import difference
from helpers.started import run_python, torchrun

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "recipes" / "ddp_classification.py"
LINE = re.compile(r"^epoch +(\d)/3  loss [\d.]+  (\d+ of \d+) images, (\d+) twice  checksum (\w{16})$", re.MULTILINE)
TOTAL = re.compile(r"^checksum of 3 epochs  (\w{16})$", re.MULTILINE)
COUNT = 23

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Run(NamedTuple):
    """What a run said.

    Attributes:
        code: Its exit status.
        epochs: Of each epoch that it ended: number, images, repeated ones, checksum.
        total: The checksum of all of them.
        text: All of it.
    """

    code: int
    epochs: list[tuple[str, ...]]
    total: list[str]
    text: str


def run(data: Path, checkpoint: Path, processes: int, *options: str, visible: str | None = "") -> Run:
    """Trains for three epochs of six batches for each of two processes, and saves after every fourth batch."""
    settings = ["--checkpoint", checkpoint, "--batch-size", "2", "--size", "16", "--save-every", "4", *options]
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    own |= {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
    done = run_python(*torchrun(processes), RECIPE, data, *settings, timeout=110, **own)
    return Run(done.returncode, LINE.findall(done.stdout), TOTAL.findall(done.stdout), done.stdout + done.stderr)


@pytest.fixture(scope="module")
def data(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    shutil.copytree(pictures, root / "train")
    for path in sorted((root / "train").rglob("*.jpg"))[COUNT:]:
        path.unlink()
    return root


@pytest.fixture(scope="module")
def whole(data: Path) -> Run:
    """A run that nobody killed."""
    done = run(data, data / "whole.pt", 2)
    assert done.code == 0, done.text
    return done


@pytest.fixture(scope="module")
def killed(data: Path) -> Path:
    """The checkpoint of a run of which all processes were killed in the second epoch, two batches after that."""
    done = run(data, data / "killed.pt", 2, "--kill-after", "10")
    assert done.code != 0
    assert "exitcode: -9" in done.text
    assert len(done.epochs) == 1
    return data / "killed.pt"


def test_all_images_come_once(whole: Run) -> None:
    assert [line[:3] for line in whole.epochs] == [(str(epoch), f"{COUNT} of {COUNT}", "1") for epoch in (1, 2, 3)]
    assert len({line[3] for line in whole.epochs}) == 3
    assert [f"{sum(int(line[3], 16) for line in whole.epochs) % 2**64:016x}"] == whole.total


def test_goes_on_after_all_were_killed(data: Path, whole: Run, killed: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copy(killed, tmp_path))
    again = run(data, checkpoint, 2)
    assert again.code == 0, again.text
    assert "resumes after 8 images of epoch 2" in again.text
    assert (again.epochs, again.total) == (whole.epochs[1:], whole.total)
    ours, theirs = (torch.load(path, weights_only=True) for path in (checkpoint, data / "whole.pt"))
    assert not difference(ours["model"], theirs["model"]), "the network is the same, bit by bit"


def test_goes_on_with_another_number_of_processes(data: Path, whole: Run, killed: Path, tmp_path: Path) -> None:
    again = run(data, Path(shutil.copy(killed, tmp_path)), 1, "--batch-size", "3")
    assert again.code == 0, again.text
    assert [(*line[:2], line[3]) for line in again.epochs] == [(*line[:2], line[3]) for line in whole.epochs[1:]]
    assert again.total == whole.total


@pytest.mark.gpu
def test_goes_on_on_a_gpu_and_on_two(data: Path, tmp_path: Path) -> None:
    most = min(2, torch.cuda.device_count())
    done = run(data, tmp_path / "whole.pt", most, visible=None)
    assert done.code == 0, done.text
    dead = run(data, tmp_path / "killed.pt", most, "--kill-after", "14", visible=None)
    assert dead.code != 0
    assert f"rank {most - 1} of {most}, on cuda:{most - 1}" in dead.text
    for processes in {1, most}:
        again = run(data, Path(shutil.copy(tmp_path / "killed.pt", tmp_path / "again.pt")), processes, visible=None)
        assert again.code == 0, again.text
        assert again.total == done.total


def test_any_bit_changes_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPE.parent)
    compute = importlib.import_module("ddp_classification").compute_fingerprints
    images = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    every = images.repeat(1 + images.numel() * 32, 1, 1, 1)
    bits = every.view(torch.int32).view(len(every), -1)
    for place in range(images.numel() * 32):
        bits[1 + place, place // 32] ^= torch.tensor(1 << (place % 32)).to(torch.int32)
    found = compute(every)
    assert len(set(found.tolist())) == len(every)
    assert found.min() > 0
    assert compute(images[:, :, :, [1, 0, 2, 3, 4]]).item() != found[0].item()
    assert torch.equal(compute(every[:7].to(memory_format=torch.channels_last)), found[:7])
