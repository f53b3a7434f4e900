"""Batches have DataLoader's structure, whatever the dataset is made of, and what is no image folder is turned away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CROP, Numbered, same
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(30)


def identity(batch: Any) -> Any:
    return batch


CHAINS = {
    "uint8": v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)]),
    "PILToTensor": v2.Compose([v2.CenterCrop(CROP), v2.PILToTensor()]),
    "float32": v2.Compose([v2.ToImage(), v2.CenterCrop((20, 30)), v2.ToDtype(torch.float32, scale=True)]),
    "v1": v1.Compose([v1.CenterCrop(CROP), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)]),
    "one channel": v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), v2.Grayscale()]),
    "in torch": v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), v2.Lambda(lambda x: x.double())]),
    "resized": v2.Compose([v2.ToImage(), v2.Resize((40, 40))]),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("batch_size", [None, 5])
def test_structure_is_dataloaders(
    pictures: Path, numbered: Numbered, chain: Any, batch_size: int | None, device: str
) -> None:
    dataset = numbered(pictures, chain)
    ours = list(DALILoader(dataset, batch_size, device=device))
    for batch, true in zip(ours, DataLoader(dataset, batch_size), strict=True):
        assert type(batch) is type(true) is list
        (images, labels), (true_images, true_labels) = batch, true
        assert type(images) is type(true_images)
        assert (images.shape, images.dtype) == (true_images.shape, true_images.dtype)
        assert images.device.type == device
        assert images.is_contiguous()
        if batch_size is None:
            assert type(labels) is int
        else:
            assert labels.device.type == device
            assert (labels.dtype, labels.shape) == (torch.int64, images.shape[:1])
            labels, true_labels = labels.tolist(), true_labels.tolist()
        assert labels == true_labels
        if device == "cpu":  # 2 levels of 256, away from the border
            ours_inside, true_inside = (x[..., 4:-4, 4:-4].double() for x in (images, true_images))
            assert (ours_inside - true_inside).abs().max() <= (0.04 if images.dtype == torch.float32 else 2)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(
    "chain",
    [None, v2.ToImage(), v2.PILToTensor(), v2.Compose([v2.ToImage(), v2.ToPureTensor()]), v2.Lambda(np.asarray)],
    ids=["PIL", "ToImage", "PILToTensor", "ToPureTensor", "numpy"],
)
def test_collate_fn_gets_samples_as_torchvision_gives_them(
    pictures: Path, numbered: Numbered, chain: Any, batch_size: int | None
) -> None:
    dataset = numbered(pictures, chain)
    theirs = list(DataLoader(dataset, batch_size, collate_fn=identity))
    ours = list(DALILoader(dataset, batch_size, collate_fn=identity, device="cpu"))
    assert len(ours) == len(theirs)
    for batch, true in zip(ours, theirs, strict=True):
        assert type(batch) is type(true)
        for sample, true_sample in zip(*([x] if batch_size is None else x for x in (batch, true)), strict=True):
            assert (type(sample), len(sample)) == (tuple, 2)
            (image, target), (true_image, true_target) = sample, true_sample
            assert (type(target), target) == (type(true_target), true_target)
            is_pil = hasattr(true_image, "getpixel")
            assert hasattr(image, "getpixel") == is_pil
            assert is_pil or type(image) is type(true_image)
            assert not is_pil or image.mode == true_image.mode
            assert np.array_equal(np.asarray(image), np.asarray(true_image))


def test_collate_fn_gets_images_on_the_device(pictures: Path, numbered: Numbered, device: str) -> None:
    (image, target), *_ = next(
        iter(DALILoader(numbered(pictures, v2.ToImage()), 2, collate_fn=identity, device=device))
    )
    assert (type(image), image.device.type, target) == (tv_tensors.Image, device, 0)


@pytest.mark.parametrize(
    "target_transform",
    [lambda i: i + 100, str, float, lambda i: {"number": i, "pair": (i, [i])}, np.int64, torch.tensor, bool],
    ids=["int", "str", "float", "dict", "numpy", "tensor", "bool"],
)
@pytest.mark.parametrize("place", ["target_transform", "samples"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_targets_of_any_kind_are_dataloaders(
    pictures: Path, numbered: Numbered, target_transform: Any, place: str, batch_size: int | None
) -> None:
    dataset = numbered(pictures)
    if place == "samples":
        dataset.samples = [(path, target_transform(target)) for path, target in dataset.samples]
    else:
        dataset.target_transform = target_transform
    ours = DALILoader(dataset, batch_size, device="cpu")
    assert same(list(ours), list(DataLoader(dataset, batch_size)))


NESTED: dict[str, Callable[[ImageFolder, ImageFolder], Any]] = {
    "subset": lambda a, b: Subset(a, [5, 3, 3, -1]),
    "subset of tensor": lambda a, b: Subset(a, torch.tensor([5, 3, 9])),  # pyright: ignore
    "empty subset": lambda a, b: Subset(a, []),
    "subset of subset": lambda a, b: Subset(Subset(a, range(20, 0, -1)), np.arange(3, 9)),  # pyright: ignore
    "random_split": lambda a, b: random_split(a, [10, len(a) - 10], torch.Generator().manual_seed(0))[1],
    "concat": lambda a, b: ConcatDataset([a, b, a]),
    "nested": lambda a, b: Subset(ConcatDataset([Subset(b, [4, 2]), ConcatDataset([a, b])]), [1, 30, 0, 45, -2]),
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED.keys())
def test_nested_datasets(pictures: Path, numbered: Numbered, nest: Any) -> None:
    other = numbered(pictures, first=100, target_transform=lambda i: i + 1)
    dataset = nest(numbered(pictures), other)
    ours = DALILoader(dataset, 3, device="cpu")
    assert len(ours) == len(DataLoader(dataset, 3))
    assert same(list(ours), list(DataLoader(dataset, 3)))


@pytest.mark.parametrize("kind", [str, Path])
def test_dataset_may_be_a_path(pictures: Path, exact: Any, kind: type) -> None:
    ours = DALILoader(kind(pictures), 5, transform=exact, device="cpu")
    assert isinstance(ours.dataset, ImageFolder)
    assert same(list(ours), list(DataLoader(ImageFolder(pictures, exact), 5)))


def test_transform_follows_the_datasets_own(pictures: Path, numbered: Numbered) -> None:
    more = v2.CenterCrop(10)
    ours = DALILoader(numbered(pictures), 5, transform=more, device="cpu")
    chained = numbered(pictures, v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), more]))
    assert same(list(ours), list(DataLoader(chained, 5)))


def change_transform(dataset: ImageFolder) -> None:
    dataset.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(10)])


def change_inside_transform(dataset: ImageFolder) -> None:
    dataset.transform.transforms[1] = v2.CenterCrop(10)


def change_samples(dataset: ImageFolder) -> None:
    dataset.samples = dataset.samples[::-1]


def append_samples(dataset: ImageFolder) -> None:
    dataset.samples.append((dataset.samples[3][0], 99))


def change_one_sample(dataset: ImageFolder) -> None:
    dataset.samples[0] = (dataset.samples[3][0], 99)


def change_target_transform(dataset: ImageFolder) -> None:
    dataset.target_transform = str


CHANGES = [change_transform, change_inside_transform, change_samples, append_samples, change_one_sample]


@pytest.mark.parametrize("change", [*CHANGES, change_target_transform])
@pytest.mark.parametrize("iterated", [False, True], ids=["before the first epoch", "between epochs"])
@pytest.mark.parametrize("nest", [identity, lambda folder: ConcatDataset([folder])], ids=["folder", "concat"])
def test_changed_dataset_is_seen_by_the_next_epoch(
    pictures: Path, numbered: Numbered, change: Any, iterated: bool, nest: Any
) -> None:
    folder = numbered(pictures, v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)]))
    ours = DALILoader(nest(folder), 5, device="cpu", sampler=range(24))
    before = list(ours) if iterated else list(DataLoader(nest(folder), 5, sampler=range(24)))
    change(folder)
    true = list(DataLoader(nest(folder), 5, sampler=range(24)))
    assert same(list(ours), true)
    assert change is append_samples or not same(before, true)


def test_changed_targets_may_be_vectors(dataset: ImageFolder) -> None:
    """Which have no truth value when they are compared."""
    ours = DALILoader(dataset, 5, device="cpu")
    for last in (7, 8):
        dataset.samples = [(path, torch.tensor([0, last])) for path, _ in dataset.samples]
        assert same(list(ours), list(DataLoader(dataset, 5)))


def test_appended_samples_are_loaded(dataset: ImageFolder) -> None:
    ours = DALILoader(dataset, 5, device="cpu")
    list(ours)
    append_samples(dataset)
    assert len(ours) == 5
    assert list(ours)[-1][1].tolist() == [20, 21, 22, 23, 99]
