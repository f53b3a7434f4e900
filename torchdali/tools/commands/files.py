"""The files under a folder, and what kind of image each of them is: by its name, and by its content."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import PIL.Image
from torchvision.datasets.folder import IMG_EXTENSIONS

__all__ = ["Found", "Problem", "cut_off", "find", "format_of", "format_of_name"]

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
    """What is wrong with one file.

    Attributes:
        path: The file.
        problem: One word for it, or two.
        reason: The same in a sentence.
    """

    path: str
    problem: str
    reason: str


@dataclass
class Found:
    """What lies under a folder.

    Attributes:
        images: Regular files that ImageFolder takes for images by their names.
        others: All other regular files.
        problems: What cannot be opened: folders, links to nothing, and images that are no files.
    """

    images: list[str] = field(default_factory=list[str])
    others: list[str] = field(default_factory=list[str])
    problems: list[Problem] = field(default_factory=list[Problem])


def find(folder: Path) -> Found:
    """Walks through a folder in the order of names, and through links, as ImageFolder does; no folder is met twice."""
    found = Found()
    for entry in _entries(str(folder), found, set()):
        named = entry.name.lower().endswith(IMG_EXTENSIONS)
        if _is(entry.is_file):
            (found.images if named else found.others).append(entry.path)
        elif named:
            # A pipe would be waited for, for ever.
            gone = entry.is_symlink() and not Path(entry.path).exists()
            reason = "it is a link to a file that is not there" if gone else "it is named as an image and is no file"
            found.problems.append(Problem(entry.path, "unreadable", reason))
    return found


def _entries(folder: str, found: Found, met: set[tuple[int, int]]) -> Iterator[os.DirEntry[str]]:
    try:
        about = Path(folder).stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        found.problems.append(Problem(folder, "unreadable", f"the folder cannot be read ({error.strerror})"))
        return
    if (about.st_dev, about.st_ino) in met:
        return
    met.add((about.st_dev, about.st_ino))
    for entry in entries:
        if _is(entry.is_dir):
            yield from _entries(entry.path, found, met)
        else:
            yield entry


def _is(kind: Callable[[], bool]) -> bool:
    try:
        return kind()
    except OSError:  # a link to itself
        return False


def format_of(head: bytes) -> str:
    """The format that the first bytes of a file tell, by PIL's name for it; empty where they do not."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def format_of_name(path: str) -> str:
    """The format that a file's name promises, by PIL's name for it; empty where PIL knows no such name."""
    return _formats().get(os.path.splitext(path)[1].lower(), "")  # noqa: PTH122 - of very many


@functools.cache
def _formats() -> dict[str, str]:
    # A file of several JPEGs begins as a JPEG does, and its first image is one.
    return {name: {"MPO": "JPEG", "DIB": "BMP"}.get(kind, kind) for name, kind in _registered().items()}


def _registered() -> dict[str, str]:
    PIL.Image.init()
    return PIL.Image.registered_extensions()


def cut_off(path: str) -> bool:
    """Whether a JPEG, PNG or WebP does not end as it should. False of other files, and of those that are gone."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(12)
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - 12))
            tail = file.read()
    except OSError:
        return False
    kind = format_of(head)
    if kind == "WEBP":
        return 8 + int.from_bytes(head[4:8], "little") > length
    return (kind == "JPEG" and not tail.endswith(b"\xff\xd9")) or (kind == "PNG" and tail[4:8] != b"IEND")
