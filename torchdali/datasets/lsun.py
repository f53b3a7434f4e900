"""torchvision's LSUN, whose LMDBs are read without workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import numpy as np

from torchdali.datasets.base import EncodedDataset
from torchdali.datasets.lmdb import LMDB
from torchdali.datasets.shards import Bytes
from torchdali.sources.places import Places, join
from torchdali.transforms.spec import IntArray

__all__ = ["LSUNImages"]


class LSUNImages(EncodedDataset):
    """The samples of a ``torchvision.datasets.LSUN``: images, and the numbers of their databases.

    Args:
        dataset: The dataset.

    Raises:
        ValueError: Its keys are not those of its databases, in their order, or their transforms differ.
        OSError: A database cannot be read, or no index can be written beside it.
    """

    def __init__(self, dataset: Any) -> None:
        databases: list[Any] = dataset.dbs
        super().__init__("class", databases[0].transform, dataset.target_transform)
        self.databases = [LMDB(str(one.root)) for one in databases]
        for one, images in zip(databases, self.databases, strict=True):
            # The keys come from a file that torchvision wrote into the working directory, maybe for another database.
            if len(one.keys) != len(images) or any(a >= b for a, b in pairwise(one.keys)):
                raise ValueError(f"the keys of {one.root} are not those of its database, in their order")
            if one.transform is not self.transform or one.target_transform is not None:
                raise ValueError(f"{one.root} has transforms of its own")
        self.is_mapped = all(images.is_mapped for images in self.databases)
        self._ends: IntArray = np.cumsum([len(images) for images in self.databases])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, rows: IntArray) -> list[Bytes]:
        images: list[Any] = [None] * len(rows)
        for positions, images_of, own in self._split(rows):
            for position, image in zip(positions.tolist(), images_of.read(own), strict=True):
                images[position] = image
        return images

    def find(self, rows: IntArray) -> Places:
        return join(len(rows), ((which, images.find(own)) for which, images, own in self._split(rows)))

    def _split(self, rows: IntArray) -> Iterator[tuple[IntArray, LMDB, IntArray]]:
        """Yield each database that has some of the rows, between the positions of these and its own rows."""
        which, starts = self.labels(rows), np.array([0, *self._ends])
        numbers: list[int] = np.unique(which).tolist()
        for i in numbers:
            positions = np.flatnonzero(which == i)
            yield positions, self.databases[i], rows[positions] - starts[i]

    def labels(self, rows: IntArray) -> IntArray:
        return cast("IntArray", np.searchsorted(self._ends, rows, "right"))

    def read_parts(self, row: int) -> Any:
        return int(np.searchsorted(self._ends, row, "right"))

    def name(self, row: int) -> str:
        which: int = self.read_parts(row)
        return self.databases[which].name(row - int(np.array([0, *self._ends])[which]))

    def __repr__(self) -> str:
        return f"LSUN of {len(self.databases)} databases"
