"""Reading a dataset without asking it for samples."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torchvision
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import default_loader, pil_loader

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.arrays import Arrays, ArraySource, as_array, family, targets_of
from torchdali.sources.folder import FolderSource
from torchdali.sources.source import LiftedSource
from torchdali.spec import IntArray
from torchdali.transforms import find_rule, flatten

__all__ = ["dataset_state", "lift"]

_HINT = (
    "torchvision's ImageFolder and DatasetFolder with the default image loader, CIFAR10, CIFAR100, MNIST, "
    "FashionMNIST, KMNIST, EMNIST, QMNIST, SVHN and STL10 are read without being asked for samples, "
    "also under Subset, random_split and ConcatDataset"
)


def lift(dataset: Any) -> LiftedSource:
    """Reads the files or arrays, targets and transforms of a dataset.

    Args:
        dataset: A ``DatasetFolder`` or ``ImageFolder``, one of torchvision's datasets in memory, or ``Subset`` and
            ``ConcatDataset`` of such, nested.

    Raises:
        UnsupportedDatasetError: It is another dataset, or one whose samples are not simply files that torchvision's
            default loader opens, or images of one array. Nothing else is raised, whatever the dataset is.
    """
    try:
        _state(dataset)  # where this cannot be told, a change would not be seen
        return _lift(dataset)
    except UnsupportedDatasetError:
        raise
    except Exception as error:  # such a dataset may have attributes that do anything
        raise UnsupportedDatasetError(
            f"{type(dataset).__name__} cannot be read without being asked for samples "
            f"({type(error).__name__}: {error}). {_HINT}."
        ) from error


def _lift(dataset: Any) -> LiftedSource:
    leaves: list[Any] = []
    leaf, row = _resolve(dataset, leaves)
    folders = sum(isinstance(one, DatasetFolder) for one in leaves)
    if 0 < folders < len(leaves):
        raise UnsupportedDatasetError(f"ConcatDataset has image folders and datasets in memory. {_HINT}.")
    _check_same_transform(leaves)
    functions = [one.target_transform for one in leaves]
    transform = leaves[0].transform
    if not folders:
        return ArraySource([Arrays(one) for one in leaves], leaf, row, functions, transform, _outline(dataset))
    samples: list[Any] = [one.samples for one in leaves]
    chosen: list[tuple[str, Any]] = [samples[i][j] for i, j in zip(leaf.tolist(), row.tolist(), strict=True)]
    classes = len({name for one in leaves for name in one.classes})
    return FolderSource(
        [path for path, _ in chosen],
        [target for _, target in chosen],
        leaf,
        functions,
        transform,
        f"{len(chosen):,} files in {classes:,} classes ({_outline(dataset)})",
    )


class _Objects:
    """A list that equals another one of the very same objects; comparing a million takes 30 ms."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = list(items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Objects) or len(self._items) != len(other._items):
            return False
        return all(map(operator.is_, self._items, other._items))

    def __hash__(self) -> int:
        return len(self._items)


def dataset_state(dataset: Any) -> object:
    """Something that differs when a dataset was changed in a way that :func:`lift` would see; it never raises."""
    try:
        return _state(dataset)
    except Exception:  # noqa: BLE001 - for the same reason as in lift(), which says so
        return _Objects([dataset])


def _state(dataset: Any) -> object:
    if _is_plain(dataset, Subset):
        return [operator.index(i) for i in dataset.indices], _state(dataset.dataset)
    if _is_plain(dataset, ConcatDataset):
        return list(dataset.cumulative_sizes), [_state(one) for one in dataset.datasets]
    base = _base(dataset)
    if base is None or not _is_plain(dataset, base):
        return _Objects([dataset])
    about = [dataset.transform, dataset.target_transform]
    text = repr(dataset.transform)
    if base is DatasetFolder:
        return _Objects(dataset.samples), _Objects([*about, dataset.loader]), text, _image_backend()
    # Images are read where they are; targets were copied.
    about += [dataset.data, getattr(dataset, "compat", None)]
    return _Objects(about), text, _content(targets_of(dataset))


def _content(targets: Any) -> object:
    array: Any = as_array(targets)
    if array is not None and not array.dtype.hasobject:
        return array.dtype.str, array.shape, array.tobytes()
    several = array is not None or isinstance(cast("object", targets), (list, tuple))
    return _Objects(targets if several else [targets])


