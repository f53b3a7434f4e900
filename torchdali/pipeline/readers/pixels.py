"""Images that need no decoder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from torchdali.errors import UnsupportedDatasetError
from torchdali.pipeline.readers.base import Reader
from torchdali.sources import Source
from torchdali.transforms.spec import IntArray

__all__ = ["PixelReader"]


class PixelReader(Reader):
    """Reads a source that gives images of one size.

    Raises:
        UnsupportedDatasetError: The source does not tell the size.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        if source.spec.size is None:
            raise UnsupportedDatasetError(
                f"the spec of a source of pixels must have a size, got {source.spec} of {type(source).__name__}"
            )
        self._size = np.array(source.spec.size, np.int64)
        self._black: set[int] = set()

    def sizes(self, rows: IntArray) -> IntArray:
        return np.tile(self._size, (len(rows), 1))

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return ``(N, H, W, C)`` the images of a batch."""
        good = ~np.isin(rows, list(self._black))
        if good.all():
            return self.read_rows(rows)
        spec = self.source.spec
        images = np.zeros((len(rows), *self._size, spec.channels), spec.dtype_name)
        if good.any():
            images[good] = self.read_rows(rows[good])
        return images

    def restore(self, row: int) -> None:
        self._black.discard(row)

    def substitute_black(self, row: int, size: tuple[int, int]) -> None:
        self._black.add(row)
