"""Counting how often the files of a folder are opened, by whatever thread or library of this process or another."""

from __future__ import annotations

import ctypes
import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPEN, _CLOSE = 0x20, 0x10  # IN_OPEN and IN_CLOSE_NOWRITE; between them no two events are alike, and none is joined
_HEAD = struct.Struct("iIII")


@contextmanager
def counted_opens(folder: Path) -> Iterator[Counter[str]]:
    """Count, by name, how often files of a folder are opened within the block. The counts are complete after it."""
    libc, opens = ctypes.CDLL(None, use_errno=True), Counter[str]()
    queue = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert queue >= 0
    assert libc.inotify_add_watch(queue, os.fsencode(folder), _OPEN | _CLOSE) >= 0, os.strerror(ctypes.get_errno())
    try:
        yield opens
        while events := _read(queue):
            while events:
                _, mask, _, length = _HEAD.unpack_from(events)
                name = events[_HEAD.size : _HEAD.size + length].rstrip(b"\0").decode()
                opens[name] += bool(name and mask & _OPEN)
                events = events[_HEAD.size + length :]
    finally:
        os.close(queue)


def _read(queue: int) -> bytes:
    try:
        return os.read(queue, 2**16)
    except BlockingIOError:
        return b""
