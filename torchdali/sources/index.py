"""A dataset whose paths and labels lie in one file, which all processes of a machine map into memory."""

from __future__ import annotations

import errno
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset, pil_loader

from torchdali.sources.headers.header import UNREADABLE, read_header
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.paths import Table, as_int64, read_samples, smaller

__all__ = ["ImageIndex"]

_Name = str | os.PathLike[str]

_SCAN_THREADS = 16
_SCAN_AT_ONCE = 256


class ImageIndex(Dataset[tuple[Any, Any]]):
    """Image files and their labels, as ``ImageFolder`` has them, from a file that :meth:`write` made.

    ``ImageFolder`` keeps a list, which for ten million files takes 1.9 GB in each process. An index is mapped into
    memory: it opens in milliseconds, however long it is, and all processes of a machine share one copy. ``DataLoader``
    takes it as it takes an ``ImageFolder``; ``DALILoader`` reads it without copying it.

    The file is what ``numpy.savez(file, paths=..., labels=..., classes=...)`` writes: ``paths`` of a type ``S``,
    ``labels`` integers, ``classes`` names, which may be left out. Who replaces it should rename another file to its
    name, as :meth:`write` does: processes that have it open go on with the old one.

    Args:
        file: The index.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each label.

    Attributes:
        paths: ``(N,)`` the files, as bytes (:func:`os.fsdecode` makes a string of one). Not to be written to.
        targets: ``(N,)`` the labels. Not to be written to.
        classes: The names of the classes, by label; empty where the index has none.
        class_to_idx: The labels, by name.

    Raises:
        ValueError: The file is no index; or a compressed one, which cannot be mapped.
        OSError: It cannot be read.
    """

    def __init__(
        self,
        file: _Name,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.file: Path = Path(file).expanduser()
        self.transform = transform
        self.target_transform = target_transform
        self._open()

    def _open(self) -> None:
        arrays, self._opened = _mapped(self.file, "r")
        self.paths: Table = arrays.get("paths", np.empty(0))
        self.targets: npt.NDArray[np.integer[Any]] = arrays.get("labels", np.empty(0))
        classes = arrays.get("classes", np.empty(0, np.str_))
        if self.paths.dtype.kind != "S" or self.paths.ndim != 1:
            raise ValueError(f"{self.file} is no index: it has no array 'paths' of one axis and of a type S")
        if self.targets.dtype.kind not in "iu" or self.targets.shape != self.paths.shape:
            raise ValueError(f"{self.file} is no index: it has no array 'labels' of {len(self.paths)} integers")
        try:
            self.classes: list[str] = [str(name) for name in classes]
        except (TypeError, SystemError) as error:  # not one axis, or no Unicode
            raise ValueError(f"{self.file} is no index: its array 'classes' is no list of names") from error
        self.class_to_idx: dict[str, int] = {name: label for label, name in enumerate(self.classes)}
        self.has_headers: bool = _has_headers(arrays, self.file, len(self.paths))

    def headers(self) -> HeaderColumns:
        """What is known of the files. It may be written to: what is, is copied, page by page, and the file stays."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        opened = None
        if self.has_headers:
            with suppress(OSError, ValueError):
                arrays, opened = _mapped(self.file, "c")
        if opened != self._opened:  # another file has its name by now
            return HeaderColumns.unknown(len(self))
        return HeaderColumns(*(arrays[name] for name in HeaderColumns._fields))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """The image, opened as ``ImageFolder`` does it, and the label, each through its transform."""
        image: Any = pil_loader(os.fsdecode(self.paths[index]))
        target: Any = int(self.targets[index])
        return (
            self.transform(image) if self.transform else image,
            self.target_transform(target) if self.target_transform else target,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.file)!r}, {len(self):,} files)"

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps the file for itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("paths", "targets")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @staticmethod
    def write(
        file: _Name,
        samples: _Name | Iterable[tuple[_Name, int]],
        classes: Sequence[str] | None = None,
        headers: bool = False,
    ) -> None:
        """Writes an index, all of it or nothing.

        Args:
            file: Where to.
            samples: Pairs of a file and its label, in the order of the dataset; or a folder of class folders, which is
                read as ``ImageFolder`` reads it.
            classes: The names of the labels, where ``samples`` is no folder.
            headers: Whether to read the header of each file, about 30 us each, and keep what it says. No epoch need
                read it then, and processes share what otherwise takes nine bytes a file in each of them. A file that
                cannot be read raises in its turn, as ever, and one whose length has changed is read anew.

        Raises:
            TypeError: A label is no int, or one of more than 64 bits; or ``classes`` is no list of names.
            ValueError: A label has no name in ``classes``; or there are ``classes``, and ``samples`` is a folder.
        """
        if isinstance(samples, (str, os.PathLike)):
            if classes is not None:
                raise ValueError("the classes of a folder are the folders in it: give classes= with pairs only")
            classes, samples = _folder(str(Path(samples).expanduser()))
        paths, labels = read_samples(samples)
        if not isinstance(labels, np.ndarray):
            # A column of a table gives numpy's integers.
            plain = [cast("Any", label).item() if isinstance(label, np.integer) else label for label in labels]
            numbers = as_int64(plain)
            if numbers is None:
                row = next(row for row, label in enumerate(plain) if as_int64([label]) is None)
                raise TypeError(f"the label of {os.fsdecode(paths[row])} is no int of 64 bits: {labels[row]!r}")
            labels = smaller(numbers)
        if isinstance(classes, str) or not all(isinstance(name, str) for name in classes or ()):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"classes is a list of names, not {classes!r}")
        names = np.array(classes or [], np.str_)
        if len(names) and len(without := np.flatnonzero((labels < 0) | (labels >= len(names)))):
            row = int(without[0])
            raise ValueError(
                f"the label of {os.fsdecode(paths[row])} is {labels[row]}, and there are {len(names)} classes"
            )
        arrays: dict[str, npt.NDArray[Any]] = {"paths": paths, "labels": labels, "classes": names}
        if headers:
            arrays |= _read_headers(paths)._asdict()
        file = Path(file).expanduser()
        unfinished = Path(f"{file}.unfinished")
        with unfinished.open("wb") as stream:
            np.savez(stream, **cast("Any", arrays))
        unfinished.replace(file)


def _folder(folder: str) -> tuple[list[str], Iterator[tuple[str, int]]]:
    classes, labels = find_classes(folder)
    # One class after another, because a list of them all is what an index avoids.
    parts = (make_dataset(folder, {name: labels[name]}, IMG_EXTENSIONS) for name in classes)
    return classes, chain.from_iterable(parts)


def _read_headers(paths: Table) -> HeaderColumns:
    table = HeaderTable(HeaderColumns.unknown(len(paths)))

    def read(start: int) -> None:
        for row in range(start, min(start + _SCAN_AT_ONCE, len(paths))):
            with suppress(*UNREADABLE):  # stays unknown, and is raised when its sample is read
                table.learn(row, read_header(os.fsdecode(paths[row])))

    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        for _ in pool.map(read, range(0, len(paths), _SCAN_AT_ONCE)):
            pass
    return table.columns


def _has_headers(arrays: dict[str, npt.NDArray[Any]], file: Path, count: int) -> bool:
    """Return whether an index has headers; raise ValueError if their arrays have another type or shape."""
    wanted = HeaderColumns.unknown(0)
    if any(name not in arrays or len(arrays[name]) != count for name in wanted._fields):
        return False
    for name, column in wanted._asdict().items():
        if (arrays[name].dtype, arrays[name].shape[1:]) != (column.dtype, column.shape[1:]):
            shape = (count, *column.shape[1:])
            raise ValueError(
                f"{file} is no index: its array '{name}' must be {column.dtype} of the shape {shape}, "
                f"got {arrays[name].dtype} of {arrays[name].shape}"
            )
    return True


def _mapped(file: Path, mode: Literal["r", "c"]) -> tuple[dict[str, npt.NDArray[Any]], object]:
    """The arrays of an uncompressed ``.npz``, mapped into memory, and what tells the file from another of its name.

    ``numpy.load`` only maps a ``.npy``.
    """
    arrays: dict[str, npt.NDArray[Any] | None] = {}
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            about = os.fstat(stream.fileno())
            entries = archive.infolist()
            compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            for entry in () if compressed else entries:
                stream.seek(entry.header_offset)
                name, extra = struct.unpack("<26xHH", stream.read(30))
                stream.seek(name + extra, os.SEEK_CUR)
                arrays[entry.filename.removesuffix(".npy")] = _map_array(stream, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which a seek to a negative place raises, in a damaged file
            raise
        raise ValueError(f"{file} is no index, which is a file that ImageIndex.write or numpy.savez made") from error
    except Exception as error:  # of damaged bytes zipfile, struct and numpy raise nearly anything
        raise ValueError(f"{file} is no index, which is a file that ImageIndex.write or numpy.savez made") from error
    if compressed:
        raise ValueError(f"{file} is compressed, so it cannot be mapped; write it with numpy.savez")
    mapped = {name: array for name, array in arrays.items() if array is not None}
    if len(mapped) < len(arrays):
        raise ValueError(f"{file} is no index: it has an array of Python objects, or in Fortran's order")
    return mapped, (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)


def _map_array(stream: BinaryIO, mode: Literal["r", "c"]) -> npt.NDArray[Any] | None:
    """None of an array of Python objects, or in Fortran's order."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject or fortran:
        return None
    if 0 in shape or not dtype.itemsize:
        return np.empty(shape, dtype)
    # As a plain array, which keeps the mapping: what is gathered from it is not of another class.
    return np.asarray(np.memmap(stream, dtype, mode, stream.tell(), shape))
