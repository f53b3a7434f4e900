"""Lists of videos: in a table, or given one by one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from torchdali.datasets.table import read_csv, read_parquet

__all__ = ["Row", "read_rows"]


class Row(NamedTuple):
    """A video, or a part of one.

    Attributes:
        path: The file.
        label: Its label. None if it has none.
        start: The seconds after the first frame at which it begins. None for the beginning.
        end: The seconds at which it ends. None for the end.
    """

    path: str
    label: Any = None
    start: float | None = None
    end: float | None = None


def read_rows(videos: str | os.PathLike[str] | Sequence[Any]) -> list[Row]:
    """Return the videos of a ``.csv`` or ``.parquet`` file, or of a list of paths or tuples.

    Raises:
        ValueError: It is neither of these, or lacks a column.
    """
    if not isinstance(videos, (str, os.PathLike)):
        return [_read_item(item) for item in videos]
    file = Path(videos).expanduser()
    read = {".csv": read_csv, ".parquet": read_parquet}.get(file.suffix.lower())
    if read is None:
        raise ValueError(f"videos must be a folder, a .csv or .parquet file, or a list of paths, got '{videos}'")
    paths, columns = read(file, "file", None)
    if not isinstance(paths, list) or any(type(path) is not str for path in cast("list[Any]", paths)):
        raise ValueError(f"the column 'file' of {file} must have a path in each row")
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


def _read_item(item: Any) -> Row:
    parts: list[Any] = [*cast("Sequence[Any]", item)] if isinstance(item, (tuple, list)) else [item]
    if len(parts) not in (1, 2, 4) or not isinstance(parts[0], (str, os.PathLike)):
        raise ValueError(f"a video must be a path, (path, label) or (path, label, start, end), got {item!r:.100}")
    label, start, end = (*parts[1:], None, None, None)[:3]
    path = str(Path(cast("str", parts[0])).expanduser())
    return Row(path, label, *(None if x is None else float(x) for x in (start, end)))
