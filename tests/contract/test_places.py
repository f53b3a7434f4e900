"""Files in mapped shards are cut out by DALI: at any byte, in any format, and beside files that PIL decodes."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import encoded, same
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import Zip
from torchdali.datasets.shards import Shards
from torchdali.pipeline.engine import PipelineRunner

CHAIN = v2.Compose([v2.RandomResizedCrop(20), v2.ToImage()])
MAKE: list[Callable[[PIL.Image.Image], bytes]] = [
    lambda image: encoded(image, "JPEG"),
    lambda image: encoded(image, "JPEG", progressive=True),
    lambda image: encoded(image, "JPEG") + b"\xff\xd8\0",
    lambda image: encoded(image.convert("L"), "JPEG"),
    lambda image: encoded(image.convert("CMYK"), "JPEG"),
    lambda image: encoded(image, "PNG"),
    lambda image: encoded(image, "BMP"),
    lambda image: encoded(image, "PPM"),
    lambda image: encoded(image, "TIFF"),
    lambda image: encoded(image, "WEBP", lossless=True),
    lambda image: encoded(image, "GIF"),
]


@pytest.fixture(scope="module")
def folder(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in all formats. Their lengths have all remainders."""
    root = tmp_path_factory.mktemp("formats")
    files = sorted(pictures.rglob("*.jpg"))[:8]
    for number, (file, make) in enumerate((file, make) for file in files for make in MAKE):
        path = root / f"class{number % 2}" / f"{number:03}.jpg"
        path.parent.mkdir(exist_ok=True)
        with PIL.Image.open(file) as image:
            path.write_bytes(make(image.convert("RGB")))
    return root


def write_zip(path: Path, folder: ImageFolder, change: Callable[[int, bytes], bytes] = lambda _, data: data) -> Zip:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for number, (file, label) in enumerate(folder.samples):
            archive.writestr(f"{folder.classes[label]}/{Path(file).name}", change(number, Path(file).read_bytes()))
    return Zip(str(path), transform=CHAIN)


def collect(dataset: Any, device: str, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    loader = DALILoader(dataset, 16, shuffle=True, seed=3, device=device, **options)
    return [batch for _ in range(2) for batch in loader]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_any_format_at_any_byte(folder: Path, tmp_path: Path, device: str) -> None:
    images = ImageFolder(folder, CHAIN)
    shards = write_zip(tmp_path / "all.zip", images)
    assert {*(np.asarray(shards.index.offsets) % 8).tolist()} == {*range(8)}
    assert same(collect(shards, device), collect(images, device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_black_image_takes_the_place_of_a_damaged_one(folder: Path, tmp_path: Path, device: str) -> None:
    images = ImageFolder(folder, CHAIN)
    bad = 0  # a baseline JPEG
    shards = write_zip(tmp_path / "all.zip", images, lambda i, data: data[: len(data) // 2] if i == bad else data)
    ours = collect(shards, device, on_error="replace")
    whole = collect(images, device)
    differ = [i for i, (a, b) in enumerate(zip(ours, whole, strict=True)) if not torch.equal(a[0], b[0])]
    assert len(differ) == 2  # one batch in each epoch
    for i in differ:
        rows = (ours[i][0] != whole[i][0]).flatten(1).any(1)
        assert int(rows.sum()) == 1
        assert not ours[i][0][rows].any()
    with pytest.raises(SampleError, match=rf"sample {bad} \(.*all.zip, .*\): it cannot be decoded"):
        collect(shards, device)


def test_places_are_found_once_and_before_their_batch_has_room(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding them tells the system what to read from the disk."""
    events: list[str] = []
    for kind, name in ((Shards, "find"), (PipelineRunner, "submit"), (PipelineRunner, "take")):
        monkeypatch.setattr(kind, name, _record(getattr(kind, name), name, events))
    loader = DALILoader(write_zip(tmp_path / "all.zip", ImageFolder(pictures)), 2, device="cpu")
    list(loader)
    events.clear()
    assert len(list(loader)) == events.count("find") == len(loader)
    first = events[: events.index("take")]
    assert first.count("find") > first.count("submit")


def _record(function: Callable[..., Any], name: str, events: list[str]) -> Callable[..., Any]:
    def record(*args: Any, **options: Any) -> Any:
        events.append(name)
        return function(*args, **options)

    return record
