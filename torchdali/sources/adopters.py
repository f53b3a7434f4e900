"""Reading a dataset without asking it for samples."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torchvision
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torchvision.datasets import DatasetFolder, folder
from torchvision.datasets.folder import default_loader, pil_loader

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.arrays import Arrays, ArraySource, as_array, family, targets_of
from torchdali.sources.folder import FolderSource
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.index import ImageIndex
from torchdali.sources.paths import Paths, read_samples
from torchdali.sources.source import NativeSource
from torchdali.transforms import find_rule, flatten, snapshot
from torchdali.transforms.spec import IntArray

__all__ = ["dataset_state", "from_dataset"]

_Places = range | IntArray
"""Places of samples; a range where they are consecutive, which then take no memory."""

_HINT = (
    "torchvision's ImageFolder and DatasetFolder with the default image loader, ImageIndex, CIFAR10, CIFAR100, MNIST, "
    "FashionMNIST, KMNIST, EMNIST, QMNIST, SVHN and STL10 are read without being asked for samples, "
    "also under Subset, random_split and ConcatDataset"
)


def from_dataset(dataset: Any) -> NativeSource:
    """Reads the files or arrays, targets and transforms of a dataset.

    Args:
        dataset: A ``DatasetFolder``, ``ImageFolder`` or ``ImageIndex``, one of torchvision's datasets in memory, or
            ``Subset`` and ``ConcatDataset`` of such, nested.

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


def _lift(dataset: Any) -> NativeSource:
    leaves: list[Any] = []
    ends: list[int] = []
    places = _resolve(dataset, leaves, ends)
    in_files = sum(isinstance(one, (DatasetFolder, ImageIndex)) for one in leaves)
    if 0 < in_files < len(leaves):
        raise UnsupportedDatasetError(f"ConcatDataset has image folders and datasets in memory. {_HINT}.")
    _check_same_transform(leaves)
    functions = [one.target_transform for one in leaves]
    transform = leaves[0].transform
    if not in_files:
        places = _array(places)
        leaf = np.searchsorted(ends, places, "right")
        row = places - np.array([0, *ends])[leaf]
        return ArraySource([Arrays(one) for one in leaves], leaf, row, functions, transform, _outline(dataset))
    which = None
    if len(leaves) > 1 and any(functions):
        which = np.searchsorted(ends, _array(places), "right").astype(np.min_scalar_type(len(leaves)))
    classes = len({name for one in leaves for name in one.classes})
    where = f" in {classes:,} {'class' if classes == 1 else 'classes'}" if classes else ""
    about = f"{len(places):,} files{where} ({_outline(dataset)})"
    return _Lifted(dataset, *_files(leaves, ends[-1], places), which, functions, transform, about)


class _Lifted(FolderSource):
    """A source that another process makes anew: what was mapped into memory would be copied otherwise."""

    def __init__(self, dataset: Any, *about: Any) -> None:
        super().__init__(*about)
        self._dataset = dataset

    def __reduce__(self) -> Any:
        return _lift, (self._dataset,)


def _files(leaves: list[Any], count: int, places: _Places) -> tuple[Paths, HeaderTable, Any]:
    """Paths, facts and targets of the samples, whose places in all leaves together are given."""
    whole = isinstance(places, range) and len(places) == count
    if not any(isinstance(one, ImageIndex) for one in leaves):
        everything: Any = leaves[0].samples if len(leaves) == 1 else [*chain(*(one.samples for one in leaves))]
        table, targets = read_samples(everything if whole else (everything[i] for i in _array(places).tolist()))
        return Paths([table]), HeaderTable(HeaderColumns.unknown(len(table))), targets
    # What an index has stays where it is: the samples are known by their place in it.
    read = [(one.paths, one.targets) if isinstance(one, ImageIndex) else read_samples(one.samples) for one in leaves]
    known = [one.headers() if isinstance(one, ImageIndex) else HeaderColumns.unknown(len(one)) for one in leaves]
    columns = known[0] if len(known) == 1 else HeaderColumns(*map(np.concatenate, zip(*known, strict=True)))
    files: npt.NDArray[Any] | None = None if whole else _array(places).astype(np.min_scalar_type(count))
    given = [targets for _, targets in read]
    if all(isinstance(targets, np.ndarray) for targets in given):
        labels: Any = given[0] if len(given) == 1 else np.concatenate(given)
        targets = labels if files is None else labels[files]
    else:
        mixed: list[Any] = [*chain(*(one.tolist() if isinstance(one, np.ndarray) else one for one in given))]
        targets = mixed if files is None else [mixed[i] for i in files.tolist()]
    return Paths([table for table, _ in read], files), HeaderTable(columns, files), targets


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
    """Something that differs when a dataset was changed in a way that :func:`from_dataset` sees; it never raises."""
    try:
        return _state(dataset)
    except Exception:  # noqa: BLE001 - for the same reason as in lift(), which says so
        return _Objects([dataset])