def _resolve(dataset: Any, leaves: list[Any]) -> tuple[IntArray, IntArray]:
    """For each sample the number of its folder or dataset in memory in ``leaves``, and its row there."""
    if _is_plain(dataset, Subset):
        leaf, row = _resolve(dataset.dataset, leaves)
        chosen = np.fromiter(map(operator.index, dataset.indices), np.int64)
        return leaf[chosen], row[chosen]
    if _is_plain(dataset, ConcatDataset):
        parts = [_resolve(one, leaves) for one in dataset.datasets]
        counts = np.diff(dataset.cumulative_sizes, prepend=0).tolist()  # which are as old as the ConcatDataset
        if any(count > len(leaf) for count, (leaf, _) in zip(counts, parts, strict=True)):
            raise UnsupportedDatasetError("a dataset under ConcatDataset is shorter than when it was concatenated")
        cut = [(leaf[:count], row[:count]) for count, (leaf, row) in zip(counts, parts, strict=True)]
        return np.concatenate([leaf for leaf, _ in cut]), np.concatenate([row for _, row in cut])
    count = _checked(dataset)
    known = [i for i, one in enumerate(leaves) if one is dataset]
    if not known:
        leaves.append(dataset)
    number = known[0] if known else len(leaves) - 1
    return np.full(count, number, np.int64), np.arange(count, dtype=np.int64)


def _base(dataset: Any) -> type[Any] | None:
    """The class whose ``__getitem__`` a dataset has, if it has not its own."""
    bases: tuple[type[Any], ...] = (Subset, ConcatDataset, DatasetFolder)
    return next((base for base in bases if isinstance(dataset, base)), None) or family(dataset)


def _is_plain(dataset: Any, base: type[Any]) -> bool:
    """Whether it is a ``base`` that fetches its samples the way ``base`` does."""
    if not isinstance(dataset, base):
        return False
    kind: Any = type(cast("object", dataset))
    # Where torch finds it: it may be an attribute of the one object.
    several: Any = getattr(dataset, "__getitems__", None)
    theirs: Any = getattr(base, "__getitems__", None)
    same = several is None if theirs is None else getattr(several, "__func__", None) is theirs
    return same and kind.__getitem__ is cast("Any", base).__getitem__


def _checked(dataset: Any) -> int:
    """The number of samples of a folder or dataset in memory; raises where it is neither, or not as torchvision's."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise UnsupportedDatasetError(f"{name} is an IterableDataset. {_HINT}.")
    base = _base(dataset)
    if base is None:
        raise UnsupportedDatasetError(f"{name} is not an image folder or torchvision's in-memory dataset. {_HINT}.")
    if not _is_plain(dataset, base):
        raise UnsupportedDatasetError(f"{name} overrides how samples are fetched (__getitem__). {_HINT}.")
    if base is DatasetFolder:
        loader = dataset.loader
        if loader is not pil_loader and (loader is not default_loader or _image_backend() != "PIL"):
            called = getattr(loader, "__name__", repr(loader))
            raise UnsupportedDatasetError(f"{name} opens its files with a loader of its own, {called}. {_HINT}.")
    count = len(dataset.samples if base is DatasetFolder else dataset.data)
    if len(dataset) != count:
        raise UnsupportedDatasetError(f"{name} has {count} images and says that it has {len(dataset)}. {_HINT}.")
    return count


def _image_backend() -> str:
    return cast("Any", torchvision).get_image_backend()


def _check_same_transform(leaves: Sequence[Any]) -> None:
    transforms: list[Any] = [one.transform for one in leaves]
    for other in transforms[1:]:
        if other is transforms[0]:
            continue
        # Two transforms may be two objects that do the same; where a rule knows them, their repr says it all.
        known = all(find_rule(leaf) for leaf in flatten(transforms[0]) + flatten(other))
        if not known or repr(other) != repr(transforms[0]):
            raise UnsupportedDatasetError(
                "the datasets under ConcatDataset have different transforms:\n"
                f"{transforms[0]}\nand\n{other}\nGive them the same transform object, or make a loader for each."
            )


def _outline(dataset: Any) -> str:
    name = type(dataset).__name__
    base = _base(dataset)
    if base is Subset:
        return f"{name} of {_outline(dataset.dataset)}"
    return f"{name} of {', '.join(map(_outline, dataset.datasets))}" if base is ConcatDataset else name
