"""Images in LMDB files. Their pages are read as they are, so that the package ``lmdb`` is not needed.

The format: https://github.com/LMDB/lmdb/blob/mdb.RE/0.9/libraries/liblmdb/mdb.c, "Page Format".
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchdali.datasets.fields import decode_field, is_integer_part
from torchdali.datasets.index import Place
from torchdali.datasets.patterns import Pattern
from torchdali.datasets.sharded import ShardedDataset
from torchdali.datasets.shards import Bytes, open_shard
from torchdali.sources.remote import Client, is_uri

__all__ = ["LMDB"]

_PAGE_HEAD = struct.Struct("<QHHHH")
"""Number, pad, flags, and where free space begins and ends."""
_META = struct.Struct("<IIQQ")
"""Magic number, version, address, size."""
_TREE = struct.Struct("<IHHQQQQQ")
"""Pad, flags, depth, three counts of pages, number of entries, root page."""
_NODE = struct.Struct("<HHHH")
"""Low and high half of the length, or of the page, flags, length of the key."""
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF = 1, 2
_BIG, _SUBTREE = 1, 2
_NO_PAGE = 2**64 - 1
_DEEPEST = 64


class _Value(NamedTuple):
    """A key, and where its value is."""

    key: bytes
    offset: int
    length: int


class LMDB(ShardedDataset):
    """Images in an LMDB, in the order of keys. LSUN's databases are such. Nothing may write to it meanwhile.

    Args:
        path: The database: its folder or its file, or several of them.
        image: The keys of images: a name with one ``*``, such as ``"image-*"``.
        label: The key of an image's target: a name with the ``*`` of the image's key in it, such as ``"label-*"``. The
            target is text, or what the name's suffix says, as for ``Tar``: ``"*.cls"`` is an int. None: samples are
            images.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each target.
        index: The file of the index; None for a name beside the first database. It is made if it does not exist.
        is_mapped: As for :class:`~torchdali.datasets.Tar`.

    Raises:
        ValueError: A file is no LMDB of version 0.9, or it has changed since the index was made.
        OSError: A file cannot be read, or the index cannot be written.
    """

    _kind = "LMDB"

    def __init__(
        self,
        path: Pattern,
        image: str = "*",
        label: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
        is_mapped: bool | None = None,
    ) -> None:
        named: dict[str, Any] = {"image": image} if label is None else {"image": image, "label": label}
        for argument, name in named.items():
            if not isinstance(name, str) or name.count("*") != 1:
                raise ValueError(f"{argument} must be a name of keys with one '*', got {name!r}")
        self.image = image
        super().__init__(path, f"image={image!r}", label, transform, target_transform, index, is_mapped)

    def _find_shards(self, shards: Sequence[str | os.PathLike[str]], remote: Any) -> tuple[list[str], Client | None]:
        if any(map(is_uri, shards)):
            raise ValueError(f"an LMDB must be a file, got {shards[0]}; copy it to a disk")
        paths, _ = super()._find_shards(shards, remote)
        return [str(Path(path, "data.mdb")) if Path(path).is_dir() else path for path in paths], None

    def _scan(self, path: str) -> Iterator[Place]:
        values = _list_values(path)
        before, after = (part.encode() for part in self.image.split("*"))
        labels = {value.key: value for value in values} if isinstance(self.label, str) else {}
        for key, offset, length in values:
            if not (key.startswith(before) and key.endswith(after) and len(key) >= len(before) + len(after)):
                continue
            name = key.decode(errors="backslashreplace")
            if not isinstance(self.label, str):
                yield Place(name, offset, length)
                continue
            label_key = self.label.encode().replace(b"*", key[len(before) : len(key) - len(after)])
            if label_key not in labels:
                raise ValueError(f"{path}: key {name} has no label: there is no key {label_key!r}")
            _, start, span = labels[label_key]
            yield Place(name, offset, length, start, span, (self._read_label(path, label_key, start, span),))

    def _read_label(self, path: str, key: bytes, start: int, span: int) -> int | None:
        if not is_integer_part(str(self.label)):
            return None
        with Path(path).open("rb") as stream:
            stream.seek(start)
            data = stream.read(span)
        try:
            return int(data)
        except ValueError as error:
            raise ValueError(f"{path}: the value of key {key!r} must be an int, got {data!r:.40}") from error

    def _read_fields(self, data: Bytes, names: tuple[str, ...] | None) -> dict[str, Any]:
        assert isinstance(self.label, str)
        value = decode_field(self.label, data.tobytes())
        return {self.label: value.decode() if isinstance(value, bytes) else value}

    def _read_key(self, path: str, row: int) -> str:
        offset = int(self.index.offsets[row])
        return next(
            (value.key.decode(errors="backslashreplace") for value in _list_values(path) if value.offset == offset), ""
        )


def _list_values(path: str) -> list[_Value]:
    """Return the keys and places of all values, in the order of keys."""
    file, status = open_shard(path)
    try:
        tree = _Tree(file, status.st_size, path)
        return list(tree.walk(tree.root, 0)) if tree.root != _NO_PAGE else []
    except (struct.error, IndexError) as error:
        raise ValueError(f"{path} is damaged: a page of its tree cannot be read ({error})") from error
    finally:
        os.close(file)


class _Tree:
    """The main tree of a database."""

    def __init__(self, file: int, size: int, path: str) -> None:
        self._file, self._size, self._path = file, size, path
        self._page = 4096
        self.root = _NO_PAGE
        newest = -1
        first = self._read_meta(0)
        for root, transaction in (first, self._read_meta(self._page)):
            if transaction > newest:
                newest, self.root = transaction, root

    def _read_meta(self, offset: int) -> tuple[int, int]:
        """Return the root and the transaction of one of the two first pages; the newer one counts."""
        data = os.pread(self._file, 200, offset)
        magic, version, _, _ = _META.unpack_from(data, _PAGE_HEAD.size)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"{self._path} is no LMDB file of version 0.9")
        trees = _PAGE_HEAD.size + _META.size
        self._page = _TREE.unpack_from(data, trees)[0]
        root = _TREE.unpack_from(data, trees + _TREE.size)[-1]
        return root, struct.unpack_from("<Q", data, trees + 2 * _TREE.size + 8)[0]

    def walk(self, number: int, depth: int) -> Iterator[_Value]:
        """Yield the values under a page."""
        data = os.pread(self._file, self._page, number * self._page)
        _, _, flags, lower, _ = _PAGE_HEAD.unpack_from(data)
        if depth > _DEEPEST or not flags & (_BRANCH | _LEAF):
            raise ValueError(f"{self._path} is damaged: page {number} is no page of a tree")
        for at in struct.unpack_from(f"<{(lower - _PAGE_HEAD.size) // 2}H", data, _PAGE_HEAD.size):
            low, high, node_flags, key_length = _NODE.unpack_from(data, at)
            if flags & _BRANCH:
                yield from self.walk(low | high << 16 | node_flags << 32, depth + 1)
                continue
            begin, length = at + _NODE.size, low | high << 16
            key = data[begin : begin + key_length]
            offset = number * self._page + begin + key_length
            if node_flags & _SUBTREE:  # a database of its own name, or several values of one key
                continue
            if node_flags & _BIG:
                offset = struct.unpack_from("<Q", data, begin + key_length)[0] * self._page + _PAGE_HEAD.size
            if offset + length > self._size:
                raise ValueError(f"{self._path} is truncated: the value of {key!r} ends after it")
            yield _Value(key, offset, length)
