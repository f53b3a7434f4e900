"""Files that hold many images each. They are mapped into memory, and their images are views of the mappings."""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchdali.runtime import machine
from torchdali.sources import open_file
from torchdali.sources.places import Bytes, Places
from torchdali.transforms.spec import IntArray

__all__ = ["Bytes", "Column", "ShardFile", "Shards", "describe_change", "open_shard", "stat_shards"]

if TYPE_CHECKING:
    from typing_extensions import Self

Column = npt.NDArray[np.integer[Any]]
_Map = tuple[mmap.mmap, Bytes]

_SMALL = 2**20
"""Bytes of memory that are not kept, because the system need not be asked for them."""
_FREE_BLOCKS = 8
"""Most blocks of memory that are kept for later images of shards that are not mapped."""
_QUIET, _EVERY = 16, 4
"""The process has not read from a disk lately if so many looks in a row found nothing. A look is taken at every fourth
read, because it took 1.6 ms where all cores were busy, and 0.02 ms where they were not."""


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
        self._maps: dict[int, _Map] = {}
        self._disk, self._is_on_network = _DiskWatch(), False
        self._blocks: deque[Bytes] = deque(maxlen=_FREE_BLOCKS)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory out. Another process maps the files itself."""
        return {**self.__dict__, "_maps": {}, "_blocks": deque(maxlen=_FREE_BLOCKS)}

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
            self.check_shard(shard)
        outside = (offsets < 0) | (lengths < 0) | (offsets > self.stamps[shards, 0] - lengths)
        if outside.any():
            i = int(np.flatnonzero(outside)[0])
            self._check_place(int(shards[i]), int(offsets[i]), int(lengths[i]))

    def check_shard(self, shard: int) -> None:
        """Raise if there is no such shard, or if it has changed. The errors are those of :meth:`check`."""
        if not 0 <= shard < len(self.paths):
            raise ValueError(f"{self._index} is damaged: it names shard {shard} of {len(self.paths)}")
        (stamp,) = stat_shards([self.paths[shard]])
        if stamp != self._stamps[shard]:
            raise ValueError(
                f"{self.paths[shard]} has changed since {self._index} was made"
                f"{describe_change(stamp, self._stamps[shard])}; delete the index, and it is made again"
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
        if self.is_mapped:
            return self.find(shards, offsets, lengths).views()
        shards, offsets, lengths = (column.astype(np.int64) for column in (shards, offsets, lengths))
        self.check(shards, offsets, lengths)
        return self._copy(list(zip(shards.tolist(), offsets.tolist(), lengths.tolist(), strict=True)))

    def find(self, shards: Column, offsets: Column, lengths: Column) -> Places:
        """Return where bytes of shards lie in the mappings. The shards must be mapped.

        The arguments and errors are those of :meth:`read`.
        """
        shards, offsets, lengths = (column.astype(np.int64) for column in (shards, offsets, lengths))
        self.check(shards, offsets, lengths)
        numbers: list[int] = shards.tolist()
        maps = {shard: self._map(shard) for shard in set(numbers)}
        if self._is_on_network or self._disk.was_read():
            self._read_ahead(maps, shards, offsets, offsets + lengths)
        return Places([maps[shard][1] for shard in numbers], offsets, lengths)

    def read_one(self, shard: int, offset: int, length: int) -> Bytes:
        """Return bytes of one shard, as :meth:`read` does. It is five times as fast for one place.

        Raises:
            ValueError: As for :meth:`check`.
            OSError: A shard cannot be read.
        """
        self.check_shard(shard)
        self._check_place(shard, offset, length)
        if self.is_mapped:
            return self._map(shard)[1][offset : offset + length]
        return self._copy([(shard, offset, length)])[0]

    def _read_ahead(self, maps: dict[int, _Map], shards: IntArray, starts: IntArray, ends: IntArray) -> None:
        """Tell the kernel what is read next, in the order on the disk: 25 times as fast as faults of single pages."""
        order = np.lexsort((starts, shards))
        starts = starts[order] // mmap.PAGESIZE * mmap.PAGESIZE
        lengths = ends[order] - starts
        advise = {shard: mapping.madvise for shard, (mapping, _) in maps.items()}
        for shard, start, length in zip(shards[order].tolist(), starts.tolist(), lengths.tolist(), strict=True):
            if length:
                advise[shard](mmap.MADV_WILLNEED, start, length)

    def _map(self, shard: int) -> _Map:
        if shard not in self._maps:
            file, status = open_file(self.paths[shard])
            try:
                if status.st_size != self.stamps[shard, 0]:
                    raise ValueError(f"{self.paths[shard]} has changed since {self._index} was made")
                mapping = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)  # thousands of mappings are free, and thousands of open files are not
            self._maps[shard] = mapping, np.frombuffer(mapping, np.uint8)
            self._is_on_network |= machine.is_on_network(self.paths[shard])
        return self._maps[shard]

    def _copy(self, places: Sequence[tuple[int, int, int]]) -> list[Bytes]:
        """Return bytes that were read into one block of memory, in the order on the disk."""
        ends = list(accumulate((length for _, _, length in places), initial=0))
        block = self._take_block(ends[-1])
        views = [block[start:end] for start, end in pairwise(ends)]
        files: dict[int, int] = {}
        try:
            for (shard, offset, _), view in sorted(zip(places, views, strict=True), key=itemgetter(0)):
                if shard not in files:
                    files[shard] = open_file(self.paths[shard])[0]
                _read_into(files[shard], offset, view, self.paths[shard])
        finally:
            for file in files.values():
                os.close(file)
        return views

    def _take_block(self, size: int) -> Bytes:
        """Return memory that goes back to the free blocks with its last view. New memory is cleared by the system."""
        if size < _SMALL:
            return np.empty(size, np.uint8)
        memory: Bytes | None = None
        with suppress(IndexError):
            while memory is None or len(memory) < size:
                memory = self._blocks.popleft()
        if memory is None or len(memory) < size:
            memory = np.empty(size + size // 4, np.uint8)
        block: Bytes = np.frombuffer(memory.data, np.uint8)  # views of it refer to it, and not to the memory
        weakref.finalize(block, self._blocks.append, memory).atexit = False
        return block[:size]


class _DiskWatch:
    """Tells whether this process has read from a disk lately.

    If it has not, all shards are in memory, and advice to read them is in vain. For 256 images it takes 0.4 ms of the
    iterating thread. What is not in memory after all is read when it is touched. From then on there is advice again.
    Linux does not count reads from network file systems and FUSE.
    """

    def __init__(self) -> None:
        self._reads, self._quiet, self._calls = (0, 0), 0, 0

    def was_read(self) -> bool:
        """Return whether something was read around the latest 64 calls."""
        self._calls += 1
        if self._calls % _EVERY == 0:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            reads = usage.ru_majflt, usage.ru_inblock
            self._quiet = self._quiet + 1 if reads == self._reads else 0
            self._reads = reads
        return self._quiet < _QUIET


def describe_change(found: tuple[int, int], known: tuple[int, int]) -> str:
    """Return what :func:`stat_shards` tells of a change."""
    if found[0] == known[0]:
        return ": its time is another, its length is not (cp -p and rsync -t copy the time)"
    return f": it has {found[0]:,} bytes and had {known[0]:,}"


def stat_shards(paths: Sequence[str]) -> list[tuple[int, int]]:
    """Return the lengths of files, and the times of their last modification in nanoseconds."""
    statuses = [os.stat(path) for path in paths]  # noqa: PTH116 - called for each shard of each batch
    return [(status.st_size, status.st_mtime_ns) for status in statuses]


def open_shard(path: str) -> tuple[int, os.stat_result]:
    """Open a shard, as :func:`open_file` does. Every error names it."""
    try:
        return open_file(path)
    except OSError as error:
        if error.filename is None:
            raise OSError(f"{path} must be a file, got a pipe or a device; copy its content to a file") from error
        raise


class ShardFile:
    """A shard that is read to make its index. Use it as a context.

    Args:
        path: The file.

    Attributes:
        size: Its bytes.
        status: The status of the file; None if it is an object of a store.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        if os.path.isdir(path):  # noqa: PTH112 - the path as it is given
            raise IsADirectoryError(f"{path} is a folder; name its files, such as {os.path.join(path, '*')}")  # noqa: PTH118
        self._file, status = open_shard(path)
        self.status: os.stat_result | None = status
        self.size = status.st_size

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes; fewer where the file ends."""
        return os.pread(self._file, length, offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _read_into(file: int, offset: int, memory: Bytes, path: str) -> None:
    """Fill memory with the bytes of an open file.

    Raises:
        ValueError: The file ends before.
    """
    while len(memory):
        count = os.preadv(file, [memory.data], offset)
        if not count:
            raise ValueError(f"{path} ends at byte {offset:,}, and its index says that more follows")
        offset, memory = offset + count, memory[count:]
