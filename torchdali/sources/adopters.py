"""Find the source of a dataset, or say why the dataset is worker-fed."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torchvision
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torchvision.datasets import folder
from torchvision.datasets.folder import default_loader, pil_loader

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.arrays import Arrays, ArraySource, find_base_class, get_targets, view_as_array
from torchdali.sources.bare import BARE_CLASSES, BareFiles, get_bare_state, get_bare_transforms
from torchdali.sources.combined import CombinedSource
from torchdali.sources.files import FILE_CLASSES, check_joint_transform, get_attributes, get_loader, get_pairs
from torchdali.sources.folder import FileSource
from torchdali.sources.headers.table import HeaderColumns
from torchdali.sources.index import ImageIndex
from torchdali.sources.paths import Paths, read_samples
from torchdali.sources.source import Source, Targets
from torchdali.sources.wrapped import WrappedFiles, find_inner, get_wrapped_state, get_wrapped_transforms
from torchdali.sources.wrapped_classes import WRAPPED_CLASSES
from torchdali.transforms import find_rule, flatten, snapshot
from torchdali.transforms.spec import IntArray

__all__ = ["describe_dataset_state", "from_dataset"]

_Places = range | IntArray
"""Places of samples; a range where they are consecutive, which then take no memory."""

_HINT = (
    "Native are torchvision's image folders with the default image loader, its other datasets that docs/datasets.md "
    "lists as native, ImageIndex, and datasets with a method torchdali_source(); "
    "also under Subset, random_split and ConcatDataset"
)

_METHOD = "torchdali_source"


def from_dataset(dataset: Any) -> Source:
    """Return the source of a dataset: its files, arrays or own source, its targets and transforms.

    Args:
        dataset: One of torchvision's datasets of image files or in memory, an ``ImageIndex``, one
            with a method ``torchdali_source()``, or ``Subset`` and ``ConcatDataset`` of such, nested.

    Raises:
        UnsupportedDatasetError: It is another dataset, or one whose samples are not simply files that torchvision's
            default loader opens, or images of one array. Nothing else is raised, whatever the dataset is.
    """
    try:
        _describe_state(dataset)  # if this fails, a change would not be seen
        return _open(dataset)
    except UnsupportedDatasetError:
        raise
    except Exception as error:  # such a dataset may have attributes that do anything
        raise UnsupportedDatasetError(
            f"{type(dataset).__name__} cannot be read without being asked for samples "
            f"({type(error).__name__}: {error}). {_HINT}."
        ) from error


def _open(dataset: Any) -> Source:
    leaves: list[Any] = []
    ends: list[int] = []
    places = _resolve(dataset, leaves, ends)
    kinds = {_find_leaf_kind(leaf) for leaf in leaves}
    if len(kinds) > 1:
        names = " and ".join(kind for kind in (_FILES, _ARRAYS, _OWN) if kind in kinds)
        raise UnsupportedDatasetError(f"ConcatDataset has {names}. {_HINT}.")
    _check_same_transform(leaves)
    functions = [getattr(leaf, "target_transform", None) for leaf in leaves]
    if kinds == {_OWN}:
        sources = [_open_own(leaf) for leaf in leaves]
        whole = len(leaves) == 1 and isinstance(places, range)
        return sources[0] if whole else CombinedSource(sources, *_find_rows_of_leaves(ends, _to_array(places)))
    if kinds == {_ARRAYS}:
        which, rows = _find_rows_of_leaves(ends, _to_array(places))
        return ArraySource(
            [Arrays(leaf) for leaf in leaves], which, rows, functions, leaves[0].transform, _describe(dataset)
        )
    which = None
    if len(leaves) > 1 and any(functions):
        which = _find_rows_of_leaves(ends, _to_array(places))[0].astype(np.min_scalar_type(len(leaves)))
    classes = len({name for leaf in leaves for name in getattr(leaf, "classes", ())})
    where = f" in {classes:,} {'class' if classes == 1 else 'classes'}" if classes else ""
    description = f"{len(places):,} files{where} ({_describe(dataset)})"
    paths, values, columns, files = _find_files(leaves, ends[-1], places)
    targets = Targets(values, functions, which)
    return _DatasetFiles(dataset, paths, targets, leaves[0].transform, description, columns, files)


class _Adopter(NamedTuple):
    """How to read torchvision's datasets of some classes whose files and targets are known."""

    open: Callable[[Any], Source]
    get_state: Callable[[Any], list[Any]]
    get_transforms: Callable[[Any], tuple[Any, Any]]


