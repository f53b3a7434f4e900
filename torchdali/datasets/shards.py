"""Files that hold many images each. They are mapped into memory, and their images are views of the mappings."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.sources import open_file
from torchdali.transforms.spec import IntArray

__all__ = ["Bytes", "Column", "Shards", "read_exactly", "stat_shard"]

Bytes = npt.NDArray[np.uint8]
Column = npt.NDArray[np.integer[Any]]


class Shards:
    """The shards of a dataset.

    Args:
        paths: The files.
        stamps: ``(S, 2)`` int64 their lengths, and times of modification in nanoseconds, when their index was made.
        index: The index, for messages.
        is_mapped: Whether to map the files into memory. If not, images are read into memory of their own, which is
            better for network file systems.
    """

    def __init__(self, paths: Sequence[str], stamps: IntArray, index: str, is_mapped: bool = True) -> None:
        self.paths, self.stamps, self.is_mapped = list(paths), stamps, is_mapped
        self._index = index
        self._stamps: list[tuple[int, int]] = [(length, time) for length, time in stamps.tolist()]
        self._maps: dict[int, tuple[mmap.mmap, Bytes]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the mappings out. Another process maps the files itself."""
        return {**self.__dict__, "_maps": {}}

    def check(self, shards: IntArray, offsets: IntArray, lengths: IntArray) -> None:
        """Raise if a shard has changed, or if a place is not in its shard.

        Reading a mapping behind the end of its file kills the process (SIGBUS). So this comes before each batch.

        Args:
            shards: ``(N,)`` the numbers of shards.
            offsets: ``(N,)`` the first byte of each image in its shard.
            lengths: ``(N,)`` bytes of each image.

        Raises:
            ValueError: A shard has another length or time than its index says, or the index is damaged.
            OSError: A shard cannot be read.
        """
        if not len(shards):
            return
        numbers: list[int] = np.unique(shards).tolist()
        for shard in numbers:
            self._check_shard(shard)
        outside = (offsets < 0) | (lengths < 0) | (offsets > self.stamps[shards, 0] - lengths)
        if outside.any():
            i = int(np.flatnonzero(outside)[0])
            self._check_place(int(shards[i]), int(offsets[i]), int(lengths[i]))

    def _check_shard(self, shard: int) -> None:
        if not 0 <= shard < len(self.paths):
            raise ValueError(f"{self._index} is damaged: it names shard {shard} of {len(self.paths)}")
        stamp = stat_shard(self.paths[shard])
        if stamp != self._stamps[shard]:
            raise ValueError(
                f"{self.paths[shard]} has changed since {self._index} was made: it has {stamp[0]:,} bytes and had "
                f"{self._stamps[shard][0]:,}; delete the index, and it is made anew"
            )

    def _check_place(self, shard: int, offset: int, length: int) -> None:
        size = self._stamps[shard][0]
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError(
                f"{self._index} is damaged: it names bytes {offset:,} to {offset + length:,} of {self.paths[shard]}, "
                f"which has {size:,}"
            )

    def read(self, shards: Column, offsets: Column, lengths: Column) -> list[Bytes]:
        """Return bytes of shards, as read-only views of the mappings where the shards are mapped.

        Args:
            shards: ``(N,)`` the numbers of shards.
            offsets: ``(N,)`` where the bytes begin.
            lengths: ``(N,)`` how many bytes.

        Raises:
            ValueError: As for :meth:`check`.
            OSError: A shard cannot be read.
        """
        shards, offsets, lengths = (column.astype(np.int64) for column in (shards, offsets, lengths))
        self.check(shards, offsets, lengths)
        places = list(zip(shards.tolist(), offsets.tolist(), lengths.tolist(), strict=True))
        if not self.is_mapped:
            return self._copy(places)
        self._read_ahead(sorted(places))
        return [self._map(shard)[1][offset : offset + length] for shard, offset, length in places]

    def read_one(self, shard: int, offset: int, length: int) -> Bytes:
        """Return bytes of one shard, as :meth:`read` does. It is five times as fast for one place.

        Raises:
            ValueError: As for :meth:`check`.
            OSError: A shard cannot be read.
        """
        self._check_shard(shard)
        self._check_place(shard, offset, length)
        if self.is_mapped:
            return self._map(shard)[1][offset : offset + length]
        return self._copy([(shard, offset, length)])[0]

    def _read_ahead(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Tell the kernel what is read next, in the order on the disk: 25 times as fast as faults of single pages."""
        for shard, offset, length in places:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            if length:
                self._map(shard)[0].madvise(mmap.MADV_WILLNEED, start, offset + length - start)

    def _map(self, shard: int) -> tuple[mmap.mmap, Bytes]:
        if shard not in self._maps:
            file, status = open_file(self.paths[shard])
            try:
                if status.st_size != self.stamps[shard, 0]:
                    raise ValueError(f"{self.paths[shard]} has changed since {self._index} was made")
                mapping = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)  # thousands of mappings are free, and thousands of open files are not
            self._maps[shard] = mapping, np.frombuffer(mapping, np.uint8)
        return self._maps[shard]

    def _copy(self, places: Sequence[tuple[int, int, int]]) -> list[Bytes]:
        files: dict[int, int] = {}
        try:
            for shard, _, _ in places:
                if shard not in files:
                    files[shard] = open_file(self.paths[shard])[0]
            return [
                np.frombuffer(read_exactly(files[shard], offset, length, self.paths[shard]), np.uint8)
                for shard, offset, length in places
            ]
        finally:
            for file in files.values():
                os.close(file)


def stat_shard(path: str) -> tuple[int, int]:
    """Return the length of a file, and the time of its last modification in nanoseconds."""
    status = os.stat(path)  # noqa: PTH116 - called for each shard of each batch
    return status.st_size, status.st_mtime_ns


def read_exactly(file: int, offset: int, length: int, path: str) -> bytes:
    """Read bytes of an open file.

    Raises:
        ValueError: The file ends before.
    """
    parts: list[bytes] = []
    while length:
        part = os.pread(file, length, offset)
        if not part:
            raise ValueError(f"{path} ends at byte {offset:,}, and its index says that more follows")
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
