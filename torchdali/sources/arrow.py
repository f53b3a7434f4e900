"""Image files in columns of Arrow tables, which are views of the column's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchdali.sources.places import Bytes, Places
from torchdali.transforms.spec import IntArray

__all__ = ["ArrowColumn"]


class ArrowColumn:
    """A column of bytes.

    Args:
        column: A ``pyarrow.ChunkedArray`` of binary values, or of structs with a field ``bytes``.

    Raises:
        TypeError: It has other values.
    """

    def __init__(self, column: Any) -> None:
        self._column = column
        self._chunks: list[tuple[Any, Bytes]] = []
        self.num_missing = 0
        for chunk in column.chunks:
            values = chunk.field("bytes") if _has_bytes(chunk.type) else chunk
            wide = {"binary": np.int32, "large_binary": np.int64}.get(str(values.type))
            if wide is None:
                raise TypeError(f"a column of images must be of bytes, got {chunk.type}")
            self.num_missing += max(values.null_count, chunk.null_count)
            _, offsets, data = values.buffers()
            numbers = np.frombuffer(offsets, wide)[values.offset : values.offset + len(values) + 1]
            self._chunks.append((numbers, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)))
        self._ends = np.cumsum([len(numbers) - 1 for numbers, _ in self._chunks], dtype=np.int64)

    def __reduce__(self) -> Any:
        return ArrowColumn, (self._column,)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, rows: IntArray) -> list[Bytes]:
        """Return read-only views of the bytes of some rows."""
        return self.find(rows).views()

    def find(self, rows: IntArray) -> Places:
        """Return where the bytes of some rows lie."""
        which: IntArray = np.searchsorted(self._ends, rows, "right")
        starts = np.array([0, *self._ends])
        places: list[tuple[int, int]] = np.stack((which, rows - starts[which]), axis=1).tolist()
        ends = np.array([self._chunks[i][0][row : row + 2] for i, row in places], np.int64).reshape(-1, 2)
        return Places([self._chunks[i][1] for i, _ in places], ends[:, 0], ends[:, 1] - ends[:, 0])


def _has_bytes(kind: Any) -> bool:
    return str(kind).startswith("struct<") and kind.get_field_index("bytes") >= 0
