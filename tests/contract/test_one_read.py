"""Each epoch opens each file once, the first too; and no more is decoded than is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
from helpers.opens import counted_opens
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.pipeline.engine import PipelineRunner
from torchdali.pipeline.readers import FileReader

pytestmark = pytest.mark.timeout(60)

CHAIN = v2.Compose([v2.ToImage(), v2.CenterCrop(20)])
PHOTOGRAPH = Image.fromarray(skimage.data.coffee()).resize((40, 30))
SAMPLED = 8  # files that Python looks at before DALI reads many


def folder(root: Path, count: int) -> ImageFolder:
    (root / "a").mkdir()
    for i in range(count):
        PHOTOGRAPH.rotate(i).save(root / "a" / f"{i:02}.jpg", exif=long_exif() if i % 7 == 1 else b"")
    PHOTOGRAPH.convert("CMYK").save(root / "a" / "13.jpg")
    PHOTOGRAPH.save(root / "a" / "16.jpg", "BMP")
    return ImageFolder(root, CHAIN)


def long_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x010E] = "x" * 3000  # the first 2 KiB do not tell the size
    return exif


@pytest.mark.parametrize("batch_size", [8, 80])
def test_each_epoch_opens_each_file_once(batch_size: int, tmp_path: Path) -> None:
    dataset = folder(tmp_path, 80)
    expected = torch.cat([images for images, _ in DataLoader(dataset, 80)])
    loader = DALILoader(dataset, batch_size, device="cpu")
    for epoch in range(2):
        with counted_opens(tmp_path / "a") as opens:
            images = torch.cat([images for images, _ in loader])
        assert torch.equal(images, expected)
        assert sorted(opens) == sorted(Path(path).name for path, _ in dataset.samples)
        twice = [name for name, count in opens.items() if count > 1]
        assert max(opens.values()) <= 2
        assert len(twice) <= (SAMPLED if epoch == 0 and batch_size > 32 else 0), twice


def test_headers_are_validated_in_the_same_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a GPU."""
    monkeypatch.setattr(FileReader, "_validates", True)
    (tmp_path / "a").mkdir()
    for i in range(80):
        PHOTOGRAPH.rotate(i).save(tmp_path / "a" / f"{i:02}.jpg")
    with counted_opens(tmp_path / "a") as opens:
        assert len(list(DALILoader(ImageFolder(tmp_path, CHAIN), 80, device="cpu"))) == 1
    assert sum(opens.values()) == 80 + SAMPLED


def test_files_that_do_not_fit_the_memory_are_read_again(tmp_path: Path) -> None:
    dataset = folder(tmp_path, 80)
    expected = torch.cat([images for images, _ in DataLoader(dataset, 80)])
    loader = DALILoader(dataset, 40, device="cpu", decode_bytes=2**15)
    with counted_opens(tmp_path / "a") as opens:
        images = torch.cat([images for images, _ in loader])
    assert torch.equal(images, expected)
    assert len([name for name, count in opens.items() if count > 1]) > 70


@pytest.mark.parametrize("batch_size", [8, 40])
def test_what_was_read_is_what_is_checked(batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is whole again by the time it is decoded was cut off when it was read."""
    dataset = folder(tmp_path, 40)
    path = Path(dataset.samples[20][0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    check = FileReader.check_endings

    def restore(reader: FileReader, rows: Any, *others: Any) -> None:
        if 20 in rows:
            path.write_bytes(whole)
        check(reader, rows, *others)

    monkeypatch.setattr(FileReader, "check_endings", restore)
    with pytest.raises(SampleError, match="truncated") as raised:
        list(DALILoader(dataset, batch_size, device="cpu"))
    assert raised.value.path == str(path)
    assert len(list(DALILoader(dataset, batch_size, device="cpu"))) == 40 // batch_size


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("cache", [None, "host"])
def test_who_takes_one_batch_waits_for_no_others(
    cache: Any, filled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DALILoader(folder(tmp_path, 80), 4, device="cpu", cache=cache)
    if filled:
        list(loader)
    fed: list[int] = []
    submit = PipelineRunner.submit
    monkeypatch.setattr(
        PipelineRunner, "submit", lambda self, images, *others: fed.append(len(images)) or submit(self, images, *others)
    )
    batches = iter(loader)
    first = next(batches)[0]
    assert 1 <= len(fed) <= 3
    rest = [images for images, _ in batches]
    assert sum(fed) == 80
    expected = torch.cat([images for images, _ in DataLoader(loader.dataset, 80)])
    assert torch.equal(torch.cat([first, *rest]), expected)
