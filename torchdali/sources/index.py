"""A dataset whose paths and labels are in one file. All processes of a machine share one mapping of it."""

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
from torchdali.sources.paths import Table, read_samples, shrink_to_int32, to_int64

__all__ = ["ImageIndex", "map_arrays"]

_Name = str | os.PathLike[str]

_SCAN_THREADS = 16
_CHUNK = 256


class ImageIndex(Dataset[tuple[Any, Any]]):
    """Image files and their labels, like an ``ImageFolder``, from a file that :meth:`write` made.

    ``ImageFolder`` keeps a list, which takes 1.9 GB in each process for ten million files. An index is mapped into
    memory. It opens in milliseconds at any length, and all processes of a machine share one copy. ``DataLoader``
    treats it like an ``ImageFolder``. ``DALILoader`` reads it without a copy.

    ``numpy.savez(file, paths=..., labels=..., classes=...)`` writes such a file, too. ``paths`` has a type ``S``,
    ``labels`` are integers, and ``classes`` are names, which are optional. To replace an index, rename another file to
    its name, as :meth:`write` does. Processes that have the old file open then continue to read the old file.

    Args:
        file: The index.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each label.

    Attributes:
        paths: ``(N,)`` the paths, as bytes (:func:`os.fsdecode` turns one into a string). Read-only.
        targets: ``(N,)`` the labels. Read-only.
        classes: The names of the classes, by label; empty if the index has none.
        class_to_idx: The label of each class name.

    Raises:
        ValueError: The file is no index, or it is compressed and cannot be mapped.
        OSError: The file cannot be read.
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
        arrays, self._opened = map_arrays(self.file, "r")
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
        """Return the headers of the files. The mapping is copy-on-write: writing to it does not change the file."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        opened = None
        if self.has_headers:
            with suppress(OSError, ValueError):
                arrays, opened = map_arrays(self.file, "c")
        if opened != self._opened:  # the file has been replaced since
            return HeaderColumns.unknown(len(self))
        return HeaderColumns(*(arrays[name] for name in HeaderColumns._fields))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return the image and the label, each transformed. The image is opened as ``ImageFolder`` opens it."""
        image: Any = pil_loader(os.fsdecode(self.paths[index]))
        target: Any = int(self.targets[index])
        return (
            self.transform(image) if self.transform else image,
            self.target_transform(target) if self.target_transform else target,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.file)!r}, {len(self):,} files)"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the arrays out. Another process maps the file itself."""
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
        """Write an index. The file appears under its name only when it is complete.

        Args:
            file: The file to write.
            samples: Pairs of a file and its label, in the order of the dataset; or a folder of class folders, which is
                read as ``ImageFolder`` reads it.
            classes: The names of the labels, if ``samples`` is no folder.
            headers: Whether to store the header of each file. Reading one takes about 30 us. No epoch then has to read
                headers. Processes share them, which otherwise take nine bytes a file in each process. A file that
                cannot be read still raises when its sample is loaded. A file with another length is read again.

        Raises:
            TypeError: A label is no int of 64 bits, or ``classes`` is no list of names.
            ValueError: A label has no name in ``classes``; or ``classes`` is given although ``samples`` is a folder.
        """
        if isinstance(samples, (str, os.PathLike)):
            if classes is not None:
                raise ValueError("the classes of a folder are the folders in it: give classes= with pairs only")
            classes, samples = _list_folder(str(Path(samples).expanduser()))
        paths, labels = read_samples(samples)
        if not isinstance(labels, np.ndarray):
            # Columns of tables, such as pandas', give numpy's integers.
            values = [cast("Any", label).item() if isinstance(label, np.integer) else label for label in labels]
            numbers = to_int64(values)
            if numbers is None:
                row = next(row for row, label in enumerate(values) if to_int64([label]) is None)
                raise TypeError(f"the label of {os.fsdecode(paths[row])} is no int of 64 bits: {labels[row]!r}")
            labels = shrink_to_int32(numbers)
        if isinstance(classes, str) or not all(isinstance(name, str) for name in classes or ()):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"classes is a list of names, not {classes!r}")
        names = np.array(classes or [], np.str_)
        if len(names) and len(unnamed := np.flatnonzero((labels < 0) | (labels >= len(names)))):
            row = int(unnamed[0])
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


