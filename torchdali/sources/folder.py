"""Image files with targets: what an image folder or an index of one is read as."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.paths import Paths
from torchdali.sources.source import Labels, Source, Targets
from torchdali.transforms.spec import InputKind, IntArray

__all__ = ["FileSource"]


class FileSource(Source):
    """Samples that are pairs of a file and a target.

    Args:
        paths: The files.
        targets: The targets; without them, each is None.
        transform: The dataset's transform.
        description: What this is, for ``explain()``.
        columns: What is known of the files' headers already.
        files: ``(N,)`` for each sample the row of its file in ``columns``; None if it is the same.
    """

    kind = InputKind.FILES

    def __init__(
        self,
        paths: Paths,
        targets: Targets | None = None,
        transform: Any = None,
        description: str = "",
        columns: HeaderColumns | None = None,
        files: npt.NDArray[Any] | None = None,
    ) -> None:
        self._paths, self._targets, self.transform = paths, targets, transform
        self._description, self._columns, self._files = description, columns, files

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        """Return ``(N, L)`` the paths of some samples, padded with NUL: one gather for a batch."""
        return self._paths.gather(rows)

    def target(self, row: int) -> Any:
        """Return the target of a sample, transformed."""
        return self._targets[row] if self._targets else None

    def name(self, row: int) -> str:
        """Return the path of a sample's file."""
        return self._paths[row]

    def describe(self) -> str:
        """Return the number of files, their classes and the datasets that they are from."""
        return self._description

    def labels(self, rows: IntArray) -> Labels | None:
        """Return ``(N,)`` int64 targets; None if they are not plain integers."""
        return self._targets.labels(rows) if self._targets else None

    def headers(self) -> HeaderTable | None:
        """Return what the index knows of its files' headers, or None."""
        return None if self._columns is None else HeaderTable(self._columns, self._files)

    def has_same_files(self, other: Source) -> bool:
        """Return whether each row is the same file in another source."""
        return isinstance(other, FileSource) and self._paths.equals(other._paths)  # noqa: SLF001 - of this class
