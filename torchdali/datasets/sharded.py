"""The base of datasets in shards: files with many samples each, whose places an index holds."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from zipfile import BadZipFile

import numpy as np

from torchdali.datasets.base import EncodedDataset, Label
from torchdali.datasets.index import Place, ShardIndex, find_index, open_index
from torchdali.datasets.patterns import Pattern, expand, list_patterns
from torchdali.datasets.remote_shards import RemoteShards, Stamps
from torchdali.datasets.shards import Bytes, Column, ShardFile, Shards, stat_shards
from torchdali.runtime import machine
from torchdali.sources import UNREADABLE
from torchdali.sources.places import Places
from torchdali.sources.remote import Client, Range, make_client
from torchdali.transforms.spec import IntArray

__all__ = ["Faults", "ShardedDataset"]

_NOTHING: Bytes = np.empty(0, np.uint8)
_OPENED = ("index", "shards", "integers", "_objects")
"""What :meth:`ShardedDataset._open` makes. Another process makes it itself."""


class Faults:
    """What samples of one shard lack. It is an error if no sample is sound, because then an argument is wrong.

    Else samples without an image are left out. A label is read later, and its error raised, with its sample.

    Attributes:
        has_sound: Whether a sample has all that the arguments name.
    """

    def __init__(self) -> None:
        self.has_sound = False
        self._first: ValueError | None = None

    @contextmanager
    def keep(self) -> Generator[None]:
        """Keep the ValueError of a block, which says what a sample lacks."""
        try:
            yield
        except ValueError as error:
            self._first = self._first or error

    def check(self) -> None:
        """Raise the first error if no sample is sound."""
        first, self._first = self._first, None
        if first and not self.has_sound:
            raise first


class ShardedDataset(EncodedDataset):
    """Images in shards. ``DALILoader`` reads them in any order, without worker processes.

    Args:
        shards: The files: a path, a pattern such as ``"train-{000..146}.tar"`` or ``"train-*.tar"``, or several.
        content: What decides the index: the names of image and target.
        label: See :class:`EncodedDataset`.
        transform: See :class:`EncodedDataset`.
        target_transform: See :class:`EncodedDataset`.
        index: The file of the index; None for a name beside the first shard. It is made if it does not exist.
        is_mapped: Whether to map shards into memory. If not, images are read into memory of their own. None maps shards
            unless one lies on a network file system.
        remote: The store of shards in an object store, one of obstore's; None for the one that the environment
            describes.

    Attributes:
        shards: The shards.
        index: The index.
        is_mapped: Whether the shards are mapped.

    Raises:
        ValueError: A shard is damaged, or it has changed since the index was made.
        OSError: A shard cannot be read, or the index cannot be written.
    """

    _kind: ClassVar[str] = ""
    has_parts_in_data = True

    def __init__(
        self,
        shards: Pattern,
        content: str,
        label: Label,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        index: str | os.PathLike[str] | None,
        is_mapped: bool | None,
        remote: Any = None,
    ) -> None:
        super().__init__(label, transform, target_transform)
        self._paths, self.client = self._find_shards(list_patterns(shards, "shards"), remote)
        if is_mapped is None:
            is_mapped = not any(map(machine.is_on_network, {os.path.dirname(path) or "." for path in self._paths}))  # noqa: PTH120 - names in messages stay as they are
        self.is_mapped = is_mapped and self.client is None
        target = "parts" if callable(label) else self.label
        self._content = f"{self._kind}({', '.join(filter(None, (content, f'label={target!r}')))})"
        self._file = Path(index).expanduser() if index is not None else self._find_index()
        self._open()

    def _find_shards(self, shards: Sequence[str | os.PathLike[str]], remote: Any) -> tuple[list[str], Client | None]:
        """Return the shards that patterns name, and what reads them if they are objects."""
        client = make_client(shards, remote, "shards")
        return expand(shards, client.list if client else None), client

    def _find_index(self) -> Path:
        place = self.client.place if self.client else ""  # two stores may have shards of one URI
        return find_index(self._paths, "\0".join(filter(None, (self._content, place))))

    def _open(self) -> None:
        objects = self._objects = Stamps(self.client) if self.client else None
        stat = objects or stat_shards
        self.index: ShardIndex = open_index(self._file, self._paths, self._content, self._scan, self.parts, stat)
        self.integers, stamps, file = self.index.labels, self.index.stamps, str(self._file)
        self.shards: Shards = (
            RemoteShards(self._paths, stamps, file, self.client, objects.tags)
            if self.client and objects
            else Shards(self._paths, stamps, file, self.is_mapped)
        )

    def _open_shard(self, path: str) -> ShardFile:
        """Open a shard to read it from its begin to its end."""
        return self._objects.open(path) if self._objects else ShardFile(path)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OPENED}

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

    def find(self, rows: IntArray) -> Places:
        index = self.index
        return self.shards.find(index.shard[rows], index.offsets[rows], index.lengths[rows])

    @property
    def _unknown_parts(self) -> tuple[str, ...] | None:
        """The names of parts that must be read for targets: those that the index does not have; None for all."""
        if self.label is None:
            return ()
        return tuple(name for name in self.parts if name not in self.integers) if self.parts else None

    def locate(self, rows: IntArray) -> list[Range]:
        assert isinstance(self.shards, RemoteShards)
        index = self.index
        if self._unknown_parts == ():
            return self.shards.locate(index.shard[rows], index.offsets[rows], index.lengths[rows])
        starts, spans = self._spans
        return self.shards.locate(index.shard[rows], starts[rows], spans[rows])

    def image_in(self, row: int, data: Bytes) -> Bytes:
        if self._unknown_parts == ():
            return data
        offset = int(self.index.offsets[row]) - int(self._spans[0][row])
        return data[offset : offset + int(self.index.lengths[row])]

    @property
    def _spans(self) -> tuple[Column, Column]:
        """Where the parts of samples begin, and their bytes."""
        if self.index.starts is None or self.index.spans is None:
            raise ValueError(f"{self.index.file} is damaged: it has neither labels nor the places of parts")
        return self.index.starts, self.index.spans

    labels = EncodedDataset.labels  # fits this read_parts()

    def read_parts(self, row: int) -> Any:
        """Return what :meth:`make_target` makes the target of.

        Raises:
            ValueError: The sample lacks a part, or it is damaged.
        """
        if self._unknown_parts == ():
            return self.parts_in(row, _NOTHING)
        starts, spans = self._spans
        return self.parts_in(row, self.shards.read_one(int(self.index.shard[row]), int(starts[row]), int(spans[row])))

    def parts_in(self, row: int, data: Bytes) -> Any:
        if self.label is None:
            return None
        unknown, fields = self._unknown_parts, dict[str, Any]()
        if unknown != ():
            try:
                fields = self._read_fields(data, unknown)
            except KeyError as error:
                raise ValueError(f"{self.name(row)} has no part {error}, which label= names") from error
            except (*UNREADABLE, BadZipFile) as error:  # of a part in .npz, too
                raise ValueError(
                    f"{self.name(row)} has a part that cannot be decoded ({error!r}); write the shard again, or name "
                    "other parts as label="
                ) from error
        if unknown is None:
            return fields
        known = {name: int(column[row]) for name, column in self.integers.items()}
        values = {name: known[name] if name in known else fields[name] for name in self.parts}
        return values[self.label] if isinstance(self.label, str) else values

    def name(self, row: int) -> str:
        """Return the shard, key and offset of a sample. It does not touch mappings."""
        shard, offset = int(self.index.shard[row]), int(self.index.offsets[row])
        path = self._paths[shard] if shard < len(self._paths) else f"shard {shard}"
        try:  # a store would be asked for the key, and may be why there is a message
            self.shards.check_shard(shard)  # the place of a key in a changed shard holds something else
            key = ShardedDataset._read_key(self, path, row) if self.client else self._read_key(path, row)
        except (OSError, ValueError):
            key = ""
        key = key if key.isprintable() else ascii(key)
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