def _list_folder(folder: str) -> tuple[list[str], Iterator[tuple[str, int]]]:
    classes, labels = find_classes(folder)
    # Each class is listed on its own. One list of all files would take the memory that an index saves.
    parts = (make_dataset(folder, {name: labels[name]}, IMG_EXTENSIONS) for name in classes)
    return classes, chain.from_iterable(parts)


def _read_headers(paths: Table) -> HeaderColumns:
    table = HeaderTable(HeaderColumns.unknown(len(paths)))

    def read(start: int) -> None:
        for row in range(start, min(start + _CHUNK, len(paths))):
            with suppress(*UNREADABLE):  # the header stays unknown, and loading the sample raises
                table.update(row, read_header(os.fsdecode(paths[row])))

    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        for _ in pool.map(read, range(0, len(paths), _CHUNK)):
            pass
    return table.columns


def _has_headers(arrays: dict[str, npt.NDArray[Any]], file: Path, count: int) -> bool:
    """Return whether an index has headers; raise ValueError if their arrays have another type or shape."""
    expected = HeaderColumns.unknown(0)
    if any(name not in arrays or len(arrays[name]) != count for name in expected._fields):
        return False
    for name, column in expected._asdict().items():
        if (arrays[name].dtype, arrays[name].shape[1:]) != (column.dtype, column.shape[1:]):
            shape = (count, *column.shape[1:])
            raise ValueError(
                f"{file} is no index: its array '{name}' must be {column.dtype} of the shape {shape}, "
                f"got {arrays[name].dtype} of {arrays[name].shape}"
            )
    return True


def map_arrays(file: Path, mode: Literal["r", "c"]) -> tuple[dict[str, npt.NDArray[Any]], object]:
    """Map the arrays of an uncompressed ``.npz``. Return them, and the identity of the file.

    ``numpy.load`` ignores ``mmap_mode`` for an ``.npz``.
    """
    arrays: dict[str, npt.NDArray[Any] | None] = {}
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            status = os.fstat(stream.fileno())
            entries = archive.infolist()
            compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            for entry in () if compressed else entries:
                stream.seek(entry.header_offset)
                name, extra = struct.unpack("<26xHH", stream.read(30))
                stream.seek(name + extra, os.SEEK_CUR)
                arrays[entry.filename.removesuffix(".npy")] = _map_array(stream, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:  # in a damaged file, a seek to a negative offset raises EINVAL
            raise
        raise ValueError(f"{file} is no index, which is a file that ImageIndex.write or numpy.savez made") from error
    except Exception as error:  # zipfile, struct and numpy raise nearly any exception for damaged bytes
        raise ValueError(f"{file} is no index, which is a file that ImageIndex.write or numpy.savez made") from error
    if compressed:
        raise ValueError(f"{file} is compressed, so it cannot be mapped; write it with numpy.savez")
    mapped = {name: array for name, array in arrays.items() if array is not None}
    if len(mapped) < len(arrays):
        raise ValueError(f"{file} is no index: it has an array of Python objects, or in Fortran's order")
    return mapped, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _map_array(stream: BinaryIO, mode: Literal["r", "c"]) -> npt.NDArray[Any] | None:
    """Map one array. Return None for an array of Python objects, or in Fortran's order."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject or fortran:
        return None
    if 0 in shape or not dtype.itemsize:
        return np.empty(shape, dtype)
    # A plain array keeps the mapping alive. Indexing an np.memmap would return another np.memmap.
    return np.asarray(np.memmap(stream, dtype, mode, stream.tell(), shape))
