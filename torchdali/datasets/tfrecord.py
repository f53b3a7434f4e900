"""Images in TFRecord files of ``tf.train.Example``, read without TensorFlow.

The formats: https://www.tensorflow.org/tutorials/load_data/tfrecord and https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from torchdali.datasets.base import Label
from torchdali.datasets.index import Place
from torchdali.datasets.patterns import Pattern
from torchdali.datasets.sharded import Faults, ShardedDataset
from torchdali.datasets.shards import Bytes

__all__ = ["TFRecord"]

_HEAD, _TAIL = 12, 4
"""Bytes before a record, its length and a checksum of that, and after it, a checksum."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types."""
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
"""Field numbers of ``tf.train.Feature``."""

_Field = tuple[int, int, int, int]
"""Field number, wire type, and where its content begins and ends."""


class TFRecord(ShardedDataset):
    """Images in TFRecord files, which hold one ``tf.train.Example`` a record.

    Args:
        shards: The files: a path, a pattern such as ``"train-*"``, or several.
        image: The feature that is the image file.
        label: The target: a feature; a function of the dictionary of all features other than the image; or several
            names: samples then are dictionaries with the image as ``"image"``. None: samples are images. A feature of
            one number is an int or a float, one of several numbers an array, and one of bytes is ``bytes``, or a list
            of them.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each target.
        index: The file of the index; None for a name beside the first shard. It is made if it does not exist.
        is_mapped: As for :class:`~torchdali.datasets.Tar`.
        remote: As for :class:`~torchdali.datasets.Tar`.

    Raises:
        ValueError: A shard is no TFRecord file, compressed, truncated, or has changed since the index was made.
        OSError: A shard cannot be read, or the index cannot be written.
    """

    _kind = "TFRecord"

    def __init__(
        self,
        shards: Pattern,
        image: str = "image/encoded",
        label: Label = "image/class/label",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
        is_mapped: bool | None = None,
        remote: Any = None,
    ) -> None:
        self.image = image
        super().__init__(shards, f"image={image!r}", label, transform, target_transform, index, is_mapped, remote)

    def _scan(self, path: str) -> Iterator[Place]:
        with self._open_shard(path) as shard:
            number, at, faults = 0, 0, Faults()
            while at < shard.size:
                head = shard.read(at, _HEAD)
                length = int.from_bytes(head[:8], "little")
                if at + _HEAD + length + _TAIL > shard.size:
                    raise ValueError(
                        f"{path} is truncated, compressed or no TFRecord file: record {number} at byte {at:,} has "
                        f"{length:,} bytes"
                    )
                yield self._find_place(path, number, at + _HEAD, shard.read(at + _HEAD, length), faults)
                number, at = number + 1, at + _HEAD + length + _TAIL
            faults.check()

    def _find_place(self, path: str, number: int, start: int, data: bytes, faults: Faults) -> Place:
        view, where = memoryview(data), f"{path}: record {number} at byte {start:,}"
        features: dict[str, tuple[int, int]] = {}
        try:
            features = _find_features(view)
            begin, end = _find_bytes(view, *features[self.image])
            values = [_decode_feature(view, *features[name]) if name in features else None for name in self.parts]
        except KeyError:
            _check_features(where, (self.image,), features)
            raise
        except (ValueError, IndexError) as error:
            raise ValueError(f"{where} is no tf.train.Example ({error})") from error
        with faults.keep():
            _check_features(where, self.parts, features)
            faults.has_sound = True
        span = 0 if self.label is None else len(data)
        labels = tuple(value if type(value) is int else None for value in values)
        return Place(f"record {number}", start + begin, end - begin, start, span, labels)

    def _read_fields(self, data: Bytes, names: tuple[str, ...] | None) -> dict[str, Any]:
        view = memoryview(cast("Any", data))
        features = _find_features(view)
        names = tuple(name for name in features if name != self.image) if names is None else names
        return {name: _decode_feature(view, *features[name]) for name in names}


def _check_features(where: str, names: Iterable[str], features: Mapping[str, Any]) -> None:
    for name in names:
        if name not in features:
            raise ValueError(f"{where} has no feature {name!r}; it has {', '.join(features)}")


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _read_fields(data: memoryview, at: int, end: int) -> Iterator[_Field]:
    """Yield the fields of a message."""
    while at < end:
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _BYTES:
            length, at = _read_varint(data, at)
            stop = at + length
        elif kind == _VARINT:
            stop = _read_varint(data, at)[1]
        elif kind in (_FIXED64, _FIXED32):
            stop = at + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"it has a field of wire type {kind}")
        if stop > end:
            raise ValueError("a field ends after its message")
        yield number, kind, at, stop
        at = stop


def _find_features(data: memoryview) -> dict[str, tuple[int, int]]:
    """Return where the features of an Example are, by name: Example.features.feature is a map of entries."""
    features: dict[str, tuple[int, int]] = {}
    for _, _, start, end in _read_fields(data, 0, len(data)):
        for _, _, entry, entry_end in _read_fields(data, start, end):
            parts = {number: (begin, stop) for number, _, begin, stop in _read_fields(data, entry, entry_end)}
            begin, stop = parts.get(1, (0, 0))
            features[bytes(data[begin:stop]).decode()] = parts.get(2, (0, 0))
    return features


def _find_values(data: memoryview, start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the kind of a feature, and where its values are. Packed numbers are one piece."""
    for kind, _, begin, stop in _read_fields(data, start, end):
        return kind, [(a, b) for _, _, a, b in _read_fields(data, begin, stop)]
    return _BYTES_LIST, []


def _find_bytes(data: memoryview, start: int, end: int) -> tuple[int, int]:
    """Return where the bytes of a feature of one value are."""
    kind, places = _find_values(data, start, end)
    if kind != _BYTES_LIST or len(places) != 1:
        raise ValueError("its image is not one value of bytes")
    return places[0]


def _decode_feature(data: memoryview, start: int, end: int) -> Any:
    kind, places = _find_values(data, start, end)
    if kind == _BYTES_LIST:
        values = [bytes(data[a:b]) for a, b in places]
        return values[0] if len(values) == 1 else values
    if kind == _FLOAT_LIST:
        floats = np.frombuffer(b"".join(data[a:b] for a, b in places), "<f4")
        return float(floats[0]) if len(floats) == 1 else floats.astype(np.float32)
    numbers: list[int] = []
    for at, stop in places:
        while at < stop:
            number, at = _read_varint(data, at)
            numbers.append(number - 2**64 if number >> 63 else number)
    return numbers[0] if len(numbers) == 1 else np.array(numbers, np.int64)
