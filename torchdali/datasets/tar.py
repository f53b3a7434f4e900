"""Samples in tar files, as webdataset writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchdali.datasets.base import Label
from torchdali.datasets.fields import IMAGE_SUFFIXES, decode_field, is_integer_part
from torchdali.datasets.index import Place
from torchdali.datasets.patterns import Pattern
from torchdali.datasets.sharded import Faults, ShardedDataset
from torchdali.datasets.shards import Bytes
from torchdali.datasets.wds2idx import Member, read_wds2idx
from torchdali.datasets.wids import read_shard_list
from torchdali.sources.remote import Client, make_client

__all__ = ["IMAGE_PARTS", "Tar", "read_members", "split_name"]

IMAGE_PARTS = ("jpg", "jpeg", "png", "webp")
"""The parts that are images, if the user names none."""

_BLOCK = 512
_WINDOW = 8192
"""Bytes that are read at once: the headers of small members beside each other come with one call."""
_FILES = (b"0", b"\0", b"7")
"""Types of regular files."""
_SKIPPED = (b"1", b"2", b"3", b"4", b"5", b"6", b"g", b"K")
"""Types without data of their own, or whose data does not matter: links, devices, folders and global headers."""


class Tar(ShardedDataset):
    """Samples in tar files, as webdataset writes them: members that lie beside each other and have one key.

    The key of a member is its path up to the first dot of its file name. The rest of the name is its part:
    ``dogs/0017.seg.png`` is the part ``seg.png`` of the sample ``dogs/0017``. Samples without an image are left out.

    A file ``.idx`` that DALI's ``wds2idx`` wrote beside a shard is used to make the index.

    Args:
        shards: The files: a path, a pattern such as ``"train-{000..146}.tar"`` or ``"train-*.tar"``, or several. A
            file ``.json`` is a list of shards, as ``widsindex`` writes it: files or objects, by their names relative to
            it. It may be an object too.
        image: The part that is the image; several are tried in this order.
        label: The target: a part such as ``"cls"``, a key of its JSON as ``"json:label"``, or the sample's key as
            ``"__key__"``. It may be a function of the dictionary of all parts other than the image, and the key. It may
            be several names: samples are then dictionaries with the image as ``"image"``. None: samples are images.
            ``cls``, ``index`` and ``id`` become integers, ``txt`` becomes text, ``json`` is parsed, ``npy`` and ``npz``
            become arrays, and images PIL images. Others are bytes.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each target.
        index: The file of the index; None for a name beside the first shard, or for objects in ``~/.cache/torchdali``.
            It is made if it does not exist.
        is_mapped: Whether to map shards into memory. If not, images are read into memory of their own. None maps shards
            unless one lies on a network file system: a mapped shard that another process truncates while a batch is
            read kills this process.
        remote: The store of shards such as ``s3://bucket/train-{000..146}.tar``: one of the package obstore, for its
            credentials and time-outs. None: the environment describes it.

    Raises:
        ValueError: A shard is no tar file, damaged, truncated, or has changed since the index was made.
        OSError: A shard cannot be read, or the index cannot be written.
    """

    _kind = "Tar"

    def __init__(
        self,
        shards: Pattern,
        image: str | Sequence[str] = IMAGE_PARTS,
        label: Label = "cls",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
        is_mapped: bool | None = None,
        remote: Any = None,
    ) -> None:
        self.image: tuple[str, ...] = (image,) if isinstance(image, str) else tuple(image)
        super().__init__(shards, f"image={self.image!r}", label, transform, target_transform, index, is_mapped, remote)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, by label: lines of ``classes.txt`` beside the shards, from ``torchdali pack``.

        It is empty without such a file, and if the label is another part than ``cls``.
        """
        file = Path(self._paths[0]).parent / "classes.txt"
        has_names = self.label == "cls" and self.client is None and file.exists()
        return file.read_text(encoding="utf-8").splitlines() if has_names else []

    def _find_shards(self, shards: Sequence[str | os.PathLike[str]], remote: Any) -> tuple[list[str], Client | None]:
        if len(shards) == 1 and str(shards[0]).endswith(".json"):
            names = read_shard_list(shards[0], remote)
            return names, make_client(names, remote, "shards")
        return super()._find_shards(shards, remote)

    def _scan(self, path: str) -> Iterator[Place]:
        with self._open_shard(path) as shard:
            window = _Window(shard.read)
            known = read_wds2idx(path, shard.status, window.read) if shard.status else None
            faults = Faults()
            for key, parts in _group(iter(known) if known else read_members(window.read, shard.size, path)):
                image = next((parts[name] for name in self.image if name in parts), None)
                if image is None:
                    with faults.keep():
                        self._check_has_no_image(path, key, parts)
                    continue
                labels: tuple[int | None, ...] = (None,) * len(self.parts)
                with faults.keep():
                    labels = tuple(self._read_label(path, key, parts, window, name) for name in self.parts)
                    faults.has_sound = True
                start = next(iter(parts.values())).header
                last = max(part.offset + part.length for part in parts.values())
                span = 0 if self.label is None else last - start
                yield Place(key, image.offset, image.length, start, span, labels)
            faults.check()

    def _check_has_no_image(self, path: str, key: str, parts: dict[str, Member]) -> None:
        others = [name for name in parts if name.rpartition(".")[2] in IMAGE_SUFFIXES]
        if others:
            raise ValueError(
                f"{path}: sample {key} has {', '.join(others)}, and image={self.image!r} names none of them; "
                "name the image's part"
            )

    def _read_label(self, path: str, key: str, parts: dict[str, Member], window: _Window, label: str) -> int | None:
        """Return a part of a sample that is a label, if it is an int, else None."""
        name, _, in_json = label.partition(":")
        if name == "__key__":
            return None
        part = parts.get(name)
        if isinstance(self.label, tuple) and (part is None or not (in_json or is_integer_part(name))):
            return None  # read when it is asked for
        if part is None:
            raise ValueError(f"{path}: sample {key} has no {name!r}, its label; it has {', '.join(parts)}")
        try:
            value = _decode(label, window.read(part.offset, part.length))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}: the {label} of sample {key} cannot be read ({error!r})") from error
        return value if type(value) is int and -(2**63) <= value < 2**63 else None

    def _read_fields(self, data: Bytes, names: tuple[str, ...] | None) -> dict[str, Any]:
        members = read_members(
            lambda offset, length: data[offset : offset + length].tobytes(), len(data), "a sample", False
        )
        key, parts = next(_group(members))
        if names is None:
            names = tuple(name for name in parts if name not in self.image)
            fields: dict[str, Any] = {"__key__": key}
        else:
            fields = {}
        for name in names:
            if name == "__key__":
                fields[name] = key
                continue
            part = parts[name.partition(":")[0]]
            fields[name] = _decode(name, data[part.offset : part.offset + part.length].tobytes())
        return fields

    def _read_key(self, path: str, row: int) -> str:
        with self._open_shard(path) as shard:
            header = shard.read(max(int(self.index.offsets[row]) - _BLOCK, 0), _BLOCK)
        return split_name(_read_name(header))[0]


