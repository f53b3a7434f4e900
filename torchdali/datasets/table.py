"""Images that a table lists: a CSV or Parquet file with a column of paths, or of image files."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from torchvision.datasets.folder import pil_loader

from torchdali.datasets.base import EncodedDataset, Label, find_row, labels_are_targets, make_sample
from torchdali.datasets.patterns import Pattern, expand, list_patterns
from torchdali.datasets.shards import Bytes
from torchdali.sources import FileSource, Labels, Source
from torchdali.sources.arrow import ArrowColumn
from torchdali.sources.paths import Paths, build_table, to_int64
from torchdali.sources.paths import Table as PathTable
from torchdali.sources.remote import Range, check_schemes, is_uri, make_client
from torchdali.transforms.spec import IntArray

__all__ = ["Table", "read_csv", "read_parquet"]

_TEXTS = {"string", "large_string"}


class Table(EncodedDataset):
    """Images that a table lists. The columns that are used are read into memory.

    Args:
        file: A ``.csv`` file with the names of columns in its first line, or a ``.parquet`` file, for which the package
            ``pyarrow`` must be installed. Also a pattern such as ``"part-{0..7}.csv"`` or ``"*.parquet"``, or several
            files. Their rows follow each other.
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
        file: Pattern,
        image: str = "file",
        label: Label = None,
        root: str | os.PathLike[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        remote: Any = None,
    ) -> None:
        super().__init__(label, transform, target_transform)
        self.files = _find_tables(file)
        others = None if callable(label) else [label] if isinstance(label, str) else [*(label or ())]
        read = read_csv if self.files[0].suffix.lower() == ".csv" else read_parquet
        images, counts, self._columns = read(self.files, image, others)
        self._ends = np.cumsum(counts)
        self.integers = {name: column for name, column in self._columns.items() if hasattr(column, "dtype")}
        self.paths: PathTable | None = None
        self._images: ArrowColumn | None = None
        if not isinstance(images, list):
            self._images = ArrowColumn(images)
            self._count = len(self._images)
        else:
            paths = cast("list[str]", images)
            check_schemes(chain([root], paths))
            folder = root if root is None or is_uri(root) else Path(root).expanduser()
            rows, names = iter(paths), list[str]()
            for file, count in zip(self.files, counts, strict=True):
                parent = cast("str", folder or file.parent)
                names += [
                    path if is_uri(path) else os.path.join(parent, path)  # noqa: PTH118 - of millions
                    for path in islice(rows, count)
                ]
            self.client = make_client(names, remote, f"the images of {self!r}")
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
        if self.paths is not None:
            return self._path(row)
        table = int(np.searchsorted(self._ends, row, "right"))
        return f"{self.files[table]}, row {row - int(self._ends[table - 1] if table else 0)}"

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
        files = self.files
        return f"Table of {files[0] if len(files) == 1 else f'{len(files):,} files from {files[0]} on'}"


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


def _find_tables(pattern: Pattern) -> list[Path]:
    names = list_patterns(pattern, "tables")
    for name in names:
        if is_uri(name):
            raise ValueError(f"a table must be a file, got {name}; copy it to a disk")
    check_schemes(names)
    files = [Path(name) for name in expand(names)]
    for file in files:
        if file.suffix.lower() not in (".csv", ".parquet"):
            raise ValueError(f"{file} must be a .csv or a .parquet file")
    if len({file.suffix.lower() for file in files}) > 1:
        raise ValueError(f"tables must be all .csv or all .parquet files, got {', '.join(map(str, files)):.200}")
    return files


def read_csv(
    files: Sequence[Path], image: str, names: Sequence[str] | None
) -> tuple[list[str], list[int], dict[str, Any]]:
    """Return the column of images in all files, the numbers of rows in each, and other columns.

    Args:
        files: The files. Their columns follow each other.
        image: The column of images.
        names: The other columns; None for all others that the first file has.

    Raises:
        ValueError: There is no such column, a line lacks a value, or a file is no CSV file in UTF-8.
        OSError: A file cannot be read.
    """
    table: list[tuple[str, ...]] = []
    ends = [0]
    for file in files:
        try:
            with file.open(newline="", encoding="utf-8-sig") as stream:
                rows = csv.DictReader(stream)
                names = _check_columns(file, image, names, list(rows.fieldnames or ()))
                table += [tuple(_get_cells(file, row, [image, *names])) for row in rows]
        except (UnicodeDecodeError, csv.Error) as error:
            number = _find_no_utf8(file)
            where = f"line {number} has other bytes" if number else str(error)
            raise ValueError(f"{file} must be a CSV file in UTF-8, got another: {where}; write it again") from error
        ends.append(len(table))
    others = list(names or ())
    columns = [*zip(*table, strict=True)] or [()] * (1 + len(others))
    counts = [end - start for start, end in pairwise(ends)]
    return list(columns[0]), counts, {name: _convert(texts) for name, texts in zip(others, columns[1:], strict=True)}


def _find_no_utf8(file: Path) -> int:
    """Return the number of the first line that is no text in UTF-8; 0 if all are."""
    with file.open("rb") as stream:
        return next((i for i, line in enumerate(stream, 1) if "\ufffd" in line.decode(errors="replace")), 0)


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
    # Python takes 1_2 for 12, and digits of other scripts. pandas does not.
    are_plain = all(text.isascii() and "_" not in text for text in texts)
    for kind in (int, float) if are_plain else ():
        try:
            return _compress([kind(text) for text in texts])
        except ValueError:
            pass
    return list(texts)


def _compress(values: list[Any]) -> Any:
    """Return a column of ints as ``(N,)`` int64, others as they are."""
    numbers = to_int64(values)
    return values if numbers is None else numbers


def read_parquet(
    files: Sequence[Path], image: str, names: Sequence[str] | None
) -> tuple[Any, list[int], dict[str, Any]]:
    """Return what :func:`read_csv` returns. The column of images is a list of texts, or else pyarrow's."""
    arrow: Any = import_module("pyarrow")
    images: list[Any] = []
    columns: dict[str, list[Any]] = {}
    for file in files:
        with _name_damage(file):
            known = import_module("pyarrow.parquet").read_schema(file).names
        names = _check_columns(file, image, names, known)
        with _name_damage(file):
            table: Any = import_module("pyarrow.parquet").read_table(file, columns=list({image, *names}))
        column: Any = table[image]
        if arrow.types.is_dictionary(column.type):  # such as a Categorical of pandas
            column = column.cast(column.type.value_type)
        if str(column.type) in _TEXTS and column.null_count:
            row = column.to_pylist().index(None)
            raise ValueError(f"{file}, row {row}: the column {image!r} must have a path in each row, got none")
        images.append(column)
        for name in names:
            columns.setdefault(name, []).extend(table[name].to_pylist())
    counts = [len(column) for column in images]
    others = {name: _compress(values) for name, values in columns.items()}
    types = {str(column.type) for column in images}
    if types <= _TEXTS:
        return [path for column in images for path in column.to_pylist()], counts, others
    if len(types) > 1:
        raise ValueError(f"the column {image!r} must be of one type in all tables, got {' and '.join(sorted(types))}")
    chunks = [chunk for column in images for chunk in column.chunks]
    return arrow.chunked_array(chunks, images[0].type), counts, others


@contextmanager
def _name_damage(file: Path) -> Generator[None]:
    """Let errors of pyarrow about what is in a file name it."""
    try:
        yield
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None):  # it is about the file itself
            raise
        raise ValueError(f"{file} is no Parquet file, or damaged ({error}); write it again") from error
