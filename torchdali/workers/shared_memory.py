"""Shared memory that a worker fills and the main process reads: one block for each batch, reused.

A block is an anonymous file in memory (``memfd_create``). The main process opens it through ``/proc`` and maps it once,
however often the worker reuses it. Blocks are not in ``/dev/shm``, whose size containers limit. They need no clean-up:
the kernel frees a block when both processes have closed it or ended.

The first byte of a block says whether it is in use. The worker sets it before it sends the block. The main process
clears it when it has read the contents.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.runtime.lifecycle import Resource

__all__ = ["MappedFile", "SharedBuffer", "SharedBufferHandle", "SharedBufferPool", "align"]

_ALIGNMENT = 64
_HEADER = _ALIGNMENT
_PAGE = mmap.PAGESIZE
_FREE, _IN_USE = 0, 1
_GROWTH = 1.25


def align(length: int) -> int:
    """Return the next offset at which an array may begin."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class _Block:
    """A block, in the worker that made it."""

    def __init__(self) -> None:
        self.file = os.memfd_create("torchdali", os.MFD_CLOEXEC)
        # Process ids are reused, but not the inode of a file that is still mapped.
        self.key = (os.getpid(), os.fstat(self.file).st_ino)
        self.capacity = 0
        self._memory: Any = None

    @property
    def is_free(self) -> bool:
        return not self.capacity or self._memory[0] == _FREE

    def take(self, length: int) -> npt.NDArray[np.uint8]:
        """Return the memory, at least ``length`` bytes, and mark it in use."""
        if self.capacity < _HEADER + length:
            self._grow(_HEADER + length)
        self._memory[0] = _IN_USE
        return self._memory[_HEADER:]

    def _grow(self, needed: int) -> None:
        capacity = -(-int(needed * _GROWTH) // _PAGE) * _PAGE
        try:
            # Reserve the pages now. If memory ran out later, a write would end the process with SIGBUS.
            os.posix_fallocate(self.file, 0, capacity)
            self._memory = np.frombuffer(mmap.mmap(self.file, capacity), np.uint8)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise MemoryError(
                f"a batch needs {needed / 2**20:,.0f} MiB of shared memory, of which there is not enough "
                f"({os.strerror(error.errno)}). Raise the memory limit of the machine or container, or use a smaller "
                "batch_size, fewer num_workers or a smaller prefetch_factor. A dataset that gives encoded files "
                "(bytes, or pathlib.Path) needs a fraction of the memory"
            ) from error
        self.capacity = capacity

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "file"):  # there may be no descriptor left
            close(self.file)


class SharedBufferPool:
    """The blocks of one worker: one for each batch that is in flight or being read."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def take(self, length: int) -> tuple[npt.NDArray[np.uint8], SharedBufferHandle]:
        """Return memory for ``length`` bytes, and the handle to send.

        Raises:
            MemoryError: There is not enough shared memory.
        """
        idle = [block for block in self._blocks if block.is_free]
        block = max(idle, key=lambda block: block.capacity, default=None)
        if block is None:
            block = _Block()
            self._blocks.append(block)
        memory = block.take(length)
        return memory, SharedBufferHandle(block.file, block.key, block.capacity)


class MappedFile:
    """A block, mapped into the main process while this object lives.

    Args:
        file: The number of the worker's file descriptor.
        key: The worker's process and the file's inode, which tell the block from all others.
        capacity: Bytes of the block, its header counted.

    Raises:
        RuntimeError: The worker's file cannot be opened.
    """

    def __init__(self, file: int, key: tuple[int, int], capacity: int) -> None:
        path = f"/proc/{key[0]}/fd/{file}"
        try:
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"the shared memory of DataLoader worker (pid {key[0]}) cannot be opened ({error}); either it has "
                "ended, or this process may not look into its own children under /proc"
            ) from error
        try:
            self.key, self.capacity = key, capacity
            self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(own, capacity), np.uint8)
        finally:
            os.close(own)


_mapped_files: weakref.WeakValueDictionary[tuple[int, int], MappedFile] = weakref.WeakValueDictionary()


class SharedBuffer(Resource):
    """One filling of a block. When it is dropped, the worker may fill the block again."""

    def __init__(self, mapped_file: MappedFile) -> None:
        self.mapped_file = mapped_file
        super().__init__()

    @property
    def contents(self) -> npt.NDArray[np.uint8]:
        """All bytes after the header. They may be read while this object lives."""
        return self.mapped_file.memory[_HEADER:]

    def __del__(self, free: int = _FREE) -> None:
        self.mapped_file.memory[0] = free


def _receive(file: int, key: tuple[int, int], capacity: int) -> SharedBuffer:
    # Without a lock, which a fork could leave locked: one thread alone gets a worker's batches.
    mapped_file = _mapped_files.get(key)
    if mapped_file is None or mapped_file.capacity != capacity:
        mapped_file = _mapped_files[key] = MappedFile(file, key, capacity)
    return SharedBuffer(mapped_file)


class SharedBufferHandle:
    """The message that sends a block: arguments of :class:`MappedFile`. Unpickled, it is a :class:`SharedBuffer`."""

    def __init__(self, file: int, key: tuple[int, int], capacity: int) -> None:
        self._arguments = file, key, capacity

    def __reduce__(self) -> tuple[Callable[..., SharedBuffer], tuple[Any, ...]]:
        return _receive, self._arguments
