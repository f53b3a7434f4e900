"""Files in mapped shards are cut out by DALI: at any byte, in any format, and beside files that PIL decodes."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from conftest import encoded, same
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.datasets import Zip
from torchdali.datasets.shards import Shards
from torchdali.pipeline.engine import PipelineRunner
from torchdali.sources import Source
from torchdali.sources.headers.table import HeaderColumns, HeaderTable

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


def test_a_damaged_webp_is_as_bad_as_in_a_file_of_its_own(folder: Path, tmp_path: Path) -> None:
    """DALI's decoder reads on into what follows it. Which damages are found there depends on that."""
    images = ImageFolder(folder, CHAIN)
    webps = [i for i, (path, _) in enumerate(images.samples) if Path(path).read_bytes()[8:12] == b"WEBP"]
    rng = np.random.default_rng(0)

    def damage(number: int, data: bytes) -> bytes:
        changed = bytearray(data)
        if number in webps:
            changed[rng.integers(30, len(data))] ^= int(rng.integers(1, 256))
        return bytes(changed)

    for turn in range(6):
        shards = write_zip(tmp_path / f"{turn}.zip", images, damage)
        loader = DALILoader(shards, 16, seed=3, device="cpu", on_error="skip")
        list(loader)
        assert sorted(error.index for error in loader.errors) == [i for i in webps if is_bad(shards, i)]


def is_bad(dataset: Any, index: int) -> bool:
    try:
        dataset[index]
    except OSError:
        return True
    return False


class Mirrored(Zip):
    """A user's class that changes the files."""

    def read(self, rows: Any) -> Any:
        return [np.frombuffer(encoded(mirror(data), "PNG"), np.uint8) for data in super().read(rows)]


def mirror(data: Any) -> PIL.Image.Image:
    with PIL.Image.open(io.BytesIO(data)) as image:
        return PIL.ImageOps.mirror(image.convert("RGB"))


class Views(Dataset[Any]):
    """A user's dataset whose source is mapped, and has no places."""

    def __init__(self, folder: ImageFolder) -> None:
        self.folder, self.transform = folder, folder.transform
        self.files = [Path(path).read_bytes() for path, _ in folder.samples]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.folder[index]

    def torchdali_source(self) -> Source:
        return ViewsSource(self)


class ViewsSource(Source):
    is_mapped = True

    def __init__(self, dataset: Views) -> None:
        self._dataset, self.transform = dataset, dataset.transform

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: Any) -> list[bytes]:
        return [self._dataset.files[row] for row in rows.tolist()]

    def target(self, row: int) -> int:
        return self._dataset.folder.targets[row]

    def name(self, row: int) -> str:
        return str(row)

    def headers(self) -> HeaderTable:
        return HeaderTable(HeaderColumns.unknown(len(self)))


@pytest.mark.parametrize("kind", [Mirrored, Views])
def test_what_users_read_has_no_places(pictures: Path, tmp_path: Path, kind: Any) -> None:
    chain = v2.Compose([v2.CenterCrop(20), v2.ToImage()])
    folder = ImageFolder(pictures, chain)
    write_zip(tmp_path / "all.zip", folder)
    dataset = Mirrored(str(tmp_path / "all.zip"), transform=chain) if kind is Mirrored else Views(folder)
    loader = DALILoader(dataset, 4, device="cpu")
    assert loader._is_native
    for _ in range(2):
        assert same(list(loader), list(DataLoader(dataset, 4)))


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
