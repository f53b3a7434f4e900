"""The base of datasets whose images are bytes in larger files, and the source that the loader reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchdali.datasets.fields import open_rgb
from torchdali.datasets.shards import Bytes
from torchdali.sources import InputKind, Source
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.transforms.spec import IntArray

__all__ = ["EncodedDataset", "EncodedSource", "Label", "make_sample"]

Label = str | Callable[[dict[str, Any]], Any] | Sequence[str] | None
"""What the target of a sample is: one of its parts, what a function makes of all, several parts, or nothing."""

_IMAGE = "image"


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
    """

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
    def read_target(self, row: int) -> Any:
        """Return the target of a sample, before ``target_transform``."""

    @abstractmethod
    def name(self, row: int) -> str:
        """Return the file, key and place of a sample, for messages."""

    def labels(self, rows: IntArray) -> IntArray | None:
        """Return ``(N,)`` int64 targets of some samples; None if targets are not plain integers."""
        return None

    def target(self, row: int) -> Any:
        """Return the target of a sample."""
        target = self.read_target(row)
        return self.target_transform(target) if self.target_transform and self.label is not None else target

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
        self._dataset, self.transform = dataset, dataset.transform
        self.is_pair = isinstance(dataset.label, str) or callable(dataset.label)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: IntArray) -> list[Bytes]:
        return self._dataset.read(rows)

    def target(self, row: int) -> Any:
        return self._dataset.target(row)

    def name(self, row: int) -> str:
        return self._dataset.name(row)

    def labels(self, rows: IntArray) -> IntArray | None:
        return None if self._dataset.target_transform or not self.is_pair else self._dataset.labels(rows)

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        return make_sample(self._dataset.label, image, target)

    def headers(self) -> HeaderTable:
        """Return an empty table. Shards do not change, so the reader fills it once."""
        return HeaderTable(HeaderColumns.unknown(len(self)))

    def describe(self) -> str:
        return f"{len(self):,} images ({self._dataset!r})"
