"""The recipes with Lightning, Accelerate and fastai run as their docstrings say, and the network learns."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.started import run_python
from PIL import Image

RECIPES = Path(__file__).parents[2] / "recipes"
COLOURS = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}
LINE = re.compile(r"^epoch +(\d+)/(\d+)  loss ([\d.]+)  acc +([\d.]+)%", re.MULTILINE)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


IMPORTS = {
    "lightning_classification.py": ["lightning.pytorch", "torchdali.lightning"],
    "fastai_training.py": ["fastai.vision.all"],
    "accelerate_classification.py": ["torchdali.accelerate"],
}


def run(script: str, *options: object, launcher: tuple[str, ...] = (), succeeds: bool = True) -> list[tuple[str, ...]]:
    """Runs a recipe; gives epoch, number of epochs, loss and accuracy of each line."""
    done = run_python(*launcher, RECIPES / script, *options, timeout=110, imports=IMPORTS[script])
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    return LINE.findall(done.stdout)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy pictures of three colours: what any network learns in a few steps."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    for split, count in {"train": 24, "val": 8}.items():
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                height, width = rng.integers(36, 64, 2)
                pixels = rng.normal(colour, 25, (height, width, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
    return root


SMALL = ["--model", "shufflenet_v2_x0_5", "--size", 32, "--batch-size", 8, "--workers", 1]


@needs("lightning")
def test_lightning(colours: Path, tmp_path: Path) -> None:
    """A run with loaders that is left alone; one with the data module is left in its first epoch, and goes on."""
    options = [colours, *SMALL, "--lr", 0.02, "--epochs", 3]
    whole = run("lightning_classification.py", *options, "--checkpoints", tmp_path / "whole", "--plain")
    assert [line[:2] for line in whole] == [(epoch, "3") for epoch in "123"]
    assert float(whole[-1][2]) < 0.8 * float(whole[0][2])
    options += ["--checkpoints", tmp_path, "--save-every", 4]
    assert run("lightning_classification.py", *options, "--stop-after", 5, succeeds=False) == []
    rest = run("lightning_classification.py", *options, "--resume", tmp_path / "last.ckpt")
    assert [line[0] for line in rest] == ["1", "2", "3"]
    assert rest[1:] == whole[1:]


@needs("accelerate")
@needs("torchdata")
@pytest.mark.parametrize("loader", ["torchdali", "torch"])
def test_accelerate(colours: Path, tmp_path: Path, loader: str) -> None:
    epochs = 3 if loader == "torchdali" else 1
    options = [colours, *SMALL, "--lr", 0.005, "--epochs", epochs, "--loader", loader, "--accumulate", 2]
    options += ["--checkpoint", tmp_path / "kept", "--save-every", 4]
    whole = run("accelerate_classification.py", *options)
    assert [line[:2] for line in whole] == [(str(epoch + 1), str(epochs)) for epoch in range(epochs)]
    if loader == "torchdali":
        assert float(whole[-1][2]) < float(whole[0][2])
        assert run("accelerate_classification.py", *options, "--stop-after", 5, succeeds=False) == []
        assert run("accelerate_classification.py", *options, "--resume")[1:] == whole[1:]


@needs("fastai")
def test_fastai(colours: Path) -> None:
    lines = run("fastai_training.py", colours, *SMALL, "--lr", 0.003, "--epochs", 2)
    assert [line[:2] for line in lines] == [("1", "2"), ("2", "2")]
    assert float(lines[-1][2]) < float(lines[0][2])
