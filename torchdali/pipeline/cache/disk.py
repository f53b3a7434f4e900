"""``cache="disk"``: what is fetched of object stores, in files. It holds over runs, and several processes share it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchdali.pipeline.cache.base import mib
from torchdali.pipeline.cache.objects import Bytes, ObjectCache

__all__ = ["DiskObjects"]

_END = b"TDC1"
"""The last bytes of a complete file, after the checksum of its content."""
_TAIL = 4 + len(_END)
_BLOCK = 4096
_SHARE = 2
_KEPT = 0.9
"""The share of the budget that is left after old files were removed."""
_UNFINISHED = 3600.0
"""Seconds after which a file that is not complete was left by a process that is gone."""
_CLOCKS = 1.0
"""Seconds by which the clock of a file system may be behind."""


class DiskObjects(ObjectCache):
    """A folder with a file for each object, or part of one.

    A file appears under its name when it is complete, and has a checksum. ``used`` has the bytes of all files. A
    process locks it while it adds a file. The system unlocks it if the process ends. When the folder is full, files
    are removed that were last used before this cache was opened, the oldest first. Files of this run stay: all are used
    once in each epoch, so that new ones would be no better.

    Args:
        state: As for :class:`Cache`.
        budget: As for :class:`Cache`, of the disk.
        folder: The folder. It is made if it does not exist.

    Raises:
        OSError: The folder cannot be made or written.
    """

    def __init__(self, state: object, budget: int | None, folder: Path) -> None:
        super().__init__(state, budget)
        self._folder, self._opened = folder, time.time() - _CLOCKS
        self._unfinished = folder / "unfinished"
        self._unfinished.mkdir(parents=True, exist_ok=True)
        self._is_full = False
        with self._lock_folder() as used:
            self._used = _read_number(used)
        self._budget = budget or (shutil.disk_usage(folder).free + (self._used or 0)) // _SHARE

    def _path(self, key: tuple[object, ...]) -> Path:
        name = hashlib.blake2b("\0".join(map(str, key)).encode(errors="surrogateescape"), digest_size=20).hexdigest()
        return self._folder / name[:2] / name[2:]

    def get(self, key: tuple[object, ...]) -> Bytes | None:
        path = self._path(key)
        try:
            content = self._read(path)
        except OSError:  # mostly there is no such file; after a fault of the disk the store still has the object
            return None
        if content is None:
            path.unlink(missing_ok=True)  # the machine stopped while it was written
        return content

    def _read(self, path: Path) -> Bytes | None:
        file = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(file)
            data: Bytes = np.empty(status.st_size, np.uint8)
            filled = 0
            while filled < len(data) and (count := os.readv(file, [data[filled:].data])):
                filled += count
            if status.st_mtime < self._opened:
                os.utime(file)  # the time of the last use, once in a run
        finally:
            os.close(file)
        content = data[:-_TAIL]
        return content if filled == len(data) and data[-_TAIL:].tobytes() == _make_tail(content) else None

    def add(self, key: tuple[object, ...], content: Bytes) -> None:
        path = self._path(key)
        if self._is_full or path.exists():
            return
        unfinished = self._unfinished / os.urandom(16).hex()  # two containers may have the same process number
        try:
            path.parent.mkdir(exist_ok=True)
            with unfinished.open("wb") as stream:
                stream.write(content.data)
                stream.write(_make_tail(content))
            self._finish(unfinished, path, _disk_size(len(content) + _TAIL))
        except OSError:  # the disk is full before the budget is
            self._is_full = True
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)

    def _finish(self, unfinished: Path, path: Path, size: int) -> None:
        """Give a file its name if there is room for it. The lock is held, so that no other process counts meanwhile."""
        with self._lock_folder() as stream:
            used = _read_number(stream)
            if used is None or used + size > self._budget:
                used = self._remove_old(size)
            self._is_full = used + size > self._budget
            is_new = not self._is_full and not path.exists()
            self._used = used + size if is_new else used
            _write_number(stream, self._used)  # before there is the file: a process may end here
            if is_new:
                unfinished.replace(path)

    def _remove_old(self, size: int) -> int:
        """Return the bytes of all files. If there is no room, remove files first that this run did not use."""
        files = sorted(self._list())
        used = sum(length for _, length, _ in files)
        if used + size > self._budget:
            for last_use, length, path in files:
                if last_use >= self._opened or used + size <= _KEPT * self._budget:
                    break
                Path(path).unlink(missing_ok=True)
                used -= length
        return used

    def _list(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time, the size and the path of each file. Remove files that processes left when they ended."""
        for folder in os.scandir(self._folder):
            for entry in os.scandir(folder.path) if folder.is_dir() else ():
                with suppress(OSError):  # another process has removed it
                    status = entry.stat()
                    if folder.name == self._unfinished.name:
                        if status.st_mtime < time.time() - _UNFINISHED:
                            Path(entry.path).unlink()
                    else:
                        yield status.st_mtime, _disk_size(status.st_size), entry.path

    @contextmanager
    def _lock_folder(self) -> Generator[BinaryIO, None, None]:
        with os.fdopen(os.open(self._folder / "used", os.O_RDWR | os.O_CREAT, 0o644), "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            try:
                yield stream
            finally:
                fcntl.flock(stream, fcntl.LOCK_UN)  # closing does not unlock it while a forked child has it open

    def close(self) -> None:
        """Keep all files, for the next run."""

    def describe(self) -> str:
        origin = "cache_bytes" if self._budget_option is not None else "chosen: half of what was free"
        return f"objects, in {self._folder}: {mib(self._used or 0)} of at most {mib(self._budget)} ({origin})"


def _disk_size(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


def _make_tail(content: Bytes) -> bytes:
    return zlib.crc32(content.data).to_bytes(4, "little") + _END


def _read_number(stream: BinaryIO) -> int | None:
    """Return the number in a file; None if there is none."""
    text = stream.read()
    return int(text) if text.strip().isdigit() else None


def _write_number(stream: BinaryIO, number: int) -> None:
    stream.seek(0)
    stream.write(b"%-20d" % max(number, 0))
    stream.truncate()
    stream.flush()
