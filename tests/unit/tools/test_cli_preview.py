"""``torchdali preview``: both sides of the grid, the difference, and the summary."""

from __future__ import annotations

import base64
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from conftest import CROP
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali.tools.cli import commands
from torchdali.tools.commands.grid import Sample, _make_tile, _shorten, choose_magnification, write_grid
from torchdali.tools.commands.preview import make_samples
from torchdali.tools.parity.compare import compile_chain
from torchdali.transforms import MultiView
from torchdali.transforms.rules.flip import RandomHorizontalFlip
from torchdali.transforms.targets import Boxes

pytestmark = pytest.mark.timeout(60)

MEAN, STD = [0.3, 0.4, 0.5], [0.2, 0.3, 0.1]
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
LEFT, GAP, TEXT = 110, 4, 18

MINE = """
import torch
from torchvision.transforms import v2

class Own:
    def __call__(self, image):
        return image

flips = v2.Compose([v2.ToImage(), v2.CenterCrop(24), v2.RandomHorizontalFlip()])
ends_in_torch = v2.Compose([v2.ToImage(), v2.CenterCrop(24), Own(), v2.RandomHorizontalFlip()])
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / f"previewed_{tmp_path.name}.py"
    file.write_text(MINE)
    return file


def run(folder: Path | str, *options: object) -> Result:
    return CliRunner().invoke(commands(), ["preview", str(folder), *map(str, options)])


def flatten_output(result: Result) -> str:
    return " ".join(result.output.replace("\u2502", " ").split())


def pixels(file: Any) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image)


def tiles(grid: np.ndarray, side: int) -> list[list[np.ndarray]]:
    """Return the pictures of a grid, row by row."""
    rows = [grid[grid.shape[0] - (3 - row) * (side + GAP) :][:side, LEFT:] for row in range(3)]
    starts = range(0, grid.shape[1] - LEFT - side + 1, side + GAP)
    return [[row[:, start : start + side] for start in starts] for row in rows]


def test_a_grid_of_three_rows(pictures: Path, mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    options = ("--transform", f"{mine}:flips", "--samples", 20, "--device", "cpu", "--output", out)

    result = run(pictures, *options)

    assert result.exit_code == 0, result.output
    assert "20 images by torchdali with DALI on the CPU" in flatten_output(result)
    assert "and their difference: at most 0 of 255 grey levels, 0 on average." in flatten_output(result)
    ours, theirs, difference = tiles(pixels(out), CROP)
    assert len(ours) == len(theirs) == len(difference) == 20
    assert np.array_equal(ours, theirs)
    assert np.max(difference) == 0
    # Each is a file of the folder, as it is or flipped, and both occur.
    crop = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)])
    known = {image.numpy().tobytes(): i for i, (image, _) in enumerate(ImageFolder(pictures, crop))}
    as_is = [known.get(tile.transpose(2, 0, 1).tobytes()) for tile in ours]
    flipped = [known.get(tile[:, ::-1].transpose(2, 0, 1).tobytes()) for tile in ours]
    found = [one if one is not None else other for one, other in zip(as_is, flipped, strict=True)]
    assert None not in found
    assert found == sorted(set(found)), "a sample is shown twice, or out of order"
    assert 2 < sum(one is not None for one in as_is) < 18

    again, other = tmp_path / "again.png", tmp_path / "other.png"
    run(pictures, *options[:-1], again)
    run(pictures, *options[:-1], other, "--seed", 1)
    assert again.read_bytes() == out.read_bytes() != other.read_bytes()


def test_a_difference_is_magnified_and_told(
    pictures: Path, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomHorizontalFlip, "reference", lambda self, image, sample: image // 2 + 3)
    monkeypatch.setattr("torchdali.transforms.rules.flip.RandomHorizontalFlip.draw", still)
    out = tmp_path / "grid.png"
    result = run(pictures, "--transform", f"{mine}:flips", "--samples", 3, "--output", out, "--device", "cpu")
    ours, theirs, difference = (np.array(row, np.int64) for row in tiles(pixels(out), CROP))
    between = np.abs(ours - theirs)
    assert np.array_equal(difference[:3], np.minimum(2 * between[:3], 255))
    assert 2 * np.quantile(between[:3][between[:3] > 0], 0.99) <= 255
    assert f"at most {between[:3].max():.3g} of 255 grey levels, {between[:3].mean():.3g} on average" in flatten_output(
        result
    )
    assert between[:3].max() > 20


def still(self: Any, draws: Any, size: np.ndarray) -> dict[str, Any]:
    """Draw no flip."""
    return {"flip": np.zeros(len(size), np.int32)}


def test_a_page(pictures: Path, mine: Path, tmp_path: Path) -> None:
    out, grid = tmp_path / "grid.HTML", tmp_path / "grid.png"
    for file in (out, grid):
        options = ("--transform", f"{mine}:ends_in_torch", "--samples", 4, "--device", "cpu")
        result = run(pictures, *options, "--output", file)
        assert result.exit_code == 0, result.output
    page = out.read_text()
    images = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)\"", page)]
    assert len(images) == 12
    for row, expected in enumerate(tiles(pixels(grid), CROP)):
        for image, tile in zip(images[row::3], expected, strict=False):
            assert np.array_equal(pixels(io.BytesIO(image)), tile)
    assert page.count("<tr>") == 5
    assert "Left out, because torch runs it on both sides: 3 Own, 4 RandomHorizontal" in page
    assert "CenterCrop(size=(24, 24))" in page


@pytest.mark.parametrize(
    "chain",
    [
        [v2.CenterCrop(CROP), TO_FLOAT, v2.Normalize(MEAN, STD)],
        [v2.CenterCrop(CROP), TO_FLOAT],
        [v2.CenterCrop(CROP), v2.ToDtype(torch.float32)],
        [v2.CenterCrop(CROP), v2.ToDtype(torch.float32), v2.Normalize([5.0], [0.5])],
        [v2.CenterCrop(CROP)],
        [v2.CenterCrop(CROP), TO_FLOAT, v2.Normalize(MEAN, STD), v2.Normalize(STD, MEAN), v2.ToDtype(torch.float16)],
        [v2.RandomApply([v2.RandomHorizontalFlip(1)], p=0), v2.CenterCrop(CROP), v2.RandomVerticalFlip(0)],
    ],
    ids=["normalized", "of 1", "of 255", "normalized of 255", "uint8", "twice, half", "uint8, random"],
)
def test_values_become_grey_levels_again(pictures: Path, device: str, chain: list[Any]) -> None:
    images = ImageFolder(pictures)
    images.samples = images.samples[::5]
    found = make_samples(images, compile_chain([v2.ToImage(), *chain], device, fused=False), seed=3)
    assert [(one.folder, one.name) for one in found] == [Path(path).parts[-2:] for path, _ in images.samples]
    for one, (path, _) in zip(found, images.samples, strict=True):
        true = v2.functional.center_crop(v2.functional.pil_to_tensor(Image.open(path)), [CROP, CROP]).float()
        assert one.expected.dtype == torch.float32
        assert (one.expected - true).abs().max() < (0.5 if len(chain) == 5 else 0.001), "half types round"
        assert one.difference.mean() < (0.01 if device == "cpu" else 2)


def test_several_views_are_shown_beside_each_other(pictures: Path) -> None:
    to_float = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    views = [v2.Compose([v2.RandomResizedCrop(32), to_float]), v2.Compose([v2.CenterCrop(CROP), to_float])]
    images = ImageFolder(pictures)
    images.samples = images.samples[:2]

    found = make_samples(images, compile_chain([MultiView(views)], "cpu", fused=False), seed=0)

    assert [one.name for one in found] == ["0.jpg, view 1", "0.jpg, view 2", "1.jpg, view 1", "1.jpg, view 2"]
    assert [one.actual.shape[-1] for one in found] == [32, CROP, 32, CROP]
    true = v2.functional.center_crop(v2.functional.pil_to_tensor(Image.open(images.samples[1][0])), [CROP, CROP])
    assert (found[3].expected - true).abs().max() < 0.001
    assert all(one.difference.mean() < 0.5 for one in found)


def test_large_images_become_smaller_and_no_difference_is_lost(tmp_path: Path) -> None:
    black = torch.zeros(1000, 700, 3, dtype=torch.uint8)
    dot = black.clone()
    dot[500, 301] = 255
    assert np.asarray(_make_tile(dot)).max() == round(255 / 9)
    tile = np.asarray(_make_tile(dot, largest=True))
    assert tile.shape == (334, 234, 3)
    assert np.argwhere(tile[:, :, 0] == 255).tolist() == [[166, 100]]
    image = dot.permute(2, 0, 1).float()
    small = image[:, :20, :30]
    samples = [Sample("cat", "a_very_long_name_of_a_file.jpg", image, image), Sample("<dog>", "x", small, small)]
    write_grid(tmp_path / "grid.png", samples, "", "")
    assert pixels(tmp_path / "grid.png").shape[0] == 2 * TEXT + 2 * GAP + 3 * (334 + GAP)
    write_grid(tmp_path / "grid.html", samples, "", "")
    page = (tmp_path / "grid.html").read_text()
    assert "<th>&lt;dog&gt;<small>x</small></th>" in page
    assert "<tr><th></th><th>torchdali</th><th>torchvision</th><th>difference</th></tr>" in page


@pytest.mark.parametrize(
    ("differences", "factor"),
    [([0, 0], 1), ([0, 1], 200), ([0, 2], 100), ([0, 0.5, 13], 10), ([100], 2), ([200], 1), ([1] * 500 + [255], 200)],
)
def test_a_difference_is_magnified_until_it_is_seen(differences: list[float], factor: int) -> None:
    actual = torch.tensor(differences).view(1, 1, -1)
    assert choose_magnification([Sample("", "", actual, torch.zeros_like(actual))]) == factor


def test_the_standard_transform_of_a_folder_without_classes(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    result = run(pictures / "coffee", "--output", out, "--samples", 100)
    assert result.exit_code == 0, result.output
    assert "8 images by torchdali" in flatten_output(result)
    ours, theirs, _ = tiles(pixels(out), 224)
    assert len(ours) == 8
    assert np.abs(np.array(ours, np.int64) - theirs).mean() < 3
    assert np.std(ours) > 20


def test_names_that_are_no_text(fresh_pictures: Path, mine: Path, tmp_path: Path) -> None:
    """File names are bytes on Linux, and a page is UTF-8."""
    folder = fresh_pictures / "coffee"
    (folder / "0.jpg").rename(os.fsdecode(os.fsencode(folder) + b"/\xff.jpg"))
    out = tmp_path / "grid.html"
    result = run(folder, "--output", out, "--samples", 100, "--transform", f"{mine}:flips")
    assert result.exit_code == 0, result.output
    assert r"<th>coffee<small>\udcff.jpg</small></th>" in out.read_text("utf-8")


DATASETS = """
import pathlib
import torch
from torch.utils.data import Subset
from torchvision import tv_tensors
from torchvision.transforms import v2
from tests.helpers import videos
from tests.helpers.wrapped import make_coco
from torchdali import DALILoader
from torchdali.datasets import VideoClips

