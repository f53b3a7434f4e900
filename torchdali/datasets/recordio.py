"""Images in MXNet's RecordIO files, as ``im2rec`` writes them.

The format: https://mxnet.apache.org/versions/1.9/architecture/note_data_loading and dmlc-core's ``recordio.h``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from torchdali.datasets.index import Place
from torchdali.datasets.patterns import Pattern
from torchdali.datasets.sharded import ShardedDataset
from torchdali.datasets.shards import Bytes, ShardFile
from torchdali.sources.places import Places, join
from torchdali.transforms.spec import IntArray

__all__ = ["RecordIO"]

_MAGIC = struct.pack("<I", 0xCED7230A)
_HEAD = 8
"""Bytes before a part of a record: the magic number, and the length. Its highest three bits are the kind of part."""
_LENGTH_BITS = 29
_WHOLE, _FIRST, _LAST = 0, 1, 3
_IMAGE_HEAD = struct.Struct("<IfQQ")
"""Number of labels, the label if that is 0, and two ids. The labels follow."""
_FACES = 2
"""Labels of a record without an image that describes a set of faces: the first and the last of its records."""


class RecordIO(ShardedDataset):
    """Images in RecordIO files, in the order of the file. They need no ``.idx`` file.

    Records without an image are left out. ``torchdali check`` names them, unless they have two labels: such records
    describe sets of faces.

    Args:
        shards: The files: a path, a pattern such as ``"train-*.rec"``, or several.
        label: ``"label"``: the record's label, an int if the labels of all records are whole numbers, else a float, or
            an array of several labels. None: samples are images.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each target.
        index: The file of the index; None for a name beside the first shard. It is made if it does not exist.
        is_mapped: As for :class:`~torchdali.datasets.Tar`.
        remote: As for :class:`~torchdali.datasets.Tar`.

    Attributes:
        left_out: The places of records that were left out when this object made the index, for messages.

    Raises:
        ValueError: A shard is no RecordIO file, truncated, or has changed since the index was made.
        OSError: A shard cannot be read, or the index cannot be written.
    """

    _kind = "RecordIO"

    def __init__(
        self,
        shards: Pattern,
        label: str | None = "label",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
        is_mapped: bool | None = None,
        remote: Any = None,
    ) -> None:
        if label not in ("label", None):
            raise ValueError(f"label must be 'label' or None for a RecordIO file, got {label!r}")
        self.left_out: list[str] = []
        content = "split records"  # an older index does not say which they are
        super().__init__(shards, content, label, transform, target_transform, index, is_mapped, remote)

    def _scan(self, path: str) -> Iterator[Place]:
        with self._open_shard(path) as shard:
            number, at = 0, 0
            while at < shard.size:
                end, is_whole = _find_end(shard, path, at)
                content = at + _HEAD
                data = shard.read(content, _IMAGE_HEAD.size) if is_whole else _join(shard.read(at, end - at))
                if len(data) < _IMAGE_HEAD.size:
                    raise ValueError(f"{path}: record {number} at byte {at:,} has no image header")
                count, label, _, _ = _IMAGE_HEAD.unpack_from(data)
                head = _IMAGE_HEAD.size + 4 * count
                length = end - content - head if is_whole else len(data) - head
                if length > 0:
                    whole = self.label is not None and count == 0 and float(label).is_integer()
                    place = (content + head, length) if is_whole else (at, end - at)
                    span = 0 if self.label is None else end - at
                    labels = () if self.label is None else (int(label) if whole else None,)
                    yield Place(f"record {number}", *place, at, span, labels, not is_whole)
                elif count != _FACES:
                    self.left_out.append(f"{path}, record {number} at byte {at:,}")
                number, at = number + 1, end + -end % 4

    def read(self, rows: IntArray) -> list[Bytes]:
        images = super().read(rows)
        split: list[int] = self.index.find_split(rows).tolist()
        for i in split:
            images[i] = _join_image(images[i])
        return images

    def find(self, rows: IntArray) -> Places:
        split = self.index.find_split(rows)
        if not len(split):
            return super().find(rows)
        whole = np.delete(np.arange(len(rows)), split)
        joined = dict(zip(split.tolist(), self.read(rows[split]), strict=True))
        return join(len(rows), [(whole, super().find(rows[whole]))], joined)

    def image_in(self, row: int, data: Bytes) -> Bytes:
        image = super().image_in(row, data)
        return _join_image(image) if len(self.index.find_split(np.array([row]))) else image

    def _read_fields(self, data: Bytes, names: tuple[str, ...] | None) -> dict[str, Any]:
        record = _join(data.tobytes())
        count, label, _, _ = _IMAGE_HEAD.unpack_from(record)
        labels = np.frombuffer(record, "<f4", count, _IMAGE_HEAD.size).astype(np.float32)
        return {"label": labels if count else label}


def _find_end(shard: ShardFile, path: str, at: int) -> tuple[int, bool]:
    """Return where a record ends, without its padding, and whether it is in one part.

    A record whose bytes contain the magic number is split there.
    """
    is_whole = False
    while True:
        head = shard.read(at, _HEAD)
        if head[:4] != _MAGIC or len(head) < _HEAD:
            raise ValueError(f"{path} is no RecordIO file, or damaged: it has no record at byte {at:,}")
        word = int.from_bytes(head[4:], "little")
        kind, length = word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)
        end = at + _HEAD + length
        if end > shard.size:
            raise ValueError(f"{path} is truncated: the record at byte {at:,} has {length:,} bytes")
        is_whole = kind == _WHOLE
        if kind in (_WHOLE, _LAST):
            return end, is_whole
        at = end + -end % 4


def _join(data: bytes) -> bytes:
    """Return the content of a record, of one part or several. The magic number between parts belongs to it."""
    parts: list[bytes] = []
    at = 0
    while at + _HEAD <= len(data):
        length = int.from_bytes(data[at + 4 : at + _HEAD], "little") & ((1 << _LENGTH_BITS) - 1)
        parts.append(data[at + _HEAD : at + _HEAD + length])
        at += _HEAD + length + -length % 4
    return _MAGIC.join(parts)


def _join_image(data: Bytes) -> Bytes:
    """Return the image of a record of several parts."""
    record = _join(data.tobytes())
    return np.frombuffer(record, np.uint8)[_IMAGE_HEAD.size + 4 * _IMAGE_HEAD.unpack_from(record)[0] :]
