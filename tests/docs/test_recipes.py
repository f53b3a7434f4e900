"""The recipes run as their docstrings say, and the network learns."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.started import run_python, torchrun
from PIL import Image
from scipy import stats

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "recipes" / "imagefolder_classification.py"
SIMCLR = REPOSITORY / "recipes" / "simclr.py"
COLOURS = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}
VAL = 7
LINE = re.compile(r"^epoch +(\d+)/(\d+)  loss ([\d.]+)  acc +([\d.]+)%  +([\d,]+) images/s$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy pictures of three colours: what any network learns in a few steps."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    for split, count in {"train": 20, "val": VAL}.items():
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                height, width = rng.integers(36, 64, 2)
                pixels = rng.normal(colour, 25, (height, width, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
    return root


def recipe(
    folder: Path, *options: str, launcher: tuple[str, ...] = (), script: Path = RECIPE, visible: str | None = None
) -> list[tuple[str, ...]]:
    """Runs a recipe for three epochs; gives the fields of the lines that it printed.

    Args:
        folder: Its data.
        *options: Its options, some of which may be repeated.
        launcher: What starts it.
        script: The recipe.
        visible: The GPUs that it may see; None for all.
    """
    settings = ["--size", "32", "--epochs", "3", "--lr", "0.005", "--workers", "1", *options]
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = run_python(*launcher, script, folder, *settings, timeout=110, **variables)
    assert done.returncode == 0, done.stderr
    return LINE.findall(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_learns(folder: Path) -> None:
    lines = recipe(folder, "--batch-size", "8")
    assert [line[:2] for line in lines] == [(epoch, "3") for epoch in "123"]
    losses, accuracies = [float(line[2]) for line in lines], [float(line[3]) for line in lines]
    assert losses[-1] < losses[0]
    assert accuracies[-1] >= 80


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_runs_with_more_augmentation(folder: Path) -> None:
    options = ["--auto-augment", "augmix", "--random-erase", "0.25", "--mixup", "0.2", "--cutmix", "1"]
    lines = recipe(folder, "--batch-size", "8", "--epochs", "1", "--model", "shufflenet_v2_x0_5", *options)
    assert [line[:2] for line in lines] == [("1", "1")]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_learns_without_labels(folder: Path) -> None:
    # Colours are all that there is to learn here, so they are changed little.
    lines = recipe(folder, "--batch-size", "16", "--strength", "0.1", script=SIMCLR)
    assert [line[:2] for line in lines] == [(epoch, "3") for epoch in "123"]
    losses, accuracies = [float(line[2]) for line in lines], [float(line[3]) for line in lines]
    # The loss rises from one epoch to the next at times, in bfloat16 by a tenth.
    assert sum(losses[-2:]) / 2 < losses[0]
    assert accuracies[-1] >= 80


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("script", "options"),
    [(RECIPE, ["--auto-augment", "augmix", "--cutmix", "1", "--model", "shufflenet_v2_x0_5"]), (SIMCLR, [])],
    ids=["labels", "none"],
)
def test_runs_with_dataloader(folder: Path, script: Path, options: list[str]) -> None:
    lines = recipe(folder, "--loader", "torch", "--batch-size", "16", "--epochs", "1", *options, script=script)
    assert [line[:2] for line in lines] == [("1", "1")]


def test_the_model_check_tells_different_accuracies_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    compare = importlib.import_module("benchmarks.studies.agreement").compare
    low, high = [0.70, 0.71, 0.72, 0.73, 0.74], [0.80, 0.81, 0.82, 0.83, 0.84]
    assert compare(high, low)["p"] == pytest.approx(2 / 252, abs=1e-4)
    found = compare(low, [x + 0.001 for x in low])
    assert found["p"] > 0.5
    assert found["difference"] == pytest.approx(-0.001)
    ours, theirs = [0.70, 0.74, 0.78], [0.71, 0.72, 0.79, 0.80]
    welch = stats.ttest_ind(ours, theirs, equal_var=False)
    assert (compare(ours, theirs)["t"], compare(ours, theirs)["df"]) == (
        pytest.approx(welch.statistic, abs=1e-3),
        pytest.approx(welch.df, abs=0.1),
    )
    exact = stats.permutation_test(
        (ours, theirs), lambda a, b: abs(np.mean(a) - np.mean(b)), vectorized=False, alternative="greater"
    )
    assert compare(ours, theirs)["p"] == pytest.approx(exact.pvalue, abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_runs_under_torchrun(folder: Path) -> None:
    # Two processes cannot share one GPU.
    visible = None if torch.cuda.device_count() >= 2 else ""
    options = ["--model", "shufflenet_v2_x0_5", "--batch-size", "4", "--epochs", "1"]
    lines = recipe(folder, *options, launcher=torchrun(2), visible=visible)
    assert len(lines) == 1, "one process of the two prints"
    # Of 21 images two processes get 11 and 10: a part of 22 would mean that one was counted twice.
    counted = float(lines[0][3]) * VAL * len(COLOURS) / 100
    assert math.isclose(counted, round(counted), abs_tol=0.01)


@pytest.mark.timeout(60)
def test_says_that_the_folder_is_too_small(folder: Path) -> None:
    done = run_python(RECIPE, folder, "--batch-size", "61")
    assert done.returncode == 1
    assert "60 training images" in done.stderr
    assert "--batch-size 61" in done.stderr