_BARE = _Adopter(BareFiles, get_bare_state, get_bare_transforms)
_WRAPPED = _Adopter(WrappedFiles, get_wrapped_state, get_wrapped_transforms)


def _find_adopter(dataset: Any) -> _Adopter | None:
    """Return how to read a dataset of a known class without a source of its own, wrapped by torchvision or not."""
    if type(find_inner(dataset)).__name__ in WRAPPED_CLASSES:
        return _WRAPPED
    kind = cast("type[Any]", type(dataset))
    is_bare = kind in BARE_CLASSES and _is_plain(dataset, kind) and not _has_own_source(dataset)
    return _BARE if is_bare else None


def _open_own(leaf: Any) -> Source:
    adopter = _find_adopter(leaf)
    return adopter.open(leaf) if adopter else leaf.torchdali_source()


_FILES, _ARRAYS, _OWN = "image folders", "datasets in memory", "datasets with a source of their own"


def _find_leaf_kind(leaf: Any) -> str:
    base = _find_base(leaf)
    if base is ImageIndex or base in FILE_CLASSES:
        return _FILES
    return _ARRAYS if base else _OWN


def _find_rows_of_leaves(ends: Sequence[int], places: IntArray) -> tuple[IntArray, IntArray]:
    """Return for each sample the index of its dataset, and its row there."""
    which = np.searchsorted(ends, places, "right")
    return which, places - np.array([0, *ends])[which]


def _get_leaf_pairs(leaf: Any) -> list[tuple[Any, Any]]:
    """Return the path and the target of each sample of a dataset of files."""
    return get_pairs(leaf, cast("type[Any]", _find_base(leaf)))


