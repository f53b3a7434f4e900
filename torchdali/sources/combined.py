"""Several sources as one source, for Subset and ConcatDataset of datasets that have their own sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.source import Source
from torchdali.transforms.spec import InputKind, IntArray

__all__ = ["CombinedSource"]


class CombinedSource(Source):
    """Selected samples of several sources.

    Args:
        sources: The sources.
        which: ``(N,)`` for each sample the index of its source.
        rows: ``(N,)`` for each sample its row in that source.

    Raises:
        UnsupportedDatasetError: The sources differ in kind, in spec, or in whether they are on the GPU.
    """

    def __init__(self, sources: Sequence[Source], which: IntArray, rows: IntArray) -> None:
        self._sources = list(sources)
        self._which, self._rows = which, rows
        first = sources[0]
        self.kind, self.spec, self.transform, self.resident = first.kind, first.spec, first.transform, first.resident
        self.is_pair = all(source.is_pair for source in sources)
        for other in sources[1:]:
            if (other.kind, other.spec, other.resident) != (self.kind, self.spec, self.resident):
                raise UnsupportedDatasetError(
                    f"sources under ConcatDataset must read the same kind of images, got {self.kind} of {self.spec} "
                    f"and {other.kind} of {other.spec}"
                )

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: IntArray) -> Any:
        """Return what the sources read, in the order of the rows."""
        which, rows = self._which[rows], self._rows[rows]
        images: list[Any] = [None] * len(rows)
        for i, source in enumerate(self._sources):
            positions = np.flatnonzero(which == i)
            part: Any = source.read(rows[positions]) if len(positions) else []
            if self.kind is InputKind.FILES and hasattr(part, "dtype"):  # arrays of paths differ in width
                part = [path.tobytes().rstrip(b"\0") for path in part]
            for position, image in zip(positions.tolist(), part, strict=True):
                images[position] = image
        return images

    def target(self, row: int) -> Any:
        """Return the target of a sample."""
        return self._find_source(row).target(int(self._rows[row]))

    def labels(self, rows: IntArray) -> IntArray | None:
        """Return ``(N,)`` int64 targets; None if those of a source are not plain integers."""
        which, rows = self._which[rows], self._rows[rows]
        labels = np.empty(len(rows), np.int64)
        indices: list[int] = np.unique(which).tolist()
        for i in indices:
            mask: Any = which == i
            part = self._sources[i].labels(rows[mask])
            if part is None:
                return None
            labels[mask] = part
        return labels

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        """Return a sample as its source makes it."""
        return self._find_source(row).make_sample(int(self._rows[row]), image, target)

    def headers(self) -> HeaderTable | None:
        """Return one table for all sources; None if one has none."""
        tables = [source.headers() for source in self._sources]
        columns = [table.columns for table in tables if table is not None]
        if self.kind is not InputKind.ENCODED or len(columns) < len(tables):
            return None
        starts = np.cumsum([0, *(len(source) for source in self._sources)])
        files = (starts[self._which] + self._rows).astype(np.min_scalar_type(starts[-1]))
        return HeaderTable(HeaderColumns(*map(np.concatenate, zip(*columns, strict=True))), files)

    def name(self, row: int) -> str:
        """Return the name of a sample in its source."""
        return self._find_source(row).name(int(self._rows[row]))

    def _find_source(self, row: int) -> Source:
        return self._sources[int(self._which[row])]

    def describe(self) -> str:
        """Return the number of samples and the types of their sources."""
        names = dict.fromkeys(type(source).__name__ for source in self._sources)
        return f"{len(self):,} samples of {', '.join(names)}"
