"""The recipes about boxes, masks, key points and volumes run as their docstrings say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.started import run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RECIPES = Path(__file__).parents[2] / "recipes"
LINE = re.compile(
    r"^epoch +(\d+)/\d+  loss ([\d.]+)  (?:found|IoU|off) +([\d.]+)(?:%| px)  +[\d,]+ images/s$", re.MULTILINE
)


def run(script: str, folder: Path, *options: object) -> tuple[str, list[tuple[str, ...]]]:
    """Run a recipe, and return what it printed and the numbers of its epochs."""
    done = run_python(RECIPES / script, folder, "--example", "--workers", 1, *options, timeout=170, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, LINE.findall(done.stdout)


def test_detection(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    text, epochs = run("detection.py", tmp_path, "--model", "ssdlite320_mobilenet_v3_large", "--epochs", 1)
    assert len(epochs) == 1
    assert re.search(r"DALI \w+ +RandomIoUCrop", text)
    assert 0 < float(epochs[0][1]) < 40


def test_segmentation(tmp_path: Path) -> None:
    options = ["--classes", 3, "--size", 48, "--model", "lraspp_mobilenet_v3_large", "--epochs", 2]
    text, epochs = run("segmentation.py", tmp_path, *options)
    assert re.search(r"DALI \w+ +RandomCrop", text)
    assert float(epochs[1][1]) < float(epochs[0][1])


def test_volumes(tmp_path: Path) -> None:
    text, _ = run("volumes.py", tmp_path, "--patch", 16, "--batch-size", 4, "--epochs", 2)
    epochs = re.findall(r"^epoch \d/2  loss ([\d.]+)  dice ([\d.]+)$", text, re.MULTILINE)
    assert float(epochs[1][0]) < float(epochs[0][0])
    assert float(epochs[1][1]) > 0.8


def test_keypoints(tmp_path: Path) -> None:
    _, epochs = run("keypoints.py", tmp_path, "--size", 32, "--batch-size", 32, "--epochs", 3)
    assert float(epochs[2][1]) < float(epochs[0][1])
