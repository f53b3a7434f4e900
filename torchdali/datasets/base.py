"""The base of datasets whose images are bytes in larger files, and the source that the loader reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchdali.datasets.fields import open_rgb
from torchdali.datasets.shards import Bytes
from torchdali.sources import InputKind, Labels, Source
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.transforms.spec import IntArray

__all__ = ["EncodedDataset", "EncodedSource", "Label", "make_sample"]

Label = str | Callable[[dict[str, Any]], Any] | Sequence[str] | None
"""What the target of a sample is: one of its parts, what a function makes of all, several parts, or nothing."""

_IMAGE = "image"


def _as_names(label: str | Sequence[str]) -> tuple[str, ...]:
    return (label,) if isinstance(label, str) else tuple(label)


def make_sample(label: Label, image: Any, target: Any) -> Any:
    """Return a sample: a dictionary if several parts are its label, the image alone if it has no label, else a pair."""
    if label is None:
        return image
    return (image, target) if isinstance(label, str) or callable(label) else {_IMAGE: image, **target}


class EncodedDataset(Dataset[Any]):
    """Images that are bytes in larger files. ``DataLoader`` and ``DALILoader`` take it.

    Args:
        label: See :data:`Label`.
        transform: Called with each image, which is an RGB image of PIL, as in ``ImageFolder``.
        target_transform: Called with each target. If ``label`` is several parts, this is a dictionary of them.

    Attributes:
        parts: The names of the parts that are the label; none if the label is a function or nothing.
        is_mapped: Whether :meth:`read` returns views of mapped memory, and so takes no time.
    """

    is_mapped: bool = False

    def __init__(
        self,
        label: Label,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if label is not None and not isinstance(label, str) and not callable(label):
            label = tuple(label)
            if _IMAGE in label or not label:
                raise ValueError(f"label must be names of parts other than 'image', got {label!r}")
        self.label: Label = label
        self.parts: tuple[str, ...] = () if label is None or callable(label) else _as_names(label)
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
        """Return the targets of some samples before ``target_transform``, as :meth:`Source.labels` does."""
        return None

    def read_many_parts(self, rows: IntArray) -> list[Any]:
        """Return :meth:`read_parts` of some samples."""
        return [self.read_parts(row) for row in rows.tolist()]

    def target(self, row: int) -> Any:
        """Return the target of a sample."""
        return self.make_target(self.read_parts(row))

    def __getitem__(self, index: int) -> Any:
        """Return a sample: image and target, a dictionary of image and several parts, or an image alone."""
        row = range(len(self))[index]  # raises IndexError as a list does, and takes negative numbers
        image = open_rgb(self.read(np.array([row], np.int64))[0])
        return make_sample(self.label, self.transform(image) if self.transform else image, self.target(row))

    def torchdali_source(self) -> Source:
        """Return the source that ``DALILoader`` reads."""
        return EncodedSource(self)


class EncodedSource(Source):
    """The samples of an :class:`EncodedDataset`."""

    kind = InputKind.ENCODED

    def __init__(self, dataset: EncodedDataset) -> None:
        self._dataset, self.transform, self.is_mapped = dataset, dataset.transform, dataset.is_mapped
        self.is_pair = isinstance(dataset.label, str) or callable(dataset.label)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: IntArray) -> list[Bytes]:
        return self._dataset.read(rows)

    def target(self, row: int) -> Any:
        return self._dataset.target(row)

    def name(self, row: int) -> str:
        return self._dataset.name(row)

    def labels(self, rows: IntArray) -> Labels | None:
        return None if self._dataset.target_transform else self._dataset.labels(rows)

    def read_parts(self, rows: IntArray) -> list[Any] | None:
        is_known = self._dataset.label is None or self._dataset.labels(rows[:0]) is not None
        return None if is_known else self._dataset.read_many_parts(rows)

    def make_target(self, parts: Any) -> Any:
        return self._dataset.make_target(parts)

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        return make_sample(self._dataset.label, image, target)

    def headers(self) -> HeaderTable:
        """Return an empty table. Shards do not change, so the reader fills it once."""
        return HeaderTable(HeaderColumns.unknown(len(self)))

    def describe(self) -> str:
        return f"{len(self):,} images ({self._dataset!r})"
