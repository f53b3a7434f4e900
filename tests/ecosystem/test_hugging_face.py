"""DALI gets the stored files of an image column of Hugging Face's datasets."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import CROP, PER_BATCH, Numbered, assert_pairs, in_order
from torch.utils.data import DataLoader, Subset
from torchvision.transforms import v2

datasets = pytest.importorskip("datasets", reason="needs datasets")

from torchdali import DALILoader, SampleError  # noqa: E402

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)])


def table(pictures: Path, by_path: bool, decode: bool = False) -> Any:
    """Return a table of the pictures, or of their paths, with their numbers."""
    files = sorted(pictures.rglob("*.jpg"))
    images = [{"bytes": None if by_path else file.read_bytes(), "path": str(file)} for file in files]
    made = datasets.Dataset.from_dict({"image": images, "number": list(range(len(files)))})
    return made.cast_column("image", datasets.Image(decode=decode))


def pairs(loader: Any) -> list[Any]:
    return [(batch["image"], batch["number"]) for batch in loader]


@pytest.mark.parametrize(("by_path", "workers"), [(False, 2), (True, 0)], ids=["bytes", "paths"])
def test_files_are_not_decoded_in_python(
    pictures: Path, numbered: Numbered, by_path: bool, workers: int, device: str
) -> None:
    data = table(pictures, by_path)
    with mock.patch("PIL.Image.open", side_effect=AssertionError("decoded in Python")):
        loader = DALILoader(data, PER_BATCH, num_workers=workers, transform=EXACT, device=device)
        batches = pairs(loader)
    assert_pairs(batches, numbered(pictures), in_order())
    assert {images.device.type for images, _ in batches} == {device}


def test_decoded_images_are_the_same(pictures: Path) -> None:
    stored, decoded = (
        pairs(DALILoader(table(pictures, False, decode=decode), PER_BATCH, transform=EXACT, device="cpu"))
        for decode in (False, True)
    )
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(stored, decoded, strict=True))


def test_order_is_dataloaders(pictures: Path) -> None:
    orders: list[list[int]] = []
    shuffled = table(pictures, False).shuffle(seed=1).select(range(17))
    for kind, options in ((DALILoader, {"transform": EXACT, "device": "cpu"}), (DataLoader, {})):
        torch.manual_seed(3)
        data = shuffled if options else shuffled.remove_columns("image")
        loader: Any = kind(Subset(data, range(1, 17)), PER_BATCH, shuffle=True, **options)
        orders.append([number for batch in loader for number in batch["number"].tolist()])
    assert orders[0] == orders[1]
    assert len(orders[0]) == 16


def test_a_stream_keeps_its_order(pictures: Path, numbered: Numbered) -> None:
    loader = DALILoader(table(pictures, False).to_iterable_dataset(), PER_BATCH, transform=EXACT, device="cpu")
    assert_pairs(pairs(loader), numbered(pictures), in_order())


def test_a_folder_of_images_keeps_its_pairs(pictures: Path, tmp_path: Path, numbered: Numbered) -> None:
    data = datasets.load_dataset("imagefolder", data_dir=str(pictures), cache_dir=str(tmp_path), split="train")
    data = data.cast_column("image", datasets.Image(decode=False)).remove_columns("label")
    by_path = sorted(range(len(data)), key=lambda i: data[i]["image"]["path"])
    data = data.add_column("number", [by_path.index(i) for i in range(len(data))])
    assert_pairs(pairs(DALILoader(data, PER_BATCH, transform=EXACT, device="cpu")), numbered(pictures))


def test_a_damaged_file_is_named(pictures: Path) -> None:
    rows = table(pictures, False).to_list()
    rows[4]["image"]["bytes"] = rows[4]["image"]["bytes"][:200]
    data = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image(decode=False))
    iterator = iter(DALILoader(data, PER_BATCH, transform=EXACT, device="cpu"))
    assert next(iterator)["number"].tolist() == [0, 1, 2]
    with pytest.raises(SampleError, match=r"sample 4 \(\['image'\]\): it cannot be decoded"):
        next(iterator)
    assert next(iterator)["number"].tolist() == [6, 7, 8]


def test_sounds_and_other_dictionaries_are_not_images(pictures: Path, tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(160))
    sound = {"bytes": (tmp_path / "a.wav").read_bytes(), "path": "a.wav"}
    picture = next(pictures.rglob("*.jpg")).read_bytes()
    samples: Any = [{"sound": sound, "image": {"bytes": picture, "path": None}}] * 2
    batch = next(iter(DALILoader(samples, 2, transform=EXACT, device="cpu")))
    assert batch["image"].shape == (2, 3, CROP, CROP)
    assert batch["sound"] == {name: [value] * 2 for name, value in sound.items()}
    whole: Any = [{"bytes": picture, "path": "p.jpg"}] * 2
    batch = next(iter(DALILoader(whole, 2, transform=EXACT, device="cpu")))
    assert batch["bytes"].shape == (2, 3, CROP, CROP)
    assert batch["path"] == ["p.jpg", "p.jpg"]