class _Window:
    """Reads a file in pieces, and keeps the last piece."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read, self._start, self._data = read, 0, b""

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes; fewer where the file ends."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            self._data, self._start, begin = self._read(offset, max(length, _WINDOW)), offset, 0
        return self._data[begin : begin + length]


def read_members(read: Callable[[int, int], bytes], end: int, path: str, is_whole: bool = True) -> Iterator[Member]:
    """Yield the regular files of a tar, in their order.

    Args:
        read: Returns the bytes at an offset, of a length; fewer where the file ends.
        end: The length of the file.
        path: The file, for messages.
        is_whole: Whether it must end as a tar does. It need not if it is a part of one.

    Raises:
        ValueError: It is no tar, damaged, truncated, or has sparse files.
    """
    name = ""
    at, begin, long_name, long_size = 0, 0, "", -1
    while at + _BLOCK <= end:
        header = read(at, _BLOCK)
        if not header.strip(b"\0"):  # two blocks of zeros end a tar
            return
        if header[257:262] != b"ustar" and not _has_checksum(header):
            if header.startswith(_COMPRESSED):
                raise ValueError(f"{path} is compressed; unpack it, because its images are read in any order")
            raise ValueError(f"{path} is no tar file, or damaged: it has no header at byte {at:,}")
        size, kind = _read_size(header, path, at), header[156:157]
        data = at + _BLOCK
        if kind in (b"L", b"x"):
            content = read(data, size)
            if kind == b"L":  # GNU: the name of the next member
                long_name = content.rstrip(b"\0").decode(errors="surrogateescape")
            else:
                long_name, long_size = _read_pax(content, path, at, long_name)
        elif kind in _FILES:
            name, size = long_name or _read_name(header), size if long_size < 0 else long_size
            if data + size > end:
                raise ValueError(
                    f"{path} is truncated: {name} at byte {data:,} has {size:,} bytes, and {end - data:,} follow"
                )
            yield Member(name, data, size, begin)
            long_name, long_size = "", -1
        elif kind in _SKIPPED:
            size = size if kind in (b"g", b"K") else 0
            long_name, long_size = ("", -1) if kind not in (b"g", b"K") else (long_name, long_size)
        else:
            raise ValueError(
                f"{path} has a sparse file or another member of type {kind!r} at byte {at:,}; pack it again"
            )
        at = data + -(-size // _BLOCK) * _BLOCK
        if kind not in (b"L", b"x", b"K"):
            begin = at
    if is_whole and not end:
        raise ValueError(f"{path} is a file of 0 bytes, and no tar file")
    if is_whole:
        raise ValueError(f"{path} is truncated after {name!r}: the zeros that end a tar file are missing")


def _has_checksum(header: bytes) -> bool:
    """Return whether it is a header of a tar from before POSIX, which has no magic bytes."""
    text = header[148:156].strip(b"\0 ")
    return text.isdigit() and len(header) == _BLOCK and int(text, 8) == sum(header) - sum(header[148:156]) + 8 * 32


def _read_size(header: bytes, path: str, at: int) -> int:
    if header[124] & 0x80:  # GNU: a binary number, of files above 8 GiB
        return int.from_bytes(header[125:136], "big")
    try:
        return int(header[124:136].strip(b"\0 ") or b"0", 8)
    except ValueError as error:
        raise ValueError(f"{path} is no tar file, or damaged: the header at byte {at:,} has no length") from error


def _read_name(header: bytes) -> str:
    name = header[:100].rstrip(b"\0")
    prefix = header[345:500].rstrip(b"\0") if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode(errors="surrogateescape")


_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""How files of gzip, bzip2, xz and zstd begin."""
_PAX = re.compile(rb"(\d+) ([^=]+)=")


