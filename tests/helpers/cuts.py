"""A folder of PNG files that are cuts of one photograph, and loaders on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from skimage.data import astronaut
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

PHOTOGRAPH = Image.fromarray(astronaut())

RESIZED = v2.Compose([v2.ToImage(), v2.Resize((32, 32))])

CROPPED = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])


def write(path: Path, height: int, width: int, left: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    PHOTOGRAPH.crop((left, 0, left + width, height)).save(new, "PNG")
    new.replace(path)


def folder(root: Path, count: int, height: int = 40, width: int = 56) -> list[Path]:
    paths = [root / "c" / f"{i:03}.png" for i in range(count)]
    for i, path in enumerate(paths):
        write(path, height, width, 3 * i)
    return paths


def loader_of(root: Path, transform: Any, batch_size: int = 8, **options: Any) -> DALILoader:
    return DALILoader(ImageFolder(root, transform), batch_size, **options)
