"""Which datasets are read without being asked for samples, which are not, and that a change in one is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same
from helpers.in_memory import COUNT, Make, grey, identity, maker, on_host, photographs
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, random_split
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, UnsupportedDatasetError
from torchdali.sources import describe_dataset_state, from_dataset
from torchdali.sources.arrays import ArraySource

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes one of the datasets, by its name."""
    return maker(tmp_path, monkeypatch)


# Nested datasets

NESTED: dict[str, Callable[[Any, Any], Any]] = {
    "subset": lambda a, b: Subset(a, [5, 3, 3, -1]),
    "empty subset": lambda a, b: Subset(a, []),
    "random_split": lambda a, b: random_split(a, [12, 8], torch.Generator().manual_seed(0))[1],
    "concat": lambda a, b: ConcatDataset([a, b, a]),
    "nested": lambda a, b: Subset(ConcatDataset([Subset(b, [4, 2]), ConcatDataset([a, b])]), [1, 30, 0, 41, -2]),
}


@pytest.mark.parametrize("names", [("CIFAR10", "SVHN"), ("MNIST", "QMNIST")], ids=" and ".join)
@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED.keys())
def test_nested_datasets(make: Make, names: tuple[str, str], nest: Any, device: str) -> None:
    other = make(names[1], target_transform=lambda i: i + 100)
    dataset = nest(make(names[0]), other)
    assert isinstance(from_dataset(dataset), ArraySource)
    assert same(on_host(DALILoader(dataset, 3, device=device)), list(DataLoader(dataset, 3)))


@pytest.mark.parametrize("kept", [25, COUNT - 1], ids=["longer", "shorter"])
def test_concatenation_keeps_the_lengths_that_it_was_made_with(make: Make, kept: int) -> None:
    first = make("CIFAR10")
    dataset = ConcatDataset([first, make("SVHN")])
    rows = np.arange(kept) % COUNT
    first.data, first.targets = first.data[rows], [first.targets[row] for row in rows]
    if kept < COUNT:
        with pytest.raises(UnsupportedDatasetError, match="shorter"):
            from_dataset(dataset)
    else:
        assert same(list(DALILoader(dataset, 8, device="cpu")), list(DataLoader(dataset, 8)))


# Datasets that are asked for samples


