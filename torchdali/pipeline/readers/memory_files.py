"""Files in memory that DALI opens by a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock

import PIL.Image

from torchdali.runtime import machine
from torchdali.transforms.spec import IntArray

__all__ = ["KeptFiles", "MemoryFile"]

_MAX_BYTES, _MAX_FILES = 2**28, 2**12
_SHARE = 4
"""At most one of so many files that the process may have open is kept."""


class MemoryFile:
    """A file in memory, until it is closed.

    Attributes:
        path: Its path, for this process.
        length: Its bytes, if it is a copy.
    """

    _file = -1
    length = 0

    def __init__(self) -> None:
        self._file = os.memfd_create("torchdali")
        self.path = f"/proc/self/fd/{self._file}".encode()

    @classmethod
    def save(cls, image: PIL.Image.Image) -> MemoryFile:
        """Return a file with the pixels of an image."""
        memory = cls()
        with os.fdopen(memory._file, "wb", closefd=False) as stream:
            image.save(stream, format="PPM")
        return memory

    @classmethod
    def copy(cls, source: int, length: int) -> MemoryFile:
        """Return the first bytes of an open file, or fewer if it has become shorter.

        Raises:
            OSError: It cannot be read, or there is no memory.
        """
        memory, done = cls(), 0
        while done < length and (count := os.sendfile(memory._file, source, done, length - done)):
            done += count
        memory.length = done
        return memory

    def read_first(self, buffer: memoryview) -> None:
        """Read the first bytes into a buffer."""
        os.preadv(self._file, [buffer], 0)

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close the file, and free its memory. At the end of Python the module has lost its names."""
        file, self._file = self._file, -1
        if file >= 0:
            close(file)

    def __del__(self) -> None:
        self.close()


class KeptFiles:
    """Files that were read whole for their headers, until DALI reads them. So they are opened once.

    That is for storage where opening a file takes long. Only so many are kept as may be open and fit into 256 MiB.
    Others are opened again.
    """

    def __init__(self) -> None:
        self._files: dict[int, MemoryFile] = {}
        self._lock, self._bytes, self._count = Lock(), 0, 0
        self._max_files = min(_MAX_FILES, machine.max_open_files() // _SHARE)

    def copy(self, source: int, length: int) -> MemoryFile | None:
        """Return a copy of an open file for :meth:`add`. Return None if there is no room, or the system refuses."""
        with self._lock:
            if self._count >= self._max_files or self._bytes + length > _MAX_BYTES:
                return None
            self._count, self._bytes = self._count + 1, self._bytes + length
        try:
            return MemoryFile.copy(source, length)
        except OSError:  # whoever reads the file itself tells what is wrong with it
            self._release(length)
            return None

    def add(self, row: int, file: MemoryFile) -> None:
        """Keep the copy of the file of a row."""
        self._files[row] = file

    def get(self, row: int) -> MemoryFile | None:
        """Return the file of a row, if it is kept. It stays open while it is referred to."""
        return self._files.get(row)

    def take(self, rows: IntArray) -> dict[int, MemoryFile]:
        """Return the kept files of some rows by their positions, and keep them no longer."""
        if not self._files:
            return {}
        numbers = rows.tolist()
        found = {i: file for i, row in enumerate(numbers) if (file := self._files.get(row))}
        for i in found:
            if file := self._files.pop(numbers[i], None):  # a row may come twice
                self._release(file.length)
        return found

    def _release(self, length: int) -> None:
        with self._lock:
            self._count, self._bytes = self._count - 1, self._bytes - length
