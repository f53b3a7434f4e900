"""The page cache: forgetting the files of a folder, so that they are read from the disk again."""

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_LOOKED_AT = 64


def file_system(folder: Path) -> str:
    """The type of the file system on which `folder` is, or will be made: 'ext4', 'tmpfs', ..."""
    folder = folder.resolve()
    found = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4].encode().decode("unicode_escape")
        if folder.is_relative_to(place) and len(place) >= len(found[0]):
            found = (place, after.split()[0])
    return found[1]


def in_memory(folder: Path) -> bool:
    """Whether `folder` is in memory, where there is nothing to forget."""
    return file_system(folder) in _IN_MEMORY


def forget(files: list[Path]) -> None:
    """Drops the files from the page cache. They must have been written to the disk (`os.sync`)."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def cached_share(files: list[Path]) -> float | None:
    """The share of a few files' pages that are in the page cache; None where the kernel does not say."""
    pages = cached = 0
    for file in files[:: max(1, len(files) // _LOOKED_AT)]:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            resident = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            place = ctypes.c_char.from_buffer(mapped)
            failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(len(mapped)), resident)
            del place  # else the mapping cannot be closed
            if failed:
                return None
            pages += len(resident)
            cached += sum(page & 1 for page in resident)
    return cached / pages
