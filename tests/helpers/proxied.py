"""Datasets that are asked for samples, and what compares the batches that are made of them."""

from __future__ import annotations

import io
import random
import time
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from conftest import CROP, same
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)])
RANDOM = v2.Compose([v2.RandomCrop(CROP), v2.RandomHorizontalFlip(), v2.ToImage()])

Image = PIL.Image.Image
Make = Callable[[Any], Any]


def drawn() -> dict[str, Any]:
    """Numbers of every generator that a dataset may draw from."""
    return {"torch": torch.rand(2), "numpy": np.random.rand(), "python": random.random()}  # noqa: NPY002


def asked_by() -> tuple[Any, ...]:
    """What a dataset is told of its worker."""
    info = get_worker_info()
    return (info.id, info.num_workers, info.seed, type(info.dataset).__name__) if info else ()


class Pictures(Dataset[Any]):
    """Photographs with all that a dataset may know and draw beside them.

    Args:
        files: The photographs.
        transform: What the dataset does itself.
    """

    mark = "as it was made"
    slow: int | None = None

    def __init__(self, files: list[Path], transform: Any = None) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.slow:
            time.sleep(0.7)
        with PIL.Image.open(self.files[index]) as image:
            image.load()
        about = {"index": index, "type": type(index).__name__, "mark": self.mark, **drawn(), "worker": asked_by()}
        return {"image": self.transform(image) if self.transform else image, **about}


class AtOnce(Pictures):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{**self[index], "beside": str(indices)} for index in indices]


class Named(Pictures):
    """Has keys, and no integers."""

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return super().__getitem__(int(index.removeprefix("picture ")))


class Stream(IterableDataset[Any]):
    """The photographs one after the other; each worker has a part of them, or has them all.

    Args:
        pictures: The photographs.
        shares: Whether workers have parts.
        length: What it says of its length.
    """

    def __init__(self, pictures: Pictures, shares: bool, length: int | None = None) -> None:
        self.pictures, self.shares, self.length = pictures, shares, length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("has no length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers + 1) if info and self.shares else (0, 1)
        return (self.pictures[index] for index in range(first, len(self.pictures), step))


def prepare(worker: int) -> None:
    """A worker_init_fn that seeds and that changes the worker's dataset."""
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = f"changed by {worker} of {info.num_workers}"  # pyright: ignore[reportAttributeAccessIssue]
    np.random.seed(info.seed % 2**31 + worker)  # noqa: NPY002


def decoded(data: bytes) -> Image:
    with PIL.Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


class Samples(Dataset[Any]):
    """Samples of any structure with photographs in it.

    Args:
        images: The photographs.
        shape: Makes a sample of something that stands for a photograph, and its number.
        make: What stands for a photograph.
    """

    def __init__(self, images: list[Image], shape: Callable[[Any, int], Any], make: Make = lambda image: image) -> None:
        self.images, self.shape, self.make = images, shape, make

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.shape(self.make(self.images[index]), index)


def pair(image: Any, index: int) -> tuple[Any, int]:
    return image, index


def decoded_in(folder: Path, count: int) -> list[Image]:
    """Photographs of different sizes."""
    found = [decoded(path.read_bytes()) for path in sorted(folder.rglob("*.jpg"))[::5][:count]]
    assert len({image.size for image in found}) == count
    return found


def difference(ours: Any, theirs: Any, place: str = "it") -> str:
    """Where two structures of batches first differ, in types or values; nothing where they do not."""
    if type(ours) is not type(theirs):
        return f"{place} is {type(ours)}, not {type(theirs)}"
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return f"{place} has {list(ours)}, not {list(theirs)}"
        return next((d for key, x in ours.items() if (d := difference(x, theirs[key], f"{place}[{key!r}]"))), "")
    if isinstance(ours, (list, tuple, deque)):
        if len(ours) != len(theirs):
            return f"{place} has {len(ours)} parts, not {len(theirs)}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((d for i, (x, y) in pairs if (d := difference(x, y, f"{place}[{i}]"))), "")
    return "" if same(ours, theirs) else f"{place} is {ours!r}, not {theirs!r}"


def assert_near(ours: Any, theirs: Any, mean: float = 0) -> None:
    """Equal; or the images, which are the uint8 and floating-point tensors of more than two axes, near."""
    assert type(ours) is type(theirs)
    theirs = theirs.cpu() if isinstance(theirs, torch.Tensor) else theirs
    if isinstance(theirs, torch.Tensor) and theirs.ndim > 2:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert (ours.cpu().double() - theirs.double()).abs().mean() <= mean
    elif isinstance(theirs, torch.Tensor):
        assert same(ours.cpu(), theirs)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_near(one, other, mean)
    elif isinstance(theirs, (dict, UserDict)):
        assert list(ours) == list(theirs)
        assert_near(list(ours.values()), list(theirs.values()), mean)
    elif isinstance(theirs, Image):
        assert ours.mode == theirs.mode
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    else:
        assert ours == theirs


class PathSamples(Dataset[Any]):
    """The samples of a folder, each a path and a label."""

    def __init__(self, folder: ImageFolder) -> None:
        self.samples = [(Path(path), target) for path, target in folder.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]
