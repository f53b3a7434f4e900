"""The base of datasets whose images are bytes in larger files, and the source that the loader reads."""

from __future__ import annotations

import copy
import operator
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset

from torchdali.datasets.fields import open_rgb
from torchdali.datasets.shards import Bytes, Column
from torchdali.sources import InputKind, Labels, Source
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.places import Places
from torchdali.sources.remote import Client, Range
from torchdali.sources.source import ContentCache, ReadError
from torchdali.transforms.spec import IntArray

__all__ = [
    "EncodedDataset",
    "EncodedSource",
    "Label",
    "RemoteSource",
    "find_row",
    "labels_are_targets",
    "make_sample",
]

Label = str | Callable[[dict[str, Any]], Any] | Sequence[str] | None
"""What the target of a sample is: one of its parts, what a function makes of all, several parts, or nothing."""

_IMAGE = "image"


def make_sample(label: Label, image: Any, target: Any) -> Any:
    """Return a sample: a dictionary if several parts are its label, the image alone if it has no label, else a pair."""
    if label is None:
        return image
    return (image, target) if isinstance(label, str) or callable(label) else {_IMAGE: image, **target}


def find_row(dataset: Any, index: Any) -> int:
    """Return the row that an index of a dataset names, as a list takes it: also by a negative number.

    Raises:
        IndexError: There is no such row.
        TypeError: It is no int.
    """
    try:
        return range(len(dataset))[operator.index(index)]
    except TypeError as error:
        raise TypeError(
            f"an index of a {dataset!r} must be an int, got {index!r}; for several samples make a Subset"
        ) from error


class EncodedDataset(Dataset[Any]):
    """Images that are bytes in larger files. ``DataLoader`` and ``DALILoader`` take it.

    Args:
        label: See :data:`Label`.
        transform: Called with each image, which is an RGB image of PIL, as in ``ImageFolder``.
        target_transform: Called with each target. If ``label`` is several parts, this is a dictionary of them.

    Attributes:
        parts: The names of the parts that are the label; none if the label is a function or nothing.
        is_mapped: Whether :meth:`read` returns views of mapped memory, and so takes no time.
        client: Reads the images if they lie in an object store; None if they are files.
        has_parts_in_data: Whether :meth:`parts_in` needs what was fetched for the image.
        integers: The parts that are integers in all samples, by name.
    """

    is_mapped: bool = False
    client: Client | None = None
    has_parts_in_data: bool = False
    integers: Mapping[str, Column] = MappingProxyType({})

    def __init__(
        self,
        label: Label,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if label is not None and not isinstance(label, str) and not callable(label):
            several: Any = tuple(label) if isinstance(label, Iterable) else (None,)  # pyright: ignore[reportUnnecessaryIsInstance]
            if not all(isinstance(name, str) for name in several):
                raise TypeError(f"label must be a name, several names, a function or None, got {label!r}")
            if _IMAGE in several or not several:
                raise ValueError(f"label must be names of parts other than 'image', got {several!r}")
            label = several
        self.label: Label = label
        names = () if label is None or callable(label) else (label,) if isinstance(label, str) else label
        self.parts: tuple[str, ...] = tuple(names)
        self.transform, self.target_transform = transform, target_transform

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, rows: IntArray) -> list[Bytes]:
        """Return the image files of some samples. It may be called in several threads at once.

        Args:
            rows: ``(N,)`` int64, each at least 0 and below the length.
        """

    def find(self, rows: IntArray) -> Places:
        """Return where the image files of some samples lie in mapped memory. Only mapped datasets have it."""
        raise NotImplementedError

    @abstractmethod
    def read_parts(self, row: int) -> Any:
        """Return what :meth:`make_target` makes the target of. It may be called in several threads at once."""

    def make_target(self, parts: Any) -> Any:
        """Return the target of a sample, of what :meth:`read_parts` read. It runs functions of the user."""
        target = self.label(parts) if callable(self.label) else parts
        return self.target_transform(target) if self.target_transform and self.label is not None else target

    @abstractmethod
    def name(self, row: int) -> str:
        """Return the file, key and place of a sample, for messages."""

    def labels(self, rows: IntArray) -> Labels | None:
        """Return the targets of some samples before ``target_transform``, as :meth:`Source.labels` does.

        The loader calls it if the class that defines it also defines what makes targets, such as :meth:`read_parts`.
        """
        if not self.parts or any(name not in self.integers for name in self.parts):
            return None
        columns = {name: self.integers[name][rows].astype(np.int64, copy=False) for name in self.parts}
        return columns[self.label] if isinstance(self.label, str) else columns

    def read_many_parts(self, rows: IntArray) -> list[Any]:
        """Return :meth:`read_parts` of some samples."""
        return [self.read_parts(row) for row in rows.tolist()]

    def target(self, row: int) -> Any:
        """Return the target of a sample."""
        return self.make_target(self.read_parts(row))

    def __getitem__(self, index: int) -> Any:
        """Return a sample: image and target, a dictionary of image and several parts, or an image alone."""
        row = find_row(self, index)
        rows = np.array([row], np.int64)
        if self.client is None:
            image, parts = open_rgb(self.read(rows)[0]), self.read_parts(row)
        else:
            data = self.client.read_one(self.locate(rows)[0])
            image, parts = open_rgb(self.image_in(row, data)), self.parts_in(row, data)
        image = self.transform(image) if self.transform else image
        return make_sample(self.label, image, self.make_target(parts))

    def locate(self, rows: IntArray) -> list[Range]:
        """Return what to fetch of an object store for some samples. Only datasets with a client have it."""
        raise NotImplementedError

    def image_in(self, row: int, data: Bytes) -> Bytes:
        """Return the image file in what was fetched for a sample."""
        return data

    def parts_in(self, row: int, data: Bytes) -> Any:
        """Return :meth:`read_parts` of a sample, from what was fetched for it."""
        return self.read_parts(row)

    def torchdali_source(self) -> Source:
        """Return the source that ``DALILoader`` reads."""
        return EncodedSource(self) if self.client is None else RemoteSource(self, self.client)


