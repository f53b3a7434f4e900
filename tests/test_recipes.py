"""The recipes run as their docstrings say, and the network learns."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

RECIPE = Path(__file__).parents[1] / "recipes" / "imagefolder_classification.py"
COLOURS = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}
VAL = 7
LINE = re.compile(r"^epoch +(\d+)/(\d+)  loss ([\d.]+)  acc +([\d.]+)%  +([\d,]+) images/s$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy pictures of three colours: what any network learns in a few steps."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    for split, count in {"train": 32, "val": VAL}.items():
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                height, width = rng.integers(36, 64, 2)
                pixels = rng.normal(colour, 25, (height, width, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
    return root


def recipe(folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Runs the recipe for four epochs; gives the fields of the lines that it printed."""
    command = [sys.executable, *launcher, str(RECIPE), str(folder), "--size", "32", "--epochs", "4"]
    settings = ["--lr", "0.02", "--workers", "1", *options]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return LINE.findall(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("loader", ["torchdali", "torch"])
def test_learns(folder: Path, loader: str) -> None:
    lines = recipe(folder, "--loader", loader, "--batch-size", "8")
    assert [line[:2] for line in lines] == [(str(epoch), "4") for epoch in (1, 2, 3, 4)]
    losses, accuracies = [float(line[2]) for line in lines], [float(line[3]) for line in lines]
    assert losses[-1] < losses[0]
    assert accuracies[-1] >= 80


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_runs_under_torchrun(folder: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = recipe(folder, "--batch-size", "4", launcher=launcher)
    assert len(lines) == 4, "one process of the two prints"
    accuracies = [float(line[3]) for line in lines]
    assert accuracies[-1] >= 80
    # Of 21 images two processes get 11 and 10: a part of 22 would mean that one was counted twice.
    counted = accuracies[-1] * VAL * len(COLOURS) / 100
    assert math.isclose(counted, round(counted), abs_tol=0.01)


@pytest.mark.timeout(60)
def test_says_that_the_folder_is_too_small(folder: Path) -> None:
    command = [sys.executable, str(RECIPE), str(folder), "--batch-size", "97"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "96 training images" in done.stderr
    assert "--batch-size 97" in done.stderr
