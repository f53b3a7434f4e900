"""The headers of plain RGB images as BMP, PPM and TIFF: those whose pixels DALI and PIL read alike.

Each accepted header is a common one, and all of its pixels lie within the file. Nothing is compressed. DALI 2.4 reports
no error for a BMP that ends too early, or for damage in a compressed TIFF. We know no issue about either. So all others
are left to PIL.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Literal, NamedTuple

__all__ = ["parse_plain"]

_Read = Callable[[int], bytes]
_Size = tuple[int, int]
_Order = Literal["little", "big"]

_BMP = struct.Struct("<2sIIIIiiHHII")
_BMP_HEADERS = (40, 108, 124)
"""Bytes of the headers of Windows 3, 4 and 5."""
_BMP_FILE_HEADER = 14

_PNM = re.compile(rb"P([56])\n(?:#[^\r\n]*\n)*([1-9][0-9]{0,4})[ \n]([1-9][0-9]{0,4})\n255\n")

_TIFF_ORDERS: dict[bytes, _Order] = {b"II*\0": "little", b"MM\0*": "big"}
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 7: 1}
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_OFFSETS, _SAMPLES, _ROWS, _COUNTS = 273, 277, 278, 279
_DEFAULTS = {254: 0, 266: 1, 274: 1, 284: 1}
"""A whole image, bits in their order, not turned, and the channels of a pixel side by side."""
_REQUIRED = _DEFAULTS | {_COMPRESSION: 1, _PHOTOMETRIC: 2, _SAMPLES: 3}
_NUMBERS = _REQUIRED.keys() | {_WIDTH, _HEIGHT, _ROWS}
"""Tags with one number."""
_FORMAT = 339
_ARRAYS = {_BITS, _OFFSETS, _COUNTS, _FORMAT}
"""Tags with one number for each channel or strip."""
_TEXTS = {270, 271, 272, 282, 283, 285, 296, 297, 305, 306, 315, 316, 33432, 34675}
"""Tags without influence on pixels: texts, resolution and the colour profile."""
_MAX_STRIPS = 4096


def parse_plain(read: _Read, start: bytes, length: int) -> _Size | None:
    """Return height and width of a plain image; None if it is another one.

    Args:
        read: Returns some bytes from an offset on.
        start: The first bytes.
        length: Bytes of the file.
    """
    if start.startswith(b"BM"):
        return _parse_bmp(start, length)
    if start.startswith((b"P5", b"P6")):
        return _parse_pnm(start, length)
    if order := _TIFF_ORDERS.get(start[:4]):
        return _Tiff(read, length, order).parse()
    return None


def _parse_bmp(start: bytes, length: int) -> _Size | None:
    if len(start) < _BMP.size:
        return None
    _, _, _, offset, size, width, height, planes, bits, compression, _ = _BMP.unpack_from(start)
    colours = start[46:50]
    is_plain = size in _BMP_HEADERS and offset == _BMP_FILE_HEADER + size and planes == 1 and bits == 24
    if not is_plain or compression or any(colours) or not (0 < width < 2**16 and 0 < abs(height) < 2**16):
        return None
    stride = (3 * width + 3) // 4 * 4  # a height below 0 means that the first row comes first
    return (abs(height), width) if offset + stride * abs(height) <= length else None


def _parse_pnm(start: bytes, length: int) -> _Size | None:
    found = _PNM.match(start)
    if not found:
        return None
    channels = 3 if found[1] == b"6" else 1
    width, height = int(found[2]), int(found[3])
    return (height, width) if found.end() + channels * width * height <= length else None


class _Field(NamedTuple):
    """A field of a directory (TIFF 6.0, section 2): the type and number of its values, and its last four bytes."""

    kind: int
    number: int
    value: bytes


class _Tiff:
    """A TIFF file of one image (TIFF 6.0). Its pixels are in strips."""

    def __init__(self, read: _Read, length: int, order: _Order) -> None:
        self._read, self._length = read, length
        self._order: _Order = order
        self._fields: dict[int, _Field] = {}

    def parse(self) -> _Size | None:
        """Return height and width, or None if the image is not plain."""
        if not self._read_fields():
            return None
        numbers = _DEFAULTS | {_ROWS: 2**32 - 1}
        numbers |= {tag: self._get_numbers(tag)[0] for tag in _NUMBERS & self._fields.keys()}
        is_plain = (
            numbers.keys() == _NUMBERS
            and all(numbers[tag] == number for tag, number in _REQUIRED.items())
            and self._get_numbers(_BITS) == [8, 8, 8]
            and self._get_numbers(_FORMAT) in ([], [1, 1, 1])
        )
        if not is_plain:
            return None
        height, width, rows = numbers[_HEIGHT], numbers[_WIDTH], numbers[_ROWS]
        is_valid = 0 < width < 2**16 and 0 < height < 2**16 and rows and self._has_strips(width, height, rows)
        return (height, width) if is_valid else None

    def _read_fields(self) -> bool:
        """Return whether the file has one directory, and no field that means something else."""
        start = self._to_int(self._read(4)[:4])
        directory = self._read(start) if 8 <= start < self._length else b""
        count = self._to_int(directory[:2])
        end = 2 + 12 * count
        if not count or end + 4 > len(directory) or any(directory[end : end + 4]):
            return False
        tags = list[int]()
        for i in range(2, end, 12):
            tag, kind = self._to_int(directory[i : i + 2]), self._to_int(directory[i + 2 : i + 4])
            field = _Field(kind, self._to_int(directory[i + 4 : i + 8]), directory[i + 8 : i + 12])
            size = field.number * _TYPE_BYTES.get(kind, self._length)
            if not field.number or (size > 4 and self._to_int(field.value) + size > self._length):
                return False
            if tag not in _TEXTS and (kind not in (3, 4) or (tag not in _ARRAYS and field.number > 1)):
                return False
            tags.append(tag)
            self._fields[tag] = field
        # Other fields are for PIL: XMP data may turn an image, tiles and further channels are read in other ways.
        return tags == sorted(self._fields) and self._fields.keys() <= _NUMBERS | _ARRAYS | _TEXTS

    def _get_numbers(self, tag: int) -> list[int]:
        """Return the numbers of a field; none if there is no such field."""
        if tag not in self._fields:
            return []
        kind, count, value = self._fields[tag]
        width = _TYPE_BYTES[kind]
        data = value if width * count <= 4 else self._read_all(self._to_int(value), width * count)
        return [self._to_int(data[i : i + width]) for i in range(0, width * count, width)]

    def _read_all(self, start: int, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._read(start + len(data))):
            data += more
        return data

    def _has_strips(self, width: int, height: int, rows: int) -> bool:
        """Return whether all strips lie within the file, and have the length of their pixels."""
        number = -(-height // rows)
        fields = self._fields.get(_OFFSETS), self._fields.get(_COUNTS)
        if number > _MAX_STRIPS or any(field is None or field.number != number for field in fields):
            return False
        for i, (offset, count) in enumerate(zip(self._get_numbers(_OFFSETS), self._get_numbers(_COUNTS), strict=True)):
            if offset < 8 or offset + count > self._length or count != 3 * width * min(rows, height - i * rows):
                return False
        return True

    def _to_int(self, data: bytes) -> int:
        return int.from_bytes(data, self._order)