def _state(dataset: Any) -> object:
    if _is_plain(dataset, Subset):
        return _digest(_indices(dataset.indices)), _state(dataset.dataset)
    if _is_plain(dataset, ConcatDataset):
        return list(dataset.cumulative_sizes), [_state(one) for one in dataset.datasets]
    base = _base(dataset)
    if base is None or not _is_plain(dataset, base):
        return _Objects([dataset])
    about = [dataset.transform, dataset.target_transform]
    text = repr(dataset.transform), snapshot(dataset.transform)
    if base is DatasetFolder:
        return _Objects(dataset.samples), _Objects([*about, dataset.loader]), text, _image_backend()
    if base is ImageIndex:
        return _Objects([*about, dataset]), text
    # Images are read where they are; targets were copied.
    about += [dataset.data, getattr(dataset, "compat", None)]
    return _Objects(about), text, _content(targets_of(dataset))


def _content(targets: Any) -> object:
    array: Any = as_array(targets)
    if array is not None and not array.dtype.hasobject:
        return _digest(array)
    several = array is not None or isinstance(cast("object", targets), (list, tuple))
    return _Objects(targets if several else [targets])


def _digest(array: npt.NDArray[Any]) -> object:
    """Equal for equal arrays, and small."""
    content = cast("Any", np.ascontiguousarray(array).view(np.uint8))
    return str(array.dtype), array.shape, hashlib.blake2b(content).digest()


def _indices(indices: Any) -> IntArray:
    """What a ``Subset`` was given."""
    array = as_array(indices)
    if array is not None and array.dtype.kind in "iu" and array.ndim == 1:
        return array.astype(np.int64)
    return np.fromiter(map(operator.index, indices), np.int64)


def _resolve(dataset: Any, leaves: list[Any], ends: list[int]) -> _Places:
    """For each sample its place in all of ``leaves`` together; ``ends`` are the places at which each of them ends."""
    if _is_plain(dataset, Subset):
        return _array(_resolve(dataset.dataset, leaves, ends))[_indices(dataset.indices)]
    if _is_plain(dataset, ConcatDataset):
        parts = [_resolve(one, leaves, ends) for one in dataset.datasets]
        counts = np.diff(dataset.cumulative_sizes, prepend=0).tolist()  # which are as old as the ConcatDataset
        if any(count > len(part) for count, part in zip(counts, parts, strict=True)):
            raise UnsupportedDatasetError("a dataset under ConcatDataset is shorter than when it was concatenated")
        return _concatenated([part[:count] for count, part in zip(counts, parts, strict=True)])
    count = _checked(dataset)
    known = [i for i, one in enumerate(leaves) if one is dataset]
    if not known:
        leaves.append(dataset)
        ends.append(count + (ends[-1] if ends else 0))
    end = ends[known[0] if known else -1]
    return range(end - count, end)


def _concatenated(parts: Sequence[_Places]) -> _Places:
    ranges = [part for part in parts if isinstance(part, range)]
    if len(ranges) == len(parts) and all(a.stop == b.start for a, b in pairwise(ranges)):
        return range(ranges[0].start, ranges[-1].stop)
    return np.concatenate([_array(part) for part in parts])


def _array(places: _Places) -> IntArray:
    return np.arange(places.start, places.stop) if isinstance(places, range) else places


def _base(dataset: Any) -> type[Any] | None:
    """The class whose ``__getitem__`` a dataset has, if it has not its own."""
    bases: tuple[type[Any], ...] = (Subset, ConcatDataset, DatasetFolder, ImageIndex)
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
    return same and kind.__getitem__ is cast("Any", base).__getitem__ and not _patched(kind.__getitem__)


def _patched(function: Any) -> bool:
    """Whether a function of torchvision's has had another put in its place."""
    return function.__module__.partition(".")[0] not in ("torch", "torchvision", "torchdali")


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
        other = loader is not pil_loader and (loader is not default_loader or _image_backend() != "PIL")
        if other or _patched(folder.pil_loader):
            called = getattr(loader, "__name__", repr(loader))
            raise UnsupportedDatasetError(f"{name} opens its files with a loader of its own, {called}. {_HINT}.")
    images = dataset.samples if base is DatasetFolder else dataset.paths if base is ImageIndex else dataset.data
    count = len(images)
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
        # Two transforms may be two objects that do the same; of those that a rule knows the attributes tell.
        known = all(find_rule(leaf) for leaf in flatten(transforms[0]) + flatten(other))
        if not known or snapshot(other) != snapshot(transforms[0]):
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
