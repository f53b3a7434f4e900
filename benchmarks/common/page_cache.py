"""Drop files from the page cache, so that they are read from the disk again."""

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_MAX_FILES = 64
"""Number of files of which the pages are counted."""


def file_system(folder: Path) -> str:
    """Return the type of the file system of an existing or future folder: 'ext4', 'tmpfs', ..."""
    folder = folder.resolve()
    best = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4].encode().decode("unicode_escape")
        if folder.is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, after.split()[0])
    return best[1]


def is_in_memory(folder: Path) -> bool:
    """Return True if a folder is in memory, so that nothing can be dropped."""
    return file_system(folder) in _IN_MEMORY


def forget(files: list[Path]) -> None:
    """Drop files from the page cache. They must have been written to the disk (`os.sync`)."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def cached_share(files: list[Path]) -> float | None:
    """Return the share of pages in the page cache, for some of the files, or None if the kernel does not tell."""
    pages = cached = 0
    for file in files[:: max(1, len(files) // _MAX_FILES)]:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            resident = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            place = ctypes.c_char.from_buffer(mapped)
            failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(len(mapped)), resident)
            del place  # otherwise the mapping cannot be closed
            if failed:
                return None
            pages += len(resident)
            cached += sum(page & 1 for page in resident)
    return cached / pages
