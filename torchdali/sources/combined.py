"""Several sources as one source, for Subset and ConcatDataset of datasets that have their own sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchdali.errors import UnsupportedDatasetError
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

    def name(self, row: int) -> str:
        """Return the name of a sample in its source."""
        return self._find_source(row).name(int(self._rows[row]))

    def _find_source(self, row: int) -> Source:
        return self._sources[int(self._which[row])]

    def describe(self) -> str:
        """Return the number of samples and the types of their sources."""
        names = dict.fromkeys(type(source).__name__ for source in self._sources)
        return f"{len(self):,} samples of {', '.join(names)}"
