"""The members of a tar file from the ``.idx`` file that DALI's ``wds2idx`` writes, format v1.2.

A line for each sample has four words for each member: part, offset, length and name. The format:
https://github.com/NVIDIA/DALI/blob/main/tools/wds2idx.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Member", "read_wds2idx"]

_BLOCK = 512
_LONGEST_NAME = 100
"""Bytes of a name in a header. wds2idx has wrong offsets for longer names, whose headers take several blocks."""
_VERSION = "v1.2"
_FILES = (b"0", b"\0", b"7")
"""Types of regular files."""
_CHECKED = 4096
"""Most headers that are compared. So a cold disk is read at few places, and a warm one takes no longer than without."""


class Member(NamedTuple):
    """A regular file in a tar.

    Attributes:
        name: Its path in the tar.
        offset: Its first byte.
        length: Its number of bytes.
        header: The first byte of its headers.
    """

    name: str
    offset: int
    length: int
    header: int


def read_wds2idx(path: str, status: os.stat_result, read: Callable[[int, int], bytes]) -> list[Member] | None:
    """Return the members of a tar; None if there is no ``.idx`` file, it is older than the tar, or it does not fit.

    Args:
        path: The tar.
        status: Its status.
        read: Returns its bytes at an offset, of a length.
    """
    file = Path(path).with_suffix(".idx")
    try:
        if file.stat().st_mtime_ns < status.st_mtime_ns:
            return None
        first, *lines = file.read_text().splitlines()
        version, count = first.split()
        num_samples = int(count)
        words = [line.split(" ") for line in lines]
        members = [
            Member(name, int(offset), int(length), int(offset) - _BLOCK)
            for line in words
            for part, offset, length, name in zip(line[::4], line[1::4], line[2::4], line[3::4], strict=True)
            if name.endswith(part)
        ]
    except (OSError, ValueError):
        return None
    if version != _VERSION or len(lines) != num_samples or 4 * len(members) != sum(map(len, words)):
        return None
    return members if members and _fit(members, status.st_size, read) else None


def _fit(members: list[Member], size: int, read: Callable[[int, int], bytes]) -> bool:
    """Return whether members lie one behind the other in the tar, none follows, and headers of many say so."""
    end = 0
    for member in members:
        if member.header < end or member.length < 0 or len(os.fsencode(member.name)) > _LONGEST_NAME:
            return False
        end = member.offset + member.length
    if end > size or read(end + -end % _BLOCK, _BLOCK).strip(b"\0"):  # no zeros: a sample was appended
        return False
    some = members
    if len(members) > _CHECKED:  # at random, because each n-th member could be an image, and never a label
        some = [members[i] for i in sorted(random.Random(0).sample(range(len(members)), _CHECKED))]
    return all(_is_header_of(read(member.header, _BLOCK), member) for member in (*some, members[-1]))


def _is_header_of(header: bytes, member: Member) -> bool:
    name, kind = header[:_LONGEST_NAME].rstrip(b"\0"), header[156:157]
    length = header[124:135].strip(b"\0 ")
    same = name == os.fsencode(member.name) and kind in _FILES
    return same and length.isdigit() and int(length, 8) == member.length
