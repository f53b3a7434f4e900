"""Images that a table lists: a CSV or Parquet file with a column of paths, or of image files."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
from torchvision.datasets.folder import pil_loader

from torchdali.datasets.base import EncodedDataset, Label, find_row, labels_are_targets, make_sample
from torchdali.datasets.shards import Bytes
from torchdali.sources import FileSource, Labels, Source
from torchdali.sources.arrow import ArrowColumn
from torchdali.sources.paths import Paths, build_table, to_int64
from torchdali.sources.paths import Table as PathTable
from torchdali.sources.remote import Range, is_uri, make_client
from torchdali.transforms.spec import IntArray

__all__ = ["Table", "read_csv", "read_parquet"]

_NO_NUMBER = re.compile(r"_|[^\x00-\x7f]")
"""Characters that ``int()`` and ``float()`` take, and pandas does not: ``1_2`` would become 12."""


class Table(EncodedDataset):
    """Images that a table lists. The columns that are used are read into memory.

    Args:
        file: A ``.csv`` file with the names of columns in its first line, or a ``.parquet`` file, for which the package
            ``pyarrow`` must be installed.
        image: The column of images: of paths or objects such as ``s3://bucket/name.jpg``, or in a Parquet file of image
            files as bytes.
        label: The column of targets; a function of the dictionary of all columns other than the image; or several
            names: samples then are dictionaries with the image as ``"image"``. None: samples are images. A column of a
            CSV file is of ints or floats if all its values are, else of texts. ``1_2`` is a text.
        root: The folder of relative paths, which may be one of an object store; None for that of the table.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each target.
        remote: As for :class:`~torchdali.datasets.Tar`.

    Raises:
        ValueError: It has no such column, is neither a CSV nor a Parquet file, or lists both files and objects.
        OSError: It cannot be read.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        image: str = "file",
        label: Label = None,
        root: str | os.PathLike[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        remote: Any = None,
    ) -> None:
        super().__init__(label, transform, target_transform)
        self.file = Path(file).expanduser()
        names = None if callable(label) else [label] if isinstance(label, str) else [*(label or ())]
        read = {".csv": read_csv, ".parquet": read_parquet}.get(self.file.suffix.lower())
        if read is None:
            raise ValueError(f"{self.file} must be a .csv or a .parquet file")
        images, self._columns = read(self.file, image, names)
        self.integers = {name: column for name, column in self._columns.items() if hasattr(column, "dtype")}
        self.paths: PathTable | None = None
        self._images: ArrowColumn | None = None
        if not isinstance(images, list):
            self._images = ArrowColumn(images)
            self._count = len(self._images)
        else:
            if not is_uri(root):
                root = self.file.parent if root is None else Path(root).expanduser()
            paths = cast("list[str]", images)
            names = [path if is_uri(path) else os.path.join(cast("str", root), path) for path in paths]  # noqa: PTH118 - of millions
            self.client = make_client(names, remote, f"the images of {self.file}")
            self.paths, self._count = build_table(names), len(names)

    def __len__(self) -> int:
        return self._count

    def read(self, rows: IntArray) -> list[Bytes]:
        if self._images is not None:
            return self._images.read(rows)
        if self.client is not None:
            return self.client.read(self.locate(rows))
        return [np.fromfile(self._path(row), np.uint8) for row in rows.tolist()]

    def locate(self, rows: IntArray) -> list[Range]:
        return [Range(self._path(row)) for row in rows.tolist()]

    def _path(self, row: int) -> str:
        assert self.paths is not None
        return os.fsdecode(self.paths[row])

    labels = EncodedDataset.labels  # fits this read_parts()

    def read_parts(self, row: int) -> Any:
        values = {name: column[row] for name, column in self._columns.items()}
        values = {name: int(value) if hasattr(value, "dtype") else value for name, value in values.items()}
        return values[self.label] if isinstance(self.label, str) else values if self.label else None

    def name(self, row: int) -> str:
        return self._path(row) if self.paths is not None else f"{self.file}, row {row}"

    def __getitem__(self, index: int) -> Any:
        """Return a sample. The image is opened as ``ImageFolder`` opens it."""
        if self.client is not None or self._images is not None:
            return super().__getitem__(index)
        row = find_row(self, index)
        image = pil_loader(self._path(row))
        return make_sample(self.label, self.transform(image) if self.transform else image, self.target(row))

    def torchdali_source(self) -> Source:
        """Return the source that ``DALILoader`` reads."""
        if self.paths is None or self.client is not None:
            return super().torchdali_source()
        return _ListedFiles(self, self.paths)

    def __repr__(self) -> str:
        return f"Table of {self.file}"


class _ListedFiles(FileSource):
    """The files that a table lists."""

    def __init__(self, dataset: Table, paths: PathTable) -> None:
        super().__init__(Paths([paths]), None, dataset.transform, f"{len(dataset):,} files ({dataset!r})")
        self._dataset = dataset
        self.is_pair = isinstance(dataset.label, str) or callable(dataset.label)

    def target(self, row: int) -> Any:
        return self._dataset.target(row)

    def labels(self, rows: IntArray) -> Labels | None:
        is_known = labels_are_targets(type(self._dataset)) and not self._dataset.target_transform
        return self._dataset.labels(rows) if is_known else None

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        return make_sample(self._dataset.label, image, target)


def read_csv(file: Path, image: str, names: Sequence[str] | None) -> tuple[list[str], dict[str, Any]]:
    """Return the column of images, and other columns: those of ``names``, or all of them for None.

    Raises:
        ValueError: There is no such column, or a line lacks a value.
        OSError: The file cannot be read.
    """
    with file.open(newline="", encoding="utf-8-sig") as stream:
        rows = csv.DictReader(stream)
        others = _check_columns(file, image, names, list(rows.fieldnames or ()))
        table: list[tuple[str, ...]] = [tuple(_get_cells(file, row, [image, *others])) for row in rows]
    columns = [*zip(*table, strict=True)] or [()] * (1 + len(others))
    return list(columns[0]), {name: _convert(column) for name, column in zip(others, columns[1:], strict=True)}


def _get_cells(file: Path, row: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if row[name] is None:
            raise ValueError(f"{file} has a line without a value of {name!r}: {[*row.values()]!r:.80}")
        yield row[name]


def _check_columns(file: Path, image: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the columns other than the image's that are used."""
    for name in (image, *(names or ())):
        if name not in known:
            raise ValueError(f"{file} has no column {name!r}; it has {', '.join(known)}")
    return [name for name in known if name != image] if names is None else list(names)


def _convert(texts: Sequence[str]) -> Any:
    """Return a column as ints or floats if all of its texts are such."""
    for kind in () if any(map(_NO_NUMBER.search, texts)) else (int, float):
        try:
            return _compress([kind(text) for text in texts])
        except ValueError:
            pass
    return list(texts)


def _compress(values: list[Any]) -> Any:
    """Return a column of ints as ``(N,)`` int64, others as they are."""
    numbers = to_int64(values)
    return values if numbers is None else numbers


def read_parquet(file: Path, image: str, names: Sequence[str] | None) -> tuple[Any, dict[str, Any]]:
    """Return what :func:`read_csv` returns. The column of images is a list of texts, or else pyarrow's."""
    parquet: Any = import_module("pyarrow.parquet")
    others = _check_columns(file, image, names, parquet.read_schema(file).names)
    table: Any = parquet.read_table(file, columns=[image, *others])
    column: Any = table[image]
    columns = {name: _compress(table[name].to_pylist()) for name in others}
    return column.to_pylist() if str(column.type) in ("string", "large_string") else column, columns
