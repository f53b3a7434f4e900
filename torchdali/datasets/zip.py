"""Images in zip files, in folders of classes."""

from __future__ import annotations

import os
import posixpath
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from torchdali.datasets.fields import IMAGE_SUFFIXES
from torchdali.datasets.index import Place
from torchdali.datasets.patterns import Pattern
from torchdali.datasets.sharded import ShardedDataset
from torchdali.datasets.shards import Bytes
from torchdali.sources import open_file

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

    Attributes:
        classes: The names of the folders, by label.

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
        is_mapped: bool = True,
    ) -> None:
        if label not in ("folder", None):
            raise ValueError(f"label must be 'folder' or None for a zip file, got {label!r}")
        super().__init__(shards, "", label, transform, target_transform, index, is_mapped)

    def _scan(self, path: str) -> Iterator[Place]:
        file, status = open_file(path)
        try:
            for entry in sorted(_list_images(path), key=lambda entry: posixpath.split(entry.filename)):
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                    raise ValueError(f"{path}: {entry.filename} is compressed or encrypted; pack it with zip -0")
                header = os.pread(file, _LOCAL_HEADER, entry.header_offset)
                if len(header) < _LOCAL_HEADER or header[:4] != b"PK\3\4":
                    raise ValueError(f"{path} is damaged: {entry.filename} has no header at {entry.header_offset:,}")
                # The local header's own lengths count: its extra field differs from the central directory's.
                names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                offset = entry.header_offset + _LOCAL_HEADER + names
                if offset + entry.file_size > status.st_size:
                    raise ValueError(f"{path} is truncated: {entry.filename} ends after it")
                folder = posixpath.basename(posixpath.dirname(entry.filename))
                yield Place(entry.filename, offset, entry.file_size, labels=(folder,) if self.label else ())
        finally:
            os.close(file)

    def _read_fields(self, data: Bytes, names: tuple[str, ...] | None) -> dict[str, Any]:
        return {}  # the index has all labels

    def _read_key(self, path: str, row: int) -> str:
        offset = int(self.index.offsets[row])
        before = [entry for entry in _list_images(path) if entry.header_offset < offset]
        return max(before, key=lambda entry: entry.header_offset).filename if before else ""


def _list_images(path: str) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"{path} is no zip file, damaged or truncated ({error})") from error
    return [entry for entry in entries if entry.filename.rpartition(".")[2].lower() in IMAGE_SUFFIXES]
