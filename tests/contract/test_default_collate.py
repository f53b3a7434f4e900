"""Batches are what ``default_collate`` and ``default_convert`` make of them, with what a script has taught them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import same
from torch.utils.data import DataLoader, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(60)

CROP = v2.Compose([v2.ToImage(), v2.CenterCrop(8)])


def picture(number: int) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.full((12, 12, 3), number, np.uint8))


class Asked:
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return (self.transform or (lambda image: image))(picture(index)), index


@dataclasses.dataclass
class Record:
    image: Any
    label: int


@pytest.fixture
def registered() -> Iterator[dict[Any, Any]]:
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


def together(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return ["mine", *batch]


def padded(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([image.flatten() for image in batch], batch_first=True)


@pytest.mark.parametrize("kind", [torch.Tensor, int])
def test_a_read_dataset_is_collated_by_what_was_registered(dataset: ImageFolder, registered: Any, kind: type) -> None:
    registered[kind] = padded if kind is torch.Tensor else together
    ours, theirs = DALILoader(dataset, 5, device="cpu"), DataLoader(dataset, 5)
    assert same(list(ours), list(theirs))


def test_what_has_another_type_changes_nothing(dataset: ImageFolder, registered: Any) -> None:
    """As that of NVIDIA's own proxy, which is there as soon as it is imported."""
    registered[Path] = together
    samples = [Record(torch.full((3, 9, 9), i), i) for i in range(4)]
    ours = DALILoader(samples, 2, transform=v2.CenterCrop(3), device="cpu")  # pyright: ignore[reportArgumentType]
    assert [batch.label.tolist() for batch in ours] == [[0, 1], [2, 3]]
    registered[Record] = together
    assert same(list(DALILoader(dataset, 5, device="cpu")), list(DataLoader(dataset, 5)))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [torch.Tensor, int, (int, float)])
def test_an_asked_dataset_is_collated_by_what_was_registered(registered: Any, workers: int, kind: Any) -> None:
    registered[kind] = padded if kind is torch.Tensor else together
    ours = DALILoader(Asked(), 3, transform=CROP, num_workers=workers, device="cpu")
    assert same(list(ours), list(DataLoader(Asked(CROP), 3)))  # pyright: ignore[reportArgumentType]


def test_pil_images_may_be_registered(dataset: ImageFolder, registered: Any) -> None:
    registered[PIL.Image.Image] = lambda batch, *, collate_fn_map=None: [image.tobytes() for image in batch]
    dataset.transform = crop = v2.CenterCrop(8)
    assert same(list(DALILoader(dataset, 5, device="cpu")), list(DataLoader(dataset, 5)))
    ours = list(DALILoader(Asked(), 3, transform=crop, device="cpu"))
    assert same(ours, list(DataLoader(Asked(crop), 3)))  # pyright: ignore[reportArgumentType]


def test_a_registered_sample_gets_its_image(registered: Any) -> None:
    registered[Record] = lambda batch, *, collate_fn_map=None: torch.stack([one.image for one in batch])
    samples = [Record(torch.full((3, 9, 9), i), i) for i in range(4)]
    ours = DALILoader(samples, 2, transform=v2.CenterCrop(3), device="cpu")  # pyright: ignore[reportArgumentType]
    assert [batch.shape for batch in ours] == [(2, 3, 3, 3)] * 2


@pytest.mark.parametrize("collate_fn", [None, default_convert])
@pytest.mark.parametrize(
    "last", [v2.Lambda(lambda image: image.numpy()), v2.FiveCrop(4), v2.Lambda(lambda image: {"a": (image.numpy(), 1)})]
)
def test_a_sample_alone_is_converted(last: Any, collate_fn: Any) -> None:
    chain = v2.Compose([CROP, last])
    options: dict[str, Any] = {"batch_size": None, "collate_fn": collate_fn}
    ours = DALILoader(Asked(), transform=chain, device="cpu", **options)
    assert same(list(ours), list(DataLoader(Asked(chain), **options)))  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory is pinned where there is an accelerator")
@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_without_an_accelerator_is_warned_of(workers: int) -> None:
    options: dict[str, Any] = {"pin_memory": True, "num_workers": workers}
    found: list[set[str]] = []
    kinds: list[tuple[Any, dict[str, Any]]] = [(DataLoader, {}), (DALILoader, {"transform": CROP, "device": "cpu"})]
    for kind, more in kinds:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(kind(Asked(None if more else CROP), **options, **more))
        found.append({str(one.message) for one in caught if "pin_memory" in str(one.message)})
    assert found[0] == found[1] != set()


def test_strings_made_of_images_stay_a_tuple() -> None:
    chain = v2.Compose([CROP, v2.Lambda(lambda image: f"{image.dtype} {tuple(image.shape)}")])
    ours = DALILoader(Asked(), 3, transform=chain, device="cpu")
    assert same(list(ours), list(DataLoader(Asked(chain), 3)))  # pyright: ignore[reportArgumentType]
