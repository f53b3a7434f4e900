"""The base of datasets in shards: files with many samples each, whose places an index holds."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from torchdali.datasets.base import EncodedDataset, Label
from torchdali.datasets.index import Place, ShardIndex, find_index, open_index
from torchdali.datasets.patterns import Pattern, expand
from torchdali.datasets.shards import Bytes, Shards
from torchdali.sources import Labels
from torchdali.transforms.spec import IntArray

__all__ = ["ShardedDataset"]


class ShardedDataset(EncodedDataset):
    """Images in shards. ``DALILoader`` reads them without a copy, and in any order.

    Args:
        shards: The files: a path, a pattern such as ``"train-{000..146}.tar"`` or ``"train-*.tar"``, or several.
        content: What decides the index: the names of image and target.
        label: See :class:`EncodedDataset`.
        transform: See :class:`EncodedDataset`.
        target_transform: See :class:`EncodedDataset`.
        index: The file of the index; None for a name beside the first shard. It is made if it does not exist.
        is_mapped: Whether to map shards into memory. If not, images are read into memory of their own.

    Attributes:
        shards: The shards.
        index: The index.

    Raises:
        ValueError: A shard is damaged, or it has changed since the index was made.
        OSError: A shard cannot be read, or the index cannot be written.
    """

    _kind: ClassVar[str] = ""

    def __init__(
        self,
        shards: Pattern,
        content: str,
        label: Label,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        index: str | os.PathLike[str] | None,
        is_mapped: bool,
    ) -> None:
        super().__init__(label, transform, target_transform)
        self._paths, self.is_mapped = self._find_shards(shards), is_mapped
        target = "parts" if callable(label) else self.label
        self._content = f"{self._kind}({', '.join(filter(None, (content, f'label={target!r}')))})"
        self._file = Path(index).expanduser() if index is not None else find_index(self._paths, self._content)
        self._open()

    def _find_shards(self, shards: Pattern) -> list[str]:
        return expand(shards)

    def _open(self) -> None:
        self.index: ShardIndex = open_index(self._file, self._paths, self._content, self._scan, self.parts)
        self.shards: Shards = Shards(self._paths, self.index.stamps, str(self._file), self.is_mapped)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the arrays out. Another process maps the index itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("index", "shards")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @abstractmethod
    def _scan(self, path: str) -> Iterator[Place]:
        """Yield the samples of a shard, in their order.

        Raises:
            ValueError: The shard is damaged.
        """

    @abstractmethod
    def _read_fields(self, data: Bytes, names: tuple[str, ...] | None) -> dict[str, Any]:
        """Return parts of a sample, decoded.

        Args:
            data: The bytes of all its parts.
            names: The parts; None for all but the image.

        Raises:
            KeyError: It has no such part.
        """

    def __len__(self) -> int:
        return len(self.index.offsets)

    def read(self, rows: IntArray) -> list[Bytes]:
        index = self.index
        return self.shards.read(index.shard[rows], index.offsets[rows], index.lengths[rows])

    def labels(self, rows: IntArray) -> Labels | None:
        known = self.index.labels
        if not self.parts or len(known) < len(self.parts):
            return None
        columns = {name: known[name][rows].astype(np.int64) for name in self.parts}
        return columns[self.label] if isinstance(self.label, str) else columns

    def read_parts(self, row: int) -> Any:
        """Return what :meth:`make_target` makes the target of.

        Raises:
            ValueError: The sample lacks a part, or it is damaged.
        """
        if self.label is None:
            return None
        index = self.index
        unknown = tuple(name for name in self.parts if name not in index.labels) if self.parts else None
        fields: dict[str, Any] = {}
        if unknown != ():
            if index.starts is None or index.spans is None:
                raise ValueError(f"{index.file} is damaged: it has neither labels nor the places of parts")
            data = self.shards.read_one(int(index.shard[row]), int(index.starts[row]), int(index.spans[row]))
            try:
                fields = self._read_fields(data, unknown)
            except KeyError as error:
                raise ValueError(f"{self.name(row)} has no part {error}, which label= names") from error
        if unknown is None:
            return fields
        known = {name: int(column[row]) for name, column in index.labels.items()}
        values = {name: known[name] if name in known else fields[name] for name in self.parts}
        return values[self.label] if isinstance(self.label, str) else values

    def name(self, row: int) -> str:
        """Return the shard, key and offset of a sample. It does not touch mappings."""
        shard, offset = int(self.index.shard[row]), int(self.index.offsets[row])
        path = self._paths[shard] if shard < len(self._paths) else f"shard {shard}"
        try:
            key = self._read_key(path, row)
        except (OSError, ValueError):
            key = ""
        return f"{path}, {key or 'an image'} at byte {offset:,}"

    def _read_key(self, path: str, row: int) -> str:
        """Return the key of a sample, from its shard; without keys its number there."""
        shards: Any = self.index.shard
        return f"image {row - int(shards.searchsorted(shards[row]))}"

    @property
    def classes(self) -> list[str]:
        """The names of the classes, by label; empty if labels are no classes."""
        return list(self.index.classes)

    def __repr__(self) -> str:
        first = self._paths[0] if len(self._paths) == 1 else f"{len(self._paths):,} shards from {self._paths[0]} on"
        return f"{type(self).__name__} of {first}"
