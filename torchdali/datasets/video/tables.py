"""Lists of videos: in a table, or given one by one."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

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
    if isinstance(videos, (str, os.PathLike)):
        file = Path(videos).expanduser()
        reader = {".csv": _read_csv, ".parquet": _read_parquet}.get(file.suffix.lower())
        if reader is None:
            raise ValueError(f"videos must be a folder, a .csv or .parquet file, or a list of paths, got '{videos}'")
        rows = reader(file)
        if rows and "file" not in rows[0]:
            raise ValueError(f"{file} has no column 'file'; it has {', '.join(rows[0])}")
        return _number_labels([_make_row(file.parent, row) for row in rows])
    return [_read_item(item) for item in videos]


def _read_item(item: Any) -> Row:
    parts: list[Any] = [*cast("Sequence[Any]", item)] if isinstance(item, (tuple, list)) else [item]
    if len(parts) not in (1, 2, 4) or not isinstance(parts[0], (str, os.PathLike)):
        raise ValueError(f"a video must be a path, (path, label) or (path, label, start, end), got {item!r:.100}")
    label, start, end = (*parts[1:], None, None, None)[:3]
    path = str(Path(cast("str", parts[0])).expanduser())
    return Row(path, label, *(None if x is None else float(x) for x in (start, end)))


def _make_row(folder: Path, row: Mapping[str, Any]) -> Row:
    start, end = (float(row[name]) if row.get(name) not in (None, "") else None for name in ("start", "end"))
    return Row(str(folder / row["file"]), row.get("label"), start, end)


def _number_labels(rows: list[Row]) -> list[Row]:
    """Return rows whose labels are ints if all of them are such."""
    try:
        return [row._replace(label=None if row.label is None else int(row.label)) for row in rows]
    except ValueError:
        return rows


def _read_csv(file: Path) -> list[dict[str, Any]]:
    with file.open(newline="", encoding="utf-8-sig") as stream:
        return list(csv.DictReader(stream))


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    parquet: Any = import_module("pyarrow.parquet")
    return parquet.read_table(file).to_pylist()