class Overriding(CIFAR10):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class OverridingFolder(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class OverridingSubset(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> Any:
        return super().__getitems__(indices)


class Several(CIFAR10):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Half(CIFAR10):
    def __len__(self) -> int:
        return len(self.data) // 2


class Harmless(CIFAR10):
    def extra_repr(self) -> str:
        return "mine"


class Streamed(IterableDataset[Any], CIFAR10):
    def __iter__(self) -> Any:
        return iter(())


class Raising(ImageFolder):
    @property
    def samples(self) -> Any:
        return 1 / 0


class Unclassed:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class Grasping:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Speechless(torch.nn.Module):
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def load_grey(path: str) -> Any:
    raise AssertionError("never called")


def having(dataset: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return dataset


def of(kind: type[Any], like: Any) -> Any:
    like.__class__ = kind
    return like


REJECTED: dict[str, tuple[Callable[[Make, Path], Any], str]] = {
    "__getitem__": (lambda m, p: of(Overriding, m("CIFAR10")), "Overriding overrides how samples are fetched"),
    "__getitems__": (lambda m, p: of(Several, m("CIFAR10")), "Several overrides how samples are fetched"),
    "__getitems__ of one": (lambda m, p: having(m("CIFAR10"), __getitems__=print), "overrides how samples are fetched"),
    "__len__": (lambda m, p: of(Half, m("CIFAR10")), "Half has 20 images and says that it has 10"),
    "iterable": (lambda m, p: of(Streamed, m("CIFAR10")), "Streamed is an IterableDataset"),
    "folder": (lambda m, p: OverridingFolder(p), "OverridingFolder overrides how samples are fetched"),
    "subset": (lambda m, p: OverridingSubset(ImageFolder(p), [0]), "OverridingSubset overrides how samples"),
    "inside": (lambda m, p: ConcatDataset([ImageFolder(p), Subset(OverridingFolder(p), [0])]), "OverridingFolder"),
    "loader": (lambda m, p: ImageFolder(p, loader=load_grey), "loader of its own, load_grey"),
    "tensors": (lambda m, p: TensorDataset(torch.ones(3)), "TensorDataset is not an image folder"),
    "floats": (lambda m, p: having(m("CIFAR10"), data=np.ones((COUNT, 32, 32, 3))), "data of CIFAR10 is not of"),
    "list": (lambda m, p: having(m("CIFAR10"), data=list(photographs(32))), "data of CIFAR10 is not of"),
    "array": (lambda m, p: having(m("MNIST"), data=grey("other")), "data of MNIST is not of"),
    "no colours": (lambda m, p: having(m("CIFAR10"), data=grey("other")), r"has the shape \(20, 28, 28\)"),
    "RGBA": (lambda m, p: having(m("CIFAR10"), data=np.ones((COUNT, 9, 9, 4), np.uint8)), "has the shape"),
    "few targets": (lambda m, p: having(m("SVHN"), labels=np.arange(3)), "SVHN has 20 images and 3 targets"),
    "no targets": (lambda m, p: having(m("CIFAR10"), targets=None), "TypeError"),
    "vectors": (lambda m, p: having(m("MNIST"), targets=torch.ones(COUNT, 2)), "TypeError"),
    "nothing": (lambda m, p: CIFAR10.__new__(CIFAR10), "AttributeError"),
    "folder too": (lambda m, p: ConcatDataset([m("CIFAR10"), ImageFolder(p)]), "folders and datasets in memory"),
    "shapes": (lambda m, p: ConcatDataset([m("CIFAR10"), m("STL10")]), r"differ in shape: \(32, 32, 3\) in CIFAR10"),
    "transforms": (lambda m, p: ConcatDataset([m("MNIST"), m("MNIST", v2.CenterCrop(3))]), "different transforms"),
    "folders' transforms": (
        lambda m, p: ConcatDataset([ImageFolder(p, v2.CenterCrop(3)), ImageFolder(p, v2.CenterCrop(4))]),
        "different transforms",
    ),
    "dtypes that repr leaves out": (
        lambda m, p: ConcatDataset([ImageFolder(p, v2.ToDtype(d, scale=True)) for d in (torch.float32, torch.float16)]),
        "different transforms",
    ),
    "no index": (lambda m, p: Subset(m("CIFAR10"), [0.5]), "Subset cannot be read.*TypeError"),  # pyright: ignore
    "outside": (lambda m, p: Subset(m("CIFAR10"), [COUNT]), "Subset cannot be read.*IndexError"),
    "raising samples": (lambda m, p: of(Raising, ImageFolder(p)), "Raising cannot be read.*ZeroDivisionError"),
    "raising class": (lambda m, p: Unclassed(), "Unclassed cannot be read.*no class"),
    "raising attributes": (lambda m, p: Subset(Grasping(), [0]), "Grasping is not an image folder"),  # pyright: ignore
    "raising repr": (lambda m, p: m("CIFAR10", Speechless()), "CIFAR10 cannot be read.*no words"),
    "None": (lambda m, p: None, "NoneType is not an image folder"),
}


@pytest.mark.parametrize(("odd", "text"), REJECTED.values(), ids=REJECTED.keys())
def test_other_datasets_are_rejected_and_nothing_else_is_raised(
    make: Make, pictures: Path, odd: Any, text: str
) -> None:
    dataset = odd(make, pictures)
    with pytest.raises(UnsupportedDatasetError, match=text):
        from_dataset(dataset)
    assert describe_dataset_state(dataset) == describe_dataset_state(dataset)


def test_subclass_may_change_anything_else(make: Make) -> None:
    dataset = of(Harmless, make("CIFAR10"))
    assert "(Harmless)" in from_dataset(dataset).describe()


# Changes


def replace_data(dataset: Any) -> None:
    dataset.data = photographs(36, "other")


def replace_targets(dataset: Any) -> None:
    dataset.targets = np.roll(dataset.targets, 1)


def change_targets(dataset: Any) -> None:
    dataset.targets[4] = 9


def change_transform(dataset: Any) -> None:
    dataset.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(10)])


def change_inside_transform(dataset: Any) -> None:
    dataset.transform.transforms[1].size = (10, 10)


def change_target_transform(dataset: Any) -> None:
    dataset.target_transform = str


CHANGES = [
    replace_data,
    replace_targets,
    change_targets,
    change_transform,
    change_inside_transform,
    change_target_transform,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("targets", [list, np.array, torch.tensor], ids=["list", "numpy", "tensor"])
@pytest.mark.parametrize("nest", [identity, lambda one: ConcatDataset([Subset(one, range(COUNT))])], ids=["", "nested"])
def test_changed_dataset_is_seen_by_the_next_epoch(
    make: Make, change: Any, targets: Any, nest: Any, device: str
) -> None:
    dataset = make("CIFAR10", v2.Compose([v2.ToImage(), v2.CenterCrop(24)]))
    dataset.targets = targets(dataset.targets)
    ours = DALILoader(nest(dataset), 8, device=device)
    before = on_host(ours)
    change(dataset)
    assert same(on_host(ours), true := list(DataLoader(nest(dataset), 8)))
    assert not same(before, true)


def test_compat_is_seen(make: Make) -> None:
    dataset = make("QMNIST")
    ours = DALILoader(dataset, 8, device="cpu")
    shapes = [next(iter(ours))[1].shape]
    dataset.compat = False
    assert [*shapes, next(iter(ours))[1].shape] == [(8,), (8, 8)]
