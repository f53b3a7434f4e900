"""A dataset that is asked for samples, what loaders may do with it, and how many workers ask."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from skimage import data as photographs
from torch.utils.data import Dataset
from torchvision.transforms import v2

PHOTOGRAPH = photographs.astronaut()
EXACT = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])
"""Changes no pixel, so that an image is known by its pixels."""


def crop(index: int, height: int = 32, width: int = 40) -> Any:
    top, left = 31 * index % (512 - height), 53 * index % (512 - width)
    return PHOTOGRAPH[top : top + height, left : left + width]


def unchanged(index: int, image: Any) -> Any:
    return image


class Crops(Dataset[Any]):
    """Numbered crops of a photograph. ``fault`` may change or refuse an image, given its index."""

    def __init__(self, fault: Callable[[int, Any], Any] = unchanged, count: int = 24) -> None:
        self.fault, self.count = fault, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.fault(index, crop(index)), index


class Truth:
    """What comes out where nothing is wrong."""

    def __init__(self, transform: Any = EXACT) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        image = crop(index)
        return self.transform(image) if self.transform else torch.from_numpy(image.copy()), index


def raised(kind: Any, iterator: Any) -> Any:
    """What comes instead of a batch, with its traceback in words: as it is, it would keep the iterator."""
    try:
        next(iterator)
    except kind as error:
        error.text = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    raise AssertionError(f"no {kind.__name__}")


def as_list(*parts: Any) -> list[Any]:
    return list(parts)


DOES: dict[str, dict[str, Any]] = {
    "transform": {"transform": EXACT},
    "batch_transform": {"batch_transform": as_list},
    "nothing": {},
}
WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
every_number = pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
WAYS = [("workers", "transform"), ("persistent", "batch_transform"), ("workers", "nothing")]
"""Each use with workers, and each kind of workers. What differs between these does not depend on the use."""


def _parametrize(ways: list[tuple[str, str]]) -> pytest.MarkDecorator:
    params = [pytest.param(WORKERS[workers], DOES[does], id=f"{workers}-{does}") for workers, does in ways]
    return pytest.mark.parametrize(("workers", "does"), params)


every_way_with_workers = _parametrize(WAYS)
every_way = _parametrize([*WAYS, ("none", "transform"), ("none", "batch_transform")])
