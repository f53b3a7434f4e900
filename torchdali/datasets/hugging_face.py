"""Images in a column of Hugging Face's ``datasets.Dataset``, read where the Arrow file is mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from torchdali.datasets.base import EncodedDataset, Label
from torchdali.datasets.shards import Bytes
from torchdali.sources.arrow import ArrowColumn
from torchdali.sources.places import Places
from torchdali.transforms.spec import IntArray

__all__ = ["HuggingFace"]

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
"""Types of Arrow."""


class HuggingFace(EncodedDataset):
    """Images in a column of a ``datasets.Dataset``, opened as ``ImageFolder`` opens files: RGB, not turned by EXIF.

    DALI cuts the images out of the mapped Arrow file, without worker processes of the loader. The dataset may have
    been selected, shuffled, filtered or split. Its format and ``set_transform`` do not matter.

    Args:
        dataset: The dataset.
        image: The column of images: ``datasets.Image()``, with or without ``decode``, or bytes.
        label: The target: a column; a function of the dictionary of all other columns; or several names: samples then
            are dictionaries with the image as ``"image"``. None: samples are images.
        transform: Called with each image.
        target_transform: Called with each target.

    Raises:
        ValueError: It has no such column, or rows without bytes: only with paths, or missing.
        TypeError: The column has neither images nor bytes.
    """

    is_mapped = True

    def __init__(
        self,
        dataset: Any,
        image: str = "image",
        label: Label = "label",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(label, transform, target_transform)
        if isinstance(dataset, dict) or not hasattr(dataset, "data"):
            raise TypeError(
                f"dataset must be a datasets.Dataset, got a {type(cast('object', dataset)).__name__}; choose a split, "
                "and give a stream to the loader itself, with transform="
            )
        self.dataset, self.image = dataset.with_format(None), image
        names: list[str] = dataset.column_names
        others = [name for name in names if name != image]
        if isinstance(label, str):
            others = [label]
        elif label is not None and not callable(label):
            others = list(label)
        for name in (image, *others):
            if name not in names:
                raise ValueError(f"the dataset has no column {name!r}; it has {', '.join(names)}")
        self._others = self.dataset.select_columns(others)
        self._open()

    def _open(self) -> None:
        indices: Any = getattr(self.dataset, "_indices", None)  # there is no public name for the rows of a selection
        self._rows: IntArray | None = None if indices is None else indices.column(0).to_numpy().astype(np.int64)
        self._column = ArrowColumn(self.dataset.data.column(self.image))
        if self._column.num_missing:
            raise ValueError(
                f"{self._column.num_missing:,} rows of {self.image!r} have no bytes; embed the files, or give the "
                "dataset itself to the loader"
            )
        columns = {name: self._read_integers(name) for name in self.parts}
        self.integers = {name: column for name, column in columns.items() if column is not None}

    def _read_integers(self, name: str) -> IntArray | None:
        """Return a column of integers; None if it is none."""
        if str(self._others.data.column(name).type) not in _INTEGERS:
            return None
        values: Any = self._others.with_format("numpy")[name][:]
        return values.astype(np.int64) if values.dtype.kind in "iu" else None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the column out. Another process maps the Arrow file itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_column", "_rows", "integers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: IntArray) -> list[Bytes]:
        return self.find(rows).views()

    def find(self, rows: IntArray) -> Places:
        return self._column.find(rows if self._rows is None else self._rows[rows])

    labels = EncodedDataset.labels  # fits this read_parts()

    def read_parts(self, row: int) -> Any:
        if self.label is None:
            return None
        values: dict[str, Any] = self._others[row]
        return values[self.label] if isinstance(self.label, str) else values

    def read_many_parts(self, rows: IntArray) -> list[Any]:
        if not len(rows) or not self._others.column_names:
            return super().read_many_parts(rows)
        columns: dict[str, list[Any]] = self._others[rows.tolist()]
        if isinstance(self.label, str):
            return columns[self.label]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def name(self, row: int) -> str:
        return f"row {row} of {self.dataset.__class__.__name__}"

    def __repr__(self) -> str:
        return f"HuggingFace of {len(self):,} rows, column {self.image!r}"
