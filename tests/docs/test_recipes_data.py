"""The recipes about views, videos, own datasets and inference run as their docstrings say, with both loaders."""

from __future__ import annotations

import csv
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PER_CLASS, PHOTOGRAPHS
from helpers.started import run_python
from PIL import Image
from torchvision import models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RECIPES = Path(__file__).parents[2] / "recipes"
LINE = re.compile(r"^epoch +(\d+)/(\d+)  loss ([\d.]+)  acc +([\d.]+)%  +([\d,]+) images/s$", re.MULTILINE)
VAL = 3

both = pytest.mark.parametrize("loader", ["torchdali", "torch"])


def run(script: str, *options: object, succeeds: bool = True) -> str:
    """Runs a recipe; gives what it printed."""
    done = run_python(RECIPES / script, *options, timeout=170)
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    return done.stdout if succeeds else done.stderr


@pytest.fixture(scope="module")
def folder(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs' pieces, divided into ``train`` and ``val``."""
    root = tmp_path_factory.mktemp("split")
    for path in pictures.rglob("*.jpg"):
        split = "val" if int(path.stem) < VAL else "train"
        target = root / split / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return root


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy pictures of three colours: what any network learns in a few steps."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    for split, count in {"train": 16, "val": 7}.items():
        for name, colour in {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.normal(colour, 25, (*rng.integers(36, 64, 2), 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
    return root


def test_multicrop(colours: Path) -> None:
    options = ["--size", 32, "--local-size", 16, "--local-crops", 2, "--batch-size", 12, "--outputs", 64]
    options += ["--epochs", 2, "--workers", 1]
    lines = LINE.findall(run("self_supervised_multicrop.py", colours, *options))
    assert [line[:2] for line in lines] == [("1", "2"), ("2", "2")]
    assert float(lines[-1][2]) < float(lines[0][2])


def test_multicrop_with_too_few_images(folder: Path) -> None:
    said = run("self_supervised_multicrop.py", folder, "--batch-size", 99, succeeds=False)
    assert f"{(PER_CLASS - VAL) * len(PHOTOGRAPHS)} training images are less than --batch-size 99" in said


def test_videos(tmp_path: Path) -> None:
    options = ["--frames", 8, "--size", 48, "--network", "small", "--lr", 0.01, "--epochs", 3, "--workers", 1]
    said = run("video_classification.py", tmp_path, "--example", *options)
    assert re.search(r"^decode +(PyAV|PyNvVideoCodec)", said, re.MULTILINE)
    line = re.compile(r"^epoch \d/3  loss ([\d.]+)  acc [\d.]+%  [\d.]+ clips/s$", re.MULTILINE)
    losses = [float(loss) for loss in line.findall(said)]
    assert len(losses) == 3
    assert losses[2] < 0.8 * losses[0]


@both
def test_sounds(
    tmp_path: Path, loader: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--example", "--epochs", "2", "--workers", "0", "--loader", loader]
    monkeypatch.setattr(sys, "argv", ["speech_commands.py", str(tmp_path), *options])
    runpy.run_path(str(RECIPES / "speech_commands.py"), run_name="__main__")  # in this process, which is cheaper
    said = capsys.readouterr().out
    assert ("5 of 5 transforms run in DALI" in said) == (loader == "torchdali")
    line = re.compile(r"^epoch \d/2  loss ([\d.]+)  acc [\d.]+%  \d+ sounds/s$", re.MULTILINE)
    first, second = map(float, line.findall(said))
    assert second < 0.8 * first


@pytest.mark.parametrize("loader", ["torchdali", "timm"])
def test_timm(colours: Path, loader: str) -> None:
    pytest.importorskip("timm")
    epochs = 2 if loader == "torchdali" else 1
    options = ["--size", 32, "--batch-size", 8, "--epochs", epochs, "--workers", 1, "--loader", loader]
    said = run("timm_training.py", colours, *options)
    lines = LINE.findall(said)
    assert [line[:2] for line in lines] == [(str(epoch + 1), str(epochs)) for epoch in range(epochs)]
    if loader == "timm":
        assert "DALI" not in said
    else:
        assert max(float(line[3]) for line in lines) >= 80
        plan = said.partition("\ndecode ")[2].partition("\noperators ")[0]
        assert "DALI" in plan
        assert " torch " not in plan


@both
def test_a_dataset_of_ones_own(tmp_path: Path, loader: str) -> None:
    epochs = 2 if loader == "torchdali" else 1
    options = ["--epochs", epochs, "--size", 32, "--workers", 2, "--loader", loader, "--example"]
    said = run("existing_dataset.py", tmp_path / "scans", *options)
    assert ("its samples come from 2 worker processes" in said) == (loader == "torchdali")
    if loader == "torchdali":
        assert re.search(r"RandomAffine\(.*(\n {21}.*)*\n {21}draws angle", said)
        assert "at ['scan'] of dataset[0]: uint8 (1, H, W)" in said
    lines = LINE.findall(said)
    assert len(lines) == epochs
    if loader == "torchdali":
        assert float(lines[-1][2]) < float(lines[0][2])
        assert max(float(line[3]) for line in lines) >= 80
    missed = re.search(r"^not recognised: (.*)$", said, re.MULTILINE)
    assert missed is not None
    with (tmp_path / "scans" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    splits = {split: {row["patient"] for row in rows if row["split"] == split} for split in ("train", "val")}
    assert not splits["train"] & splits["val"], "a patient is in both"
    assert set(missed[1].split(", ")) <= {*splits["val"], "none"}
    assert (len(rows), len(splits["train"]), len(splits["val"])) == (160, 30, 10)


def predictions(path: Path) -> list[tuple[str, int, float]]:
    with path.open(newline="") as file:
        return [(row["file"], int(row["prediction"]), float(row["probability"])) for row in csv.DictReader(file)]


def test_inference_keeps_names_and_order(pictures: Path, tmp_path: Path) -> None:
    """Each file's own prediction stands beside its name, with both loaders, in batches that do not divide the count."""
    torch.manual_seed(0)
    model = models.get_model("resnet18", num_classes=7).eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    out = {loader: tmp_path / f"{loader}.csv" for loader in ("torchdali", "torch")}
    for loader, file in out.items():
        options = ["--checkpoint", tmp_path / "model.pt", "--classes", 7, "--batch-size", 5, "--workers", 1]
        said = run("inference.py", pictures, *options, "--loader", loader, "--out", file)
        assert f"{PER_CLASS * len(PHOTOGRAPHS)} predictions in {file}" in said
    ours, theirs = predictions(out["torchdali"]), predictions(out["torch"])
    names = sorted(str(path.relative_to(pictures)) for path in pictures.rglob("*.jpg"))
    assert [name for name, *_ in ours] == [name for name, *_ in theirs] == names
    assert len({probability for *_, probability in theirs}) > len(names) // 2, "else an exchange would not be seen"
    for one, other in zip(ours, theirs, strict=True):
        # JPEGs are decoded otherwise on a GPU.
        assert one[2] == pytest.approx(other[2], abs=0.02 if torch.cuda.is_available() else 0.002)
    assert sum(one[1] == other[1] for one, other in zip(ours, theirs, strict=True)) >= len(names) - 2


def test_inference_on_a_flat_folder_and_on_none(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    run("inference.py", pictures / "coffee", "--batch-size", 3, "--out", out, "--workers", 1)
    assert [name for name, *_ in predictions(out)] == [f"{number}.jpg" for number in range(PER_CLASS)]
    assert "there are no images under" in run("inference.py", tmp_path, "--out", out, succeeds=False)


@pytest.mark.parametrize("mode", ["replace", "raise"])
def test_damaged_files(tmp_path: Path, mode: str) -> None:
    table = tmp_path / "damaged.csv"
    options = ["--example", "--epochs", 2, "--size", 32, "--batch-size", 80, "--on-error", mode, "--table", table]
    said = run("damaged_dataset.py", tmp_path / "pictures", *options, succeeds=mode != "raise")
    if mode == "raise":
        assert "SampleError" in said
        assert not table.exists()
        return
    classes = sorted(path for path in (tmp_path / "pictures").iterdir())
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    damaged = [sorted(folder.iterdir())[number] for number, folder in enumerate(classes)]
    assert sorted(row["file"] for row in rows) == sorted(map(str, damaged))
    assert all(row["reason"] for row in rows)
    seen = re.findall(r"(\d+) images, (\d+) damaged$", said, re.MULTILINE)
    assert seen == [(str(16 * len(classes)), str(len(classes)))] * 2


@both
def test_shards_are_read_from_a_store(pictures: Path, tmp_path: Path, loader: str) -> None:
    pytest.importorskip("obstore")
    options = ["--cache-dir", tmp_path, "--size", 32, "--epochs", 2, "--batch-size", 8, "--classes", 3]
    printed = run("s3_training.py", "--folder", pictures, *options, "--loader", loader, "--workers", 1)
    count = len(PHOTOGRAPHS) * PER_CLASS
    kept = count if loader == "torchdali" else 0
    assert printed.startswith(f"{count} images in 1 shards, from s3://stand-in/")
    assert len(re.findall(rf"^epoch \d/2  loss [\d.]+  {kept} images kept$", printed, re.MULTILINE)) == 2


def test_shards_are_packed_and_read(pictures: Path, tmp_path: Path) -> None:
    options = ["--shards", tmp_path, "--size", 32, "--epochs", 2, "--batch-size", 8]
    printed = run("webdataset_shards.py", pictures, *options)
    count = len(PHOTOGRAPHS) * PER_CLASS
    assert printed.startswith(f"{count} images in 1 shards")
    assert len(re.findall(rf"^epoch \d/2  loss [\d.]+  {count} images$", printed, re.MULTILINE)) == 2