class _DatasetFiles(FileSource):
    """A source that another process opens again. A copy would contain the memory-mapped files."""

    def __init__(self, dataset: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._dataset = dataset

    def __reduce__(self) -> Any:
        return _open, (self._dataset,)


def _find_files(
    leaves: list[Any], count: int, places: _Places
) -> tuple[Paths, Any, HeaderColumns | None, npt.NDArray[Any] | None]:
    """Return paths, targets, headers and file numbers of samples; ``places`` are those in all leaves together."""
    whole = isinstance(places, range) and len(places) == count
    if not any(isinstance(leaf, ImageIndex) for leaf in leaves):
        samples: Any = _get_leaf_pairs(leaves[0]) if len(leaves) == 1 else [*chain(*map(_get_leaf_pairs, leaves))]
        table, targets = read_samples(samples if whole else (samples[i] for i in _to_array(places).tolist()))
        return Paths([table]), targets, None, None
    # The arrays of an index stay where they are: its samples are known by their rows in it.
    pairs = [
        (leaf.paths, leaf.targets) if isinstance(leaf, ImageIndex) else read_samples(_get_leaf_pairs(leaf))
        for leaf in leaves
    ]
    known = [leaf.headers() if isinstance(leaf, ImageIndex) else HeaderColumns.unknown(len(leaf)) for leaf in leaves]
    columns = known[0] if len(known) == 1 else HeaderColumns(*map(np.concatenate, zip(*known, strict=True)))
    files: npt.NDArray[Any] | None = None if whole else _to_array(places).astype(np.min_scalar_type(count))
    values = [targets for _, targets in pairs]
    if all(isinstance(targets, np.ndarray) for targets in values):
        labels: Any = values[0] if len(values) == 1 else np.concatenate(values)
        targets = labels if files is None else labels[files]
    else:
        mixed: list[Any] = [*chain(*(part.tolist() if isinstance(part, np.ndarray) else part for part in values))]
        targets = mixed if files is None else [mixed[i] for i in files.tolist()]
    return Paths([table for table, _ in pairs], files), targets, columns, files


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


def describe_dataset_state(dataset: Any) -> object:
    """Return what differs after a change of the dataset that :func:`from_dataset` would see. Never raise."""
    try:
        return _describe_state(dataset)
    except Exception:  # noqa: BLE001 - for the same reason as in from_dataset()
        return _Objects([dataset])


def _describe_state(dataset: Any) -> object:
    if _is_plain(dataset, Subset):
        return _compute_digest(_to_indices(dataset.indices)), _describe_state(dataset.dataset)
    if _is_plain(dataset, ConcatDataset):
        return list(dataset.cumulative_sizes), [_describe_state(one) for one in dataset.datasets]
    if adopter := _find_adopter(dataset):
        parts = adopter.get_state(dataset)
        lists = [_Objects(cast("list[Any]", part)) for part in parts if isinstance(part, list)]
        return _Objects(parts), lists, repr(parts[0]), snapshot(parts[0])
    base = _find_base(dataset)
    if _has_own_source(dataset):
        own = [getattr(dataset, name, None) for name in ("transform", "target_transform")]
        return _Objects([dataset, *own]), repr(own[0]), snapshot(own[0])
    if base is None or not _is_plain(dataset, base):
        return _Objects([dataset])
    about = [dataset.transform, dataset.target_transform]
    text = repr(dataset.transform), snapshot(dataset.transform)
    if base in FILE_CLASSES:
        samples = [_Objects(getattr(dataset, name)) for name in FILE_CLASSES[base]]
        return samples, _Objects(get_attributes(dataset, base)), text, _get_image_backend()
    if base is ImageIndex:
        return _Objects([*about, dataset]), text
    # Images are read where they are; targets were copied.
    about += [dataset.data, getattr(dataset, "compat", None)]
    return _Objects(about), text, _describe_content(get_targets(dataset))


def _describe_content(targets: Any) -> object:
    array: Any = view_as_array(targets)
    if array is not None and not array.dtype.hasobject:
        return _compute_digest(array)
    several = array is not None or isinstance(cast("object", targets), (list, tuple))
    return _Objects(targets if several else [targets])


def _compute_digest(array: npt.NDArray[Any]) -> object:
    """Return a small value that is equal for equal arrays."""
    content = cast("Any", np.ascontiguousarray(array).view(np.uint8))
    return str(array.dtype), array.shape, hashlib.blake2b(content).digest()


def _to_indices(indices: Any) -> IntArray:
    """Return the indices of a ``Subset`` as an array."""
    array = view_as_array(indices)
    if array is not None and array.dtype.kind in "iu" and array.ndim == 1:
        return array.astype(np.int64)
    return np.fromiter(map(operator.index, indices), np.int64)


def _resolve(dataset: Any, leaves: list[Any], ends: list[int]) -> _Places:
    """Return the place of each sample in all leaves together.

    Append the datasets that hold the samples to ``leaves``, and the places at which they end to ``ends``.
    """
    if _is_plain(dataset, Subset):
        return _to_array(_resolve(dataset.dataset, leaves, ends))[_to_indices(dataset.indices)]
    if _is_plain(dataset, ConcatDataset):
        parts = [_resolve(one, leaves, ends) for one in dataset.datasets]
        counts = np.diff(dataset.cumulative_sizes, prepend=0).tolist()  # which are as old as the ConcatDataset
        if any(count > len(part) for count, part in zip(counts, parts, strict=True)):
            raise UnsupportedDatasetError("a dataset under ConcatDataset is shorter than when it was concatenated")
        return _concatenate([part[:count] for count, part in zip(counts, parts, strict=True)])
    count = _count_samples(dataset)
    known = [i for i, one in enumerate(leaves) if one is dataset]
    if not known:
        leaves.append(dataset)
        ends.append(count + (ends[-1] if ends else 0))
    end = ends[known[0] if known else -1]
    return range(end - count, end)


def _concatenate(parts: Sequence[_Places]) -> _Places:
    ranges = [part for part in parts if isinstance(part, range)]
    if len(ranges) == len(parts) and all(a.stop == b.start for a, b in pairwise(ranges)):
        return range(ranges[0].start, ranges[-1].stop)
    return np.concatenate([_to_array(part) for part in parts])


def _to_array(places: _Places) -> IntArray:
    return np.arange(places.start, places.stop) if isinstance(places, range) else places


def _find_base(dataset: Any) -> type[Any] | None:
    """Return the known class that a dataset is of; None if it is of none, or has a source of its own."""
    if _has_own_source(dataset) or _find_adopter(dataset):
        return None
    bases: tuple[type[Any], ...] = (Subset, ConcatDataset, ImageIndex, *FILE_CLASSES)
    return next((base for base in bases if isinstance(dataset, base)), None) or find_base_class(dataset)


def _is_plain(dataset: Any, base: type[Any]) -> bool:
    """Return whether a dataset is a ``base`` that fetches its samples as ``base`` does."""
    if not isinstance(dataset, base):
        return False
    kind: Any = type(cast("object", dataset))
    # Where torch finds it: it may be an attribute of the one object.
    several: Any = getattr(dataset, "__getitems__", None)
    theirs: Any = getattr(base, "__getitems__", None)
    same = several is None if theirs is None else getattr(several, "__func__", None) is theirs
    return same and kind.__getitem__ is cast("Any", base).__getitem__ and not _is_patched(kind.__getitem__)


def _has_own_source(dataset: Any) -> bool:
    """Return whether a dataset has a source, and no class after the one that defines it changes ``__getitem__``."""
    classes: tuple[type[Any], ...] = type(dataset).__mro__
    methods = (_METHOD, "__getitem__", "__getitems__")
    definers = [next((i for i, kind in enumerate(classes) if name in vars(kind)), len(classes)) for name in methods]
    return definers[0] < len(classes) and definers[0] <= min(definers[1:])


def _is_patched(function: Any) -> bool:
    """Return whether a function of torchvision's was replaced."""
    return function.__module__.partition(".")[0] not in ("torch", "torchvision", "torchdali")


def _count_samples(dataset: Any) -> int:
    """Return the number of samples of a dataset. Raise an error if it is not read natively."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise UnsupportedDatasetError(f"{name} is an IterableDataset. {_HINT}.")
    if _find_adopter(dataset):
        return len(dataset)
    base = _find_base(dataset)
    if base is None and any(_METHOD in vars(kind) for kind in type(dataset).__mro__):
        if not _has_own_source(dataset):
            raise UnsupportedDatasetError(f"{name} overrides __getitem__ of the class that defines {_METHOD}().")
        return len(dataset)
    if base is None:
        raise UnsupportedDatasetError(f"{name} is not an image folder or torchvision's in-memory dataset. {_HINT}.")
    if not _is_plain(dataset, base):
        raise UnsupportedDatasetError(f"{name} overrides how samples are fetched (__getitem__). {_HINT}.")
    if base in FILE_CLASSES:
        _check_loader(dataset, base)
        check_joint_transform(dataset, base)
        images = getattr(dataset, FILE_CLASSES[base][0])
    else:
        images = dataset.paths if base is ImageIndex else dataset.data
    count = len(images)
    if len(dataset) != count:
        raise UnsupportedDatasetError(f"{name} has {count} images and says that it has {len(dataset)}. {_HINT}.")
    return count


def _check_loader(dataset: Any, base: type[Any]) -> None:
    """Raise where a dataset of files opens them otherwise than :func:`pil_loader`."""
    loader = get_loader(dataset, base)
    other = loader is not pil_loader and (loader is not default_loader or _get_image_backend() != "PIL")
    name = type(dataset).__name__
    if loader is None:
        raise UnsupportedDatasetError(
            f"{name} opens its files without a loader, so that images keep their mode. For RGB images give it "
            "loader=torchvision.datasets.folder.default_loader."
        )
    if other or _is_patched(folder.pil_loader):
        called = getattr(loader, "__name__", repr(loader))
        raise UnsupportedDatasetError(f"{name} opens its files with a loader of its own, {called}. {_HINT}.")


def _get_image_backend() -> str:
    return cast("Any", torchvision).get_image_backend()


def _get_transform(leaf: Any) -> Any:
    adopter = _find_adopter(leaf)
    return adopter.get_transforms(leaf)[0] if adopter else getattr(leaf, "transform", None)


def _check_same_transform(leaves: Sequence[Any]) -> None:
    transforms = [_get_transform(leaf) for leaf in leaves]
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


def _describe(dataset: Any) -> str:
    name = type(dataset).__name__
    base = _find_base(dataset)
    if base is Subset:
        return f"{name} of {_describe(dataset.dataset)}"
    return f"{name} of {', '.join(map(_describe, dataset.datasets))}" if base is ConcatDataset else name