class EncodedSource(Source):
    """The samples of an :class:`EncodedDataset`."""

    kind = InputKind.ENCODED

    def __init__(self, dataset: EncodedDataset) -> None:
        self._dataset, self.transform, self.is_mapped = dataset, dataset.transform, dataset.is_mapped
        self.has_places = self.is_mapped and _agree(type(dataset), "find", {"read"})
        self._has_labels = labels_are_targets(type(dataset))
        self._reads_many = _agree(type(dataset), "read_many_parts", {"read_parts"})
        self.is_pair = isinstance(dataset.label, str) or callable(dataset.label)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: IntArray) -> list[Bytes]:
        return self._dataset.read(rows)

    def find(self, rows: IntArray) -> Places:
        return self._dataset.find(rows)

    def target(self, row: int) -> Any:
        return self._dataset.target(row)

    def name(self, row: int) -> str:
        return self._dataset.name(row)

    def labels(self, rows: IntArray) -> Labels | None:
        return self._dataset.labels(rows) if self._has_labels and not self._dataset.target_transform else None

    def read_parts(self, rows: IntArray) -> list[Any] | None:
        dataset = self._dataset
        if dataset.label is None or (self._has_labels and dataset.labels(rows[:0]) is not None):
            return None
        if self._reads_many:
            return dataset.read_many_parts(rows)
        return [dataset.read_parts(row) for row in rows.tolist()]

    def make_target(self, parts: Any) -> Any:
        return self._dataset.make_target(parts)

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        return make_sample(self._dataset.label, image, target)

    def headers(self) -> HeaderTable:
        """Return an empty table. The reader fills it once, because images in shards are taken as constant."""
        return HeaderTable(HeaderColumns.unknown(len(self)))

    def describe(self) -> str:
        return f"{len(self):,} images ({self._dataset!r})"


class RemoteSource(EncodedSource):
    """The samples of a dataset whose images lie in an object store.

    Args:
        dataset: The samples.
        client: Reads them.
    """

    is_remote = True

    def __init__(self, dataset: EncodedDataset, client: Client) -> None:
        super().__init__(dataset)
        self._client = client
        self._cache: ContentCache | None = None
        self._read_last = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_cache", "_read_last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._cache, self._read_last = None, threading.local()

    def with_cache(self, cache: ContentCache) -> RemoteSource:
        source = copy.copy(self)
        source._cache = cache  # noqa: SLF001 - of this class
        return source

    def read(self, rows: IntArray) -> list[Bytes]:
        contents, numbers = self._fetch(rows), cast("list[int]", rows.tolist())
        if self._has_parts_in_data():  # the reader wants the parts of these samples next, in this thread
            self._read_last.contents = dict(zip(numbers, contents, strict=True))
        return [self._dataset.image_in(row, content) for row, content in zip(numbers, contents, strict=True)]

    def read_parts(self, rows: IntArray) -> list[Any] | None:
        if not self._has_parts_in_data():
            return super().read_parts(rows)
        contents: dict[int, Bytes] = vars(self._read_last).pop("contents", {})
        numbers: list[int] = rows.tolist()
        if missing := [row for row in numbers if row not in contents]:
            contents |= zip(missing, self._fetch(np.array(missing, np.int64)), strict=True)
        return [self._dataset.parts_in(row, contents[row]) for row in numbers]

    def _has_parts_in_data(self) -> bool:
        """Return whether targets are made of parts that are fetched with the images."""
        return self._dataset.has_parts_in_data and super().read_parts(np.empty(0, np.int64)) is not None

    def target(self, row: int) -> Any:
        parts = self.read_parts(np.array([row], np.int64))
        return super().target(row) if parts is None else self.make_target(parts[0])

    def _fetch(self, rows: IntArray) -> list[Bytes]:
        """Return what the dataset wants of the store for some samples, from the cache if it has that."""
        parts, cache = self._dataset.locate(rows), self._cache
        place = self._client.place if cache else ""  # two stores may have objects of one URI
        keys = [(place, *part) for part in parts]
        contents = [cache.get(key) if cache else None for key in keys]
        missing = [i for i, content in enumerate(contents) if content is None]
        try:
            fetched = self._client.read([parts[i] for i in missing])
        except ReadError as error:
            raise ReadError(missing[error.position], error.error) from error.error
        for i, content in zip(missing, fetched, strict=True):
            contents[i] = content
            if cache:
                cache.add(keys[i], content)
        return cast("list[Bytes]", contents)


def labels_are_targets(kind: type[EncodedDataset]) -> bool:
    """Return whether ``labels`` of a class returns what its samples have as targets."""
    return _agree(kind, "labels", {"read_parts", "parts_in", "make_target", "target"})


def _agree(kind: type[EncodedDataset], fast: str, slow: Set[str]) -> bool:
    """Return whether one class defines both ``fast`` and what it bypasses. A subclass may have changed either alone."""
    defined = next(names for one in kind.__mro__ if not (names := vars(one).keys()).isdisjoint({fast, *slow}))
    return fast in defined and not defined.isdisjoint(slow)
