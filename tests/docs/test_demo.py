"""``torchdali demo``: the pictures, the comparison, and the command as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers.started import run_python
from PIL import Image
from rich.console import Console

from torchdali.tools import cli
from torchdali.tools.demo.compare import COLUMNS, Run, compare, show, write_grid
from torchdali.tools.demo.pictures import PICTURES, SPLITS, draw_boxes, write_pictures
from torchdali.tools.demo.train import SIZE, Settings, Training
from torchdali.tools.parity.bounds import FLOATING

LEFT, GAP = 110, 4
"""The labels' column, and the space between pictures."""
GREY = ("brick", "camera", "coins", "grass", "gravel", "moon")


def demo(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command, which reads each picture once for each time that it measures."""
    once = "import sys; from torchdali.tools import cli, demo; compare = sys.modules['torchdali.tools.demo.compare']\n"
    once += "demo.REPEATS = demo.ROUNDS = compare.REPEATS = compare.ROUNDS = 1\ncli.main()\n"
    script = out / "demo.py"
    script.write_text(once)
    return run_python(script, "demo", "--out", out, *options, timeout=170, COLUMNS="120")


def pixels(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image)


def cells(output: str, row: str) -> list[str]:
    """The two cells of a row of the printed table."""
    line = next(line for line in output.splitlines() if row in line)
    return [cell.strip() for cell in line.strip("│ ").split("│")][1:]


@pytest.mark.parametrize("command", ["demo", "parity"])
def test_where_nothing_can_be_made_is_said_before_the_work(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "some" / "out"
    done = CliRunner().invoke(cli.commands(), [command, "--out", str(out)])
    assert done.exit_code == 2
    assert "cannot be written" in done.output


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_demo_command(tmp_path: Path) -> None:
    done = demo(tmp_path, "--epochs", "2", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr

    assert cells(done.stdout, "images on") == ["cpu", "cpu"]
    assert cells(done.stdout, "batches in equal order") == ["", "yes"]
    assert int(cells(done.stdout, "largest pixel difference")[1]) <= 3
    # Where torchvision resizes as float32, it rounds once, not after each axis.
    assert float(cells(done.stdout, "mean pixel difference")[1]) < (0.2 if FLOATING else 0.1)
    chance = 100 / len(PICTURES)
    for accuracy in cells(done.stdout, "validation accuracy"):
        assert float(accuracy.rstrip("%")) > 3 * chance
    assert all(int(speed.replace(",", "")) > 0 for speed in cells(done.stdout, "images/s, training"))

    ours, theirs, _ = read_rows(tmp_path / "first_batch.png")
    assert ours.std() > 10, "the row is blank"
    assert np.abs(ours - theirs).mean() < 1, "the rows have the same crops"


def read_rows(grid: Path) -> list[np.ndarray]:
    """The three rows of pictures, without the labels."""
    image = pixels(grid).astype(float)
    height = SIZE + GAP
    rows = [image[image.shape[0] - (3 - row) * height :][:SIZE, LEFT : LEFT + COLUMNS * height] for row in range(3)]
    return [row.reshape(SIZE, COLUMNS, height, 3)[:, :, :SIZE] for row in rows]


def test_pictures(tmp_path: Path) -> None:
    ticks: list[int] = []
    write_pictures(tmp_path / "a", train=3, val=2, seed=5, tick=ticks.append)
    assert sum(ticks) == len(PICTURES) * 5
    files = sorted((tmp_path / "a").rglob("*.jpg"))
    assert len(files) == len(PICTURES) * 5
    assert {file.parent.name for file in files} == {Path(name).stem for name in PICTURES}
    shapes = [pixels(file).shape for file in files]
    assert {len(shape) for shape in shapes} == {2, 3}, "some are grey"
    assert len({shape[:2] for shape in shapes}) > len(files) // 2

    write_pictures(tmp_path / "b", train=3, val=2, seed=5, tick=ticks.append)
    write_pictures(tmp_path / "c", train=3, val=2, seed=6, tick=ticks.append)
    again = sorted((tmp_path / "b").rglob("*.jpg"))
    other = sorted((tmp_path / "c").rglob("*.jpg"))
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in other] != [file.read_bytes() for file in files]


@pytest.mark.parametrize("size", [(512, 512), (451, 300), (303, 384), (1411, 1411)])
def test_splits_share_no_pixel(size: tuple[int, int]) -> None:
    covered = {split: np.zeros(size, bool) for split in SPLITS}
    for split, part in SPLITS.items():
        for left, top, right, bottom in draw_boxes(size, part, 200, np.random.default_rng(1)):
            assert 0 <= left < right <= size[0]
            assert 0 <= top < bottom <= size[1]
            covered[split][left:right, top:bottom] = True
    assert not (covered["train"] & covered["val"]).any()
    assert (covered["train"] | covered["val"]).mean() > 0.9


def a_run() -> Run:
    torch.manual_seed(0)
    views = torch.randint(0, 256, (6, 3, SIZE, SIZE), dtype=torch.uint8)
    training = Training(torch.arange(12), accuracy=0.8, speed=100.0)
    return Run(torch.device("cpu"), torch.randperm(6), views, training)


def test_equal_runs_compare_equal() -> None:
    comparison = compare(a_run(), a_run())
    assert (comparison.same_order, comparison.largest, comparison.mean) == (True, 0, 0.0)


def test_pixel_differences_are_measured_without_wrapping() -> None:
    run, other = a_run(), a_run()
    run.views[0, 0, 0, 0], other.views[0, 0, 0, 0] = 0, 255
    comparison = compare(run, other)
    assert comparison.same_order
    assert comparison.largest == 255
    assert comparison.mean == pytest.approx(255 / run.views.numel(), rel=1e-4)


@pytest.mark.parametrize("wrong", ["files", "images", "training", "short"])
def test_another_order_is_seen(wrong: str) -> None:
    run, other = a_run(), a_run()
    swapped = [1, 0, 2, 3, 4, 5]
    other = {
        "files": lambda: replace(other, files=other.files[swapped]),
        "images": lambda: replace(other, views=other.views[swapped]),
        "training": lambda: replace(other, training=replace(other.training, labels=other.training.labels.flip(0))),
        "short": lambda: replace(other, training=replace(other.training, labels=other.training.labels[:-1])),
    }[wrong]()
    comparison = compare(run, other)
    assert not comparison.same_order

    shown = StringIO()
    show(comparison, Console(file=shown, width=100))
    assert cells(shown.getvalue(), "batches in equal order") == ["", "no"]


def test_the_grid_shows_the_same_crops_and_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path, train=1, val=0, seed=0, tick=lambda _: None)
    run = replace(a_run(), files=torch.arange(len(PICTURES)).flip(0))
    settings = Settings(tmp_path, torch.device("cpu"), 1, 1, 3)
    write_grid(compare(run, run), settings, tmp_path / "grid.png")
    ours, theirs, difference = read_rows(tmp_path / "grid.png")
    assert np.abs(ours - theirs).mean() < 1
    assert (difference > 0).any() == (ours != theirs).any()
    spread = [float(ours[:, column].std()) for column in range(COLUMNS)]
    assert min(spread) > 3, "every column has a picture"
    grey = [np.ptp(ours[:, column], axis=-1).max() == 0 for column in range(COLUMNS)]
    assert grey == [name in GREY for name in sorted(Path(name).stem for name in PICTURES)[::-1][:COLUMNS]]


def test_command_line_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit, match=r"needs rich: pip install '\.\[cli\]' in a checkout"):
        cli.main()


def test_command_line_imports_with_core_dependencies() -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(['click', 'rich', 'skimage'])); import torchdali.tools.cli"
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.commands(), ["demo", "--device", "cuda", "--out", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "no CUDA device" in done.output
    assert not (tmp_path / "none").exists()