folder = pathlib.Path(__file__).parent
fill = {tv_tensors.Image: 100, "others": 0}
shifts = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomZoomOut(fill, side_range=(1.0, 2.0))])

def objects():
    whole = make_coco(folder / "coco")
    whole.transforms = v2.Compose([v2.ToImage(), v2.ColorJitter(0.4), v2.RandomIoUCrop()])
    return Subset(whole, [0, 1, 2])

def load_objects():
    return DALILoader(objects(), transform=shifts)

def load_clips():
    (folder / "videos").mkdir()
    path = videos.write(folder / "videos" / "clip.mp4", videos.pan(30))
    strips = v2.Compose([v2.RandomResizedCrop(32), v2.RandomApply([v2.GaussianNoise()], 0.9)])
    return VideoClips([(path, "a")] * 3, frames=6, stride=1, transform=strips)

to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.3] * 3, [0.2] * 3)]
"""


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # pycocotools
def test_samples_of_a_dataset_with_boxes_and_masks(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.write_text(DATASETS)
    out, page = tmp_path / "grid.png", tmp_path / "grid.html"
    result = run(f"{mine}:load_objects", "--output", page, "--device", "cpu", "--samples", 9)
    assert result.exit_code == 0, result.output
    text = flatten_output(result)
    assert "3 samples by torchdali with DALI on the CPU, by PIL and torchvision" in text
    assert "Targets: boxes are equal, masks are equal." in text
    images = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)\"", page.read_text())]
    ours, theirs, difference = ([pixels(io.BytesIO(image)).astype(int) for image in images[k::3]] for k in range(3))
    assert len(ours) == 3
    assert max(np.abs(one - other).mean() for one, other in zip(ours, theirs, strict=True)) < 1
    # A box is drawn in a color that the photograph does not have.
    assert all((np.abs(one - [44, 160, 44]).max(-1) < 20).any() for one in ours)
    assert all((np.abs(one - [44, 160, 44]).max(-1) > 20).all() for one in difference)
    assert "RandomIoUCrop" in page.read_text()

    flip = Boxes.flip
    monkeypatch.setattr(Boxes, "flip", lambda self, size, axis, on: (flip(self, size, axis, on), self.shift(size, on)))
    (tmp_path / "coco").rename(tmp_path / "before")
    result = run(f"{mine}:objects", "--output", out, "--device", "cpu", "--transform", f"{mine}:shifts")
    assert result.exit_code == 0, result.output
    assert re.search(r"Targets: boxes differ by at most [\d.]+ pixels, masks are equal\.", flatten_output(result))


def test_clips_are_strips_of_their_frames(mine: Path, tmp_path: Path) -> None:
    mine.write_text(DATASETS)
    out = tmp_path / "grid.png"
    options = ("--output", out, "--device", "cpu")
    result = run(f"{mine}:load_clips", *options, "--transform", f"{mine}:to_float")
    assert result.exit_code == 0, result.output
    assert "3 clips by torchdali with DALI on the CPU, by PyAV and torchvision" in flatten_output(result)
    ours, theirs, _ = tiles(pixels(out)[:, : LEFT + 3 * (4 * 32 + GAP)], 32)
    strips = np.concatenate(ours, 1).astype(int)
    assert np.abs(strips - np.concatenate(theirs, 1)).mean() < 1
    assert np.std(strips) > 20
    first, last = strips[:, :32], strips[:, 96:128]
    assert np.abs(first - last).mean() > 5
    result = run(tmp_path / "videos", *options, "--transform", f"{mine}:to_float")
    assert "1 clips by torchdali" in flatten_output(result)


def test_what_is_wrong(fresh_pictures: Path, mine: Path, tmp_path: Path) -> None:
    for options, text in (
        (("--output", tmp_path / "grid.jpg"), "must end in .png or .html"),
        (("--output", tmp_path / "missing" / "grid.png"), "cannot be written"),
        (("--transform", f"{mine}:none"), "has nothing that is called 'none'"),
        (("--samples", 0), "Invalid value for '--samples'"),
    ):
        result = run(fresh_pictures, *options)
        assert result.exit_code == 2, result.output
        assert text in flatten_output(result)
    for name, text in (("flips", "a map-style dataset, its loader, or"), ("none", "has nothing that is called 'none'")):
        result = run(f"{mine}:{name}")
        assert result.exit_code == 2, result.output
        assert text in flatten_output(result)
    (tmp_path / "empty").mkdir()
    assert "has no images" in flatten_output(run(tmp_path / "empty"))
    for path in fresh_pictures.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:-40])
    damaged = run(fresh_pictures, "--output", tmp_path / "grid.png")
    assert damaged.exit_code == 1
    assert "cannot be decoded" in str(damaged.exception)
    assert not (tmp_path / "grid.png").exists()


def test_long_names_keep_both_ends() -> None:
    font = SimpleNamespace(getlength=len)
    assert [_shorten("hubble_deep_field", width, font) for width in (17, 16, 8, 4, 2)] == [
        *("hubble_deep_field", "hubble_..._field", "hub...ld", "h...", ""),
    ]


@pytest.mark.parametrize(("folder", "lines"), [("", 2), ("cat", 3)])
def test_a_line_of_classes_needs_classes(folder: str, lines: int, tmp_path: Path) -> None:
    image = torch.zeros(3, 10, 10)
    write_grid(tmp_path / "grid.png", [Sample(folder, "a.jpg", image, image)], "one image", "")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (640, lines * 18 + 8 + 3 * 14)
