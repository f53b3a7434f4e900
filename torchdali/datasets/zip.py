"""Images in zip files, in folders of classes."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from torchdali.datasets.fields import IMAGE_SUFFIXES
from torchdali.datasets.index import Place
from torchdali.datasets.patterns import Pattern
from torchdali.datasets.sharded import ShardedDataset
from torchdali.datasets.shards import Bytes, ShardFile

__all__ = ["Zip"]

_LOCAL_HEADER = 30


class Zip(ShardedDataset):
    """Images in zip files that store them without compression, as ``zip -0`` writes them.

    Images come in the order of their folders and names. For one folder of each class, that is ``ImageFolder``'s order.

    Args:
        shards: The files: a path, a pattern such as ``"part-{0..7}.zip"`` or ``"*.zip"``, or several.
        label: ``"folder"``: the number of the image's folder among the sorted names of all folders. None: samples are
            images.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each target.
        index: The file of the index; None for a name beside the first shard. It is made if it does not exist.
        is_mapped: As for :class:`~torchdali.datasets.Tar`.
        remote: As for :class:`~torchdali.datasets.Tar`.

    Raises:
        ValueError: A shard is no zip file, has compressed images, or has changed since the index was made.
        OSError: A shard cannot be read, or the index cannot be written.
    """

    _kind = "Zip"

    def __init__(
        self,
        shards: Pattern,
        label: str | None = "folder",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
        is_mapped: bool | None = None,
        remote: Any = None,
    ) -> None:
        if label not in ("folder", None):
            raise ValueError(f"label must be 'folder' or None for a zip file, got {label!r}")
        super().__init__(shards, "", label, transform, target_transform, index, is_mapped, remote)

    def _scan(self, path: str) -> Iterator[Place]:
        with self._open_shard(path) as shard:
            places: list[Place] = []
            entries = _list_images(shard, path)
            for entry in sorted(entries, key=lambda entry: entry.header_offset):  # an object is read in this order
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                    raise ValueError(f"{path}: {entry.filename} is compressed or encrypted; pack it with zip -0")
                header = shard.read(entry.header_offset, _LOCAL_HEADER)
                if len(header) < _LOCAL_HEADER or header[:4] != b"PK\3\4":
                    raise ValueError(f"{path} is damaged: {entry.filename} has no header at {entry.header_offset:,}")
                # The local header's own lengths count: its extra field differs from the central directory's.
                names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                offset = entry.header_offset + _LOCAL_HEADER + names
                if offset + entry.file_size > shard.size:
                    raise ValueError(f"{path} is truncated: {entry.filename} ends after it")
                folder = posixpath.basename(posixpath.dirname(entry.filename))
                places.append(Place(entry.filename, offset, entry.file_size, labels=(folder,) if self.label else ()))
        yield from sorted(places, key=lambda place: posixpath.split(place.key))

    def _read_fields(self, data: Bytes, names: tuple[str, ...] | None) -> dict[str, Any]:
        return {}  # the index has all labels

    def _read_key(self, path: str, row: int) -> str:
        offset = int(self.index.offsets[row])
        with self._open_shard(path) as shard:
            before = [entry for entry in _list_images(shard, path) if entry.header_offset < offset]
        return max(before, key=lambda entry: entry.header_offset).filename if before else ""


class _Stream(io.RawIOBase):
    """A shard as a file that :mod:`zipfile` reads."""

    def __init__(self, shard: ShardFile) -> None:
        self._shard, self._at = shard, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._shard.size}[whence]
        if self._at < 0:
            raise OSError(errno.EINVAL, "negative position")
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._shard.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _list_images(shard: ShardFile, path: str) -> list[zipfile.ZipInfo]:
    try:
        with io.BufferedReader(_Stream(shard)) as stream, zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"{path} is no zip file, damaged or truncated ({error})") from error
    return [entry for entry in entries if _is_image(entry.filename)]


def _is_image(name: str) -> bool:
    # macOS adds a file ._x.jpg for x.jpg, in the folder __MACOSX. It has no pixels.
    return name.rpartition(".")[2].lower() in IMAGE_SUFFIXES and not posixpath.basename(name).startswith("._")
