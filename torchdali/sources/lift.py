"""Reading a dataset without asking it for samples."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torchvision
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import default_loader, pil_loader

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.folder import FolderSource
from torchdali.spec import IntArray
from torchdali.transforms import find_rule, flatten

__all__ = ["dataset_state", "lift"]

_HINT = (
    "torchdali reads torchvision's ImageFolder and DatasetFolder with the default image loader, "
    "also under Subset, random_split and ConcatDataset; for this dataset keep torch.utils.data.DataLoader"
)


def lift(dataset: Any) -> FolderSource:
    """Reads the paths, targets and transforms of an image folder.

    Args:
        dataset: A ``DatasetFolder`` or ``ImageFolder``, or ``Subset`` and ``ConcatDataset`` of such, nested.

    Raises:
        UnsupportedDatasetError: It is another dataset, or one whose samples are not simply files that
            torchvision's default loader opens.
    """
    leaves: list[DatasetFolder] = []
    leaf, row = _resolve(dataset, leaves)
    _check_same_transform(leaves)
    samples: list[Any] = [cast("Any", folder).samples for folder in leaves]
    chosen: list[tuple[str, Any]] = [samples[i][j] for i, j in zip(leaf.tolist(), row.tolist(), strict=True)]
    target_transforms: list[Any] = [cast("Any", folder).target_transform for folder in leaves]
    transform: Any = cast("Any", leaves[0]).transform if leaves else None
    paths = [path for path, _ in chosen]
    classes = len({name for folder in leaves for name in folder.classes})
    return FolderSource(
        paths,
        [target for _, target in chosen],
        leaf,
        target_transforms,
        transform,
        f"{len(paths):,} files in {classes:,} classes ({_outline(dataset)})",
    )


class _Objects:
    """A list that equals another one of the very same objects; comparing a million takes 30 ms."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = list(items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Objects) or len(self._items) != len(other._items):
            return False
        return all(map(operator.is_, self._items, other._items))

    def __hash__(self) -> int:
        return len(self._items)


def dataset_state(dataset: Any) -> object:
    """Something that differs when a dataset was changed in a way that :func:`lift` would see."""
    if isinstance(dataset, Subset):
        return [operator.index(i) for i in dataset.indices], dataset_state(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return tuple(dataset_state(one) for one in cast("Any", dataset).datasets)
    if isinstance(dataset, DatasetFolder):
        folder: Any = dataset
        return (
            _Objects(folder.samples),
            id(folder.transform),
            repr(folder.transform),
            id(folder.target_transform),
            folder.loader,
        )
    return id(dataset)


def _resolve(dataset: Any, leaves: list[DatasetFolder]) -> tuple[IntArray, IntArray]:
    """For each sample the number of its folder in ``leaves`` and its row there."""
    if _is_plain(dataset, Subset):
        leaf, row = _resolve(dataset.dataset, leaves)
        chosen = np.fromiter(map(operator.index, dataset.indices), np.int64)
        return leaf[chosen], row[chosen]
    if _is_plain(dataset, ConcatDataset):
        parts = [_resolve(one, leaves) for one in dataset.datasets]
        return np.concatenate([leaf for leaf, _ in parts]), np.concatenate([row for _, row in parts])
    _check_folder(dataset)
    known = [i for i, one in enumerate(leaves) if one is dataset]
    if not known:
        leaves.append(dataset)
    number = known[0] if known else len(leaves) - 1
    count = len(dataset.samples)
    return np.full(count, number, np.int64), np.arange(count, dtype=np.int64)


def _is_plain(dataset: Any, base: type[Any]) -> bool:
    """Whether it is a ``base`` that fetches its samples the way ``base`` does."""
    if not isinstance(dataset, base):
        return False
    kind: Any = type(cast("object", dataset))
    return kind.__getitem__ is base.__getitem__ and (
        getattr(kind, "__getitems__", None) is getattr(base, "__getitems__", None)
    )


def _check_folder(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise UnsupportedDatasetError(f"{name} is an IterableDataset. {_HINT}.")
    if not isinstance(dataset, DatasetFolder):
        raise UnsupportedDatasetError(f"{name} is not an image folder. {_HINT}.")
    if not _is_plain(dataset, DatasetFolder):
        raise UnsupportedDatasetError(f"{name} overrides how samples are fetched (__getitem__). {_HINT}.")
    loader: Any = cast("Any", dataset).loader
    backend = cast("Any", torchvision).get_image_backend()
    if loader is not pil_loader and (loader is not default_loader or backend != "PIL"):
        called = getattr(loader, "__name__", repr(loader))
        raise UnsupportedDatasetError(f"{name} opens its files with a loader of its own, {called}. {_HINT}.")


def _check_same_transform(leaves: Sequence[DatasetFolder]) -> None:
    transforms: list[Any] = [cast("Any", folder).transform for folder in leaves]
    for other in transforms[1:]:
        if other is transforms[0]:
            continue
        # Two transforms may be two objects that do the same; where a rule knows them, their repr says it all.
        known = all(find_rule(leaf) for leaf in flatten(transforms[0]) + flatten(other))
        if not known or repr(other) != repr(transforms[0]):
            raise UnsupportedDatasetError(
                "the folders under ConcatDataset have different transforms:\n"
                f"{transforms[0]}\nand\n{other}\nGive them the same transform object, or make a loader for each."
            )


def _outline(dataset: Dataset[Any]) -> str:
    if isinstance(dataset, Subset):
        return f"{type(dataset).__name__} of {_outline(dataset.dataset)}"
    if isinstance(dataset, ConcatDataset):
        return f"ConcatDataset of {', '.join(_outline(one) for one in dataset.datasets)}"
    return type(dataset).__name__