def _read_pax(content: bytes, path: str, at: int, name: str) -> tuple[str, int]:
    """Return the name and the length that an extended header gives the next member; "" and -1 where it does not."""
    offset, size = 0, -1
    while match := _PAX.match(content, offset):
        length, keyword = int(match[1]), match[2]
        value = content[match.end() : offset + length - 1]
        if keyword.startswith(b"GNU.sparse"):
            raise ValueError(f"{path} has a sparse file at byte {at:,}; pack it again")
        if keyword == b"path":
            name = value.decode(errors="surrogateescape")
        elif keyword == b"size" and value.isdigit():
            size = int(value)
        offset += max(length, 1)
    return name, size


def split_name(name: str) -> tuple[str, str]:
    """Return the key and the part of a member: its path up to the first dot of its file name, and the rest."""
    folder, slash, base = name.rpartition("/")
    stem, _, part = base.partition(".")
    return folder + slash + stem, part.lower()


def _group(members: Iterator[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """Yield the key and the parts of samples. Their members lie beside each other. Hidden files are no members."""
    key, parts = "", dict[str, Member]()
    for member in members:
        this, part = split_name(member.name)
        if not this or this.endswith("/"):  # such as the ._ files of macOS
            continue
        if this != key or part in parts:
            if parts:
                yield key, parts
            key, parts = this, {}
        parts[part] = member
    if parts:
        yield key, parts


def _decode(name: str, data: bytes) -> Any:
    """Return a part of a sample, or the value of a key if the part is JSON: ``json:label``."""
    part, _, key = name.partition(":")
    value = decode_field(part, data)
    return value[key] if key else value
