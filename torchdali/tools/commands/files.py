"""Find files, and detect image formats by name and by content."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import PIL.Image
from torchvision.datasets.folder import IMG_EXTENSIONS

_MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"BM": "BMP",
    **{b"P%d" % number: "PPM" for number in range(1, 7)},
}


class Problem(NamedTuple):
    """A problem of one file.

    Attributes:
        path: The file.
        problem: Its kind, in one or two words.
        reason: The same in a sentence.
    """

    path: str
    problem: str
    reason: str


@dataclass
class FileList:
    """The files under a folder.

    Attributes:
        images: Regular files with names that ImageFolder takes for images.
        others: All other regular files.
        problems: Folders that cannot be opened, broken links, and images that are no files.
    """

    images: list[str] = field(default_factory=list[str])
    others: list[str] = field(default_factory=list[str])
    problems: list[Problem] = field(default_factory=list[Problem])


def find_files(folder: Path) -> FileList:
    """List the files under a folder, in the order of names. Follow links, as ImageFolder does, but no folder twice."""
    files = FileList()
    for entry in _walk(str(folder), files.problems, set()):
        has_image_name = entry.name.lower().endswith(IMG_EXTENSIONS)
        if _is_true(entry.is_file):
            (files.images if has_image_name else files.others).append(entry.path)
        elif has_image_name:
            # Such as a named pipe, which must not be opened: that would wait forever.
            broken = entry.is_symlink() and not Path(entry.path).exists()
            reason = "it is a link to a file that is not there" if broken else "it is named as an image and is no file"
            files.problems.append(Problem(entry.path, "unreadable", reason))
    return files


def _walk(folder: str, problems: list[Problem], visited: set[tuple[int, int]]) -> Iterator[os.DirEntry[str]]:
    try:
        status = Path(folder).stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        problems.append(Problem(folder, "unreadable", f"the folder cannot be read ({error.strerror})"))
        return
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    for entry in entries:
        if _is_true(entry.is_dir):
            yield from _walk(entry.path, problems, visited)
        else:
            yield entry


def _is_true(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except OSError:  # a link to itself
        return False


def detect_format(head: bytes) -> str:
    """Return PIL's name of the format that begins with these bytes, or an empty string."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def format_of_name(path: str) -> str:
    """Return PIL's name of the format with this extension, or an empty string."""
    return _format_by_extension().get(os.path.splitext(path)[1].lower(), "")  # noqa: PTH122 - Path is slower


@functools.cache
def _format_by_extension() -> dict[str, str]:
    PIL.Image.init()
    # A file of several JPEGs (MPO) begins like a JPEG.
    aliases = {"MPO": "JPEG", "DIB": "BMP"}
    return {name: aliases.get(kind, kind) for name, kind in PIL.Image.registered_extensions().items()}


def is_cut_off(path: str) -> bool:
    """Return True if a JPEG, PNG or WebP ends too early. Return False for other files, and for missing ones."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(12)
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - 12))
            tail = file.read()
    except OSError:
        return False
    kind = detect_format(head)
    if kind == "WEBP":
        return 8 + int.from_bytes(head[4:8], "little") > length
    return (kind == "JPEG" and not tail.endswith(b"\xff\xd9")) or (kind == "PNG" and tail[4:8] != b"IEND")
