"""Lists of videos and sounds: of a folder, in a table, or given one by one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from torchvision.datasets.folder import find_classes, make_dataset

from torchdali.datasets.table import read_csv, read_parquet

__all__ = ["Row", "list_rows"]


class Row(NamedTuple):
    """A video or sound, or a part of one.

    Attributes:
        path: The file.
        label: Its label. None if it has none.
        start: The seconds after its beginning from which on it is taken. None for the beginning.
        end: The seconds at which it ends. None for the end.
    """

    path: str
    label: Any = None
    start: float | None = None
    end: float | None = None


def list_rows(
    files: str | os.PathLike[str] | Sequence[Any], suffixes: tuple[str, ...], argument: str, noun: str
) -> tuple[list[str], list[Row]]:
    """Return the names of the classes of a folder, and its files; or those of a table or list, and no classes.

    Args:
        files: A folder of class folders, a ``.csv`` or ``.parquet`` file, or a list of paths or tuples.
        suffixes: Those of the files of a folder, in lower case.
        argument: The name of the argument, for messages.
        noun: What a file is.

    Raises:
        ValueError: It is none of these, lacks a column, or is empty.
        FileNotFoundError: The folder has no class folders, or one of them has no such file.
    """
    classes: list[str] = []
    folder = Path(cast("str", files)).expanduser() if isinstance(files, (str, os.PathLike)) else None
    if folder is None:
        rows = [_read_item(item, noun) for item in cast("Sequence[Any]", files)]
    elif folder.is_dir():
        classes, labels = find_classes(folder)
        rows = [Row(path, label) for path, label in make_dataset(folder, labels, suffixes)]
    else:
        rows = _read_table(folder, argument)
    if not rows:
        found = "an empty list" if folder is None else f"'{folder}', which has no rows"
        raise ValueError(f"{argument} must have at least one {noun}, got {found}")
    return classes, rows


def _read_table(file: Path, argument: str) -> list[Row]:
    read = {".csv": read_csv, ".parquet": read_parquet}.get(file.suffix.lower())
    if read is None:
        raise ValueError(f"{argument} must be a folder, a .csv or .parquet file, or a list of paths, got '{file}'")
    paths, _, columns = read([file], "file", None)
    if not isinstance(paths, list):  # they are no texts
        raise ValueError(f"the column 'file' of {file} must have a path in each row")  # noqa: TRY004 - of a file
    names = cast("list[str]", paths)
    labels, starts, ends = (_list_values(columns.get(name), len(names)) for name in ("label", "start", "end"))
    return [
        Row(str(file.parent / name), label, _to_seconds(start), _to_seconds(end))
        for name, label, start, end in zip(names, labels, starts, ends, strict=True)
    ]


def _list_values(column: Any, count: int) -> list[Any]:
    """Return a column of a table as ints, floats, texts or other values; None in all rows if there is none."""
    if column is None:
        return [None] * count
    return column.tolist() if hasattr(column, "dtype") else column


def _to_seconds(value: Any) -> float | None:
    return None if value is None or value == "" else float(value)


def _read_item(item: Any, noun: str) -> Row:
    parts: list[Any] = [*cast("Sequence[Any]", item)] if isinstance(item, (tuple, list)) else [item]
    if len(parts) not in (1, 2, 4) or not isinstance(parts[0], (str, os.PathLike)):
        raise ValueError(f"a {noun} must be a path, (path, label) or (path, label, start, end), got {item!r:.100}")
    label, start, end = (*parts[1:], None, None, None)[:3]
    path = str(Path(cast("str", parts[0])).expanduser())
    return Row(path, label, *(None if x is None else float(x) for x in (start, end)))
