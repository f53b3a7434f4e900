"""PIL images that torch's transforms and ``collate_fn`` get are DataLoader's: pixels, mode, palette and metadata."""

from __future__ import annotations

import functools
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageCms, ImageOps
from skimage import data as photos
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

PHOTO = Image.fromarray(photos.astronaut()[:48, :64])
MODES = ["L", "LA", "RGB", "RGBA", "P", "PA", "CMYK", "1", "YCbCr", "HSV", "LAB", "I", "F", "I;16"]


def describe(image: Image.Image) -> torch.Tensor:
    """Return numbers that tell images apart by all but their class."""
    palette = image.getpalette() if image.mode in ("P", "PA") else None
    exif = sorted(image.getexif().items())
    own = image.format, getattr(image, "filename", None)
    about = image.mode, image.size, own, sorted(image.info.items()), palette, exif, image.tobytes()
    return torch.tensor(zlib.crc32(repr(about).encode()))


def describe_all(samples: Any) -> Any:
    return default_collate([(describe(image), number) for image, number in samples])


class Modes(Dataset[Any]):
    def __init__(self, transform: Callable[[Any], Any] | None = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return len(MODES)

    def __getitem__(self, index: int) -> Any:
        mode = MODES[index]
        image = PHOTO.convert("RGB").convert("L").convert(mode) if mode in ("I", "F", "I;16") else _to_mode(mode)
        image.info["note"] = mode
        return (self.transform(image) if self.transform else image), index


def _to_mode(mode: str) -> Image.Image:
    if mode == "PA":
        return PHOTO.convert("P").convert("PA")
    if mode == "LAB":
        return Image.frombytes("LAB", PHOTO.size, PHOTO.tobytes())
    return PHOTO.convert(mode)


class Opened(Dataset[Any]):
    def __init__(self, files: list[Path], transform: Callable[[Any], Any] | None = None) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        file = self.files[index]
        if index >= 2:  # with a file name
            with Image.open(file) as image:
                image.load()
        else:
            image = Image.open(io.BytesIO(file.read_bytes()))
        return (self.transform(image) if self.transform else image), index


@pytest.fixture(scope="module")
def upright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of photographs; every second one must be turned by EXIF."""
    root = tmp_path_factory.mktemp("upright")
    (root / "a").mkdir()
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for i in range(4):
        exif = Image.Exif()
        exif[0x0112] = 6 if i % 2 else 1
        PHOTO.save(root / "a" / f"{i}.{'jpg' if i < 2 else 'png'}", exif=exif, icc_profile=profile)
    PHOTO.convert("P").save(root / "a" / "4.png", transparency=3)
    return root


@pytest.mark.parametrize("workers", [0, 1])
def test_a_first_transform_of_torch_gets_the_image_whatever_its_mode(workers: int) -> None:
    first = v2.Lambda(describe)
    ours = DALILoader(Modes(), 5, transform=first, device="cpu", num_workers=workers)
    for one, other in zip(ours, DataLoader(Modes(first), 5), strict=True):
        assert torch.equal(one[0], other[0])


def test_a_first_v2_rgb_takes_every_mode() -> None:
    chain = v2.Compose([v2.RGB(), v2.CenterCrop(32), v2.ToImage()])
    modes = [i for i, mode in enumerate(MODES) if mode not in ("I", "F", "I;16")]
    ours = DALILoader(Modes(), 4, sampler=modes, transform=chain, device="cpu")
    for one, other in zip(ours, DataLoader(Modes(chain), 4, sampler=modes), strict=True):
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("native", [True, False], ids=["native", "worker-fed"])
@pytest.mark.parametrize("where", ["transform", "collate_fn"])
def test_metadata_of_files_are_dataloaders(native: bool, where: str, upright: Path) -> None:
    files = sorted((upright / "a").iterdir())
    transform = v2.Lambda(describe) if where == "transform" else None
    collate = describe_all if where == "collate_fn" else None
    if native:
        ours = DALILoader(ImageFolder(upright, transform), 3, collate_fn=collate, device="cpu")
        theirs = DataLoader(ImageFolder(upright, transform), 3, collate_fn=collate)
    else:
        # Something must run in DALI, and change nothing.
        chain = transform or v2.RandomHorizontalFlip(0.0)
        ours = DALILoader(Opened(files[:4]), 3, collate_fn=collate, transform=chain, device="cpu")
        theirs = DataLoader(Opened(files[:4], transform), 3, collate_fn=collate)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], other[0])


def test_a_photograph_is_turned_by_its_exif(upright: Path) -> None:
    turn = functools.partial(ImageOps.exif_transpose)  # torch runs it: there is no rule for it
    chain = v2.Compose([turn, v2.Resize((32, 32)), v2.ToImage()])
    for one, other in zip(
        DALILoader(ImageFolder(upright, chain), 5, device="cpu"),
        DataLoader(ImageFolder(upright, chain), 5),
        strict=True,
    ):
        assert torch.equal(one[0], other[0])
        assert not torch.equal(one[0][0], one[0][1])


def test_a_conversion_to_a_tensor_ends_the_metadata(upright: Path) -> None:
    chain = v2.Compose([v2.ToImage(), v2.ToPILImage(), v2.Lambda(lambda image: torch.tensor(len(image.info)))])
    images, _ = next(iter(DALILoader(ImageFolder(upright, chain), 5, device="cpu")))
    assert images.tolist() == [0] * 5
