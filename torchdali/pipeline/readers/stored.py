"""Image files within larger files, or objects of stores, that do not change: their headers are read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import numpy as np

from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.encoded import Bytes, EncodedBatch, EncodedReader
from torchdali.pipeline.readers.scan import Scan
from torchdali.samples.image import decode_to_ppm
from torchdali.samples.on_error import TargetError
from torchdali.sources import HEADER_BYTES, Header, Source, is_system_fault, parse_header
from torchdali.sources.headers.batch import parse
from torchdali.sources.headers.table import HeaderTable
from torchdali.sources.places import Places, join
from torchdali.transforms.spec import InputStats, IntArray

__all__ = ["StoredReader"]

_CHUNK = 64
"""Number of files that a thread reads in a row. Their headers are parsed together."""


class StoredReader(EncodedReader):
    """Reads a source that gives the bytes of image files, which are the same each time.

    Args:
        source: The samples.
        table: What is known of their headers.
    """

    def __init__(self, source: Source, table: HeaderTable) -> None:
        super().__init__(source)
        self.table, self.gives_places = table, source.has_places

    def __reduce__(self) -> tuple[type[StoredReader], tuple[Source, HeaderTable | None]]:
        # Another process reads the headers again, because the table is as long as the dataset.
        return StoredReader, (self.source, self.source.headers())

    def open_batch(self) -> Reader:
        return _StoredBatch(self)

    def read_files(self, rows: IntArray) -> list[Bytes]:
        """Return the files of some rows. Their headers are known then.

        Raises:
            SampleError: One of them cannot be read, is no image, or is truncated.
        """
        files: list[Bytes] = self._read_contents(rows)
        if not all(type(data) is np.ndarray for data in files):
            files = [np.frombuffer(data, np.uint8) for data in files]
        if len(unknown := np.flatnonzero(self.table.is_unknown(rows))):
            self._read_headers(rows[unknown], [files[int(i)] for i in unknown])
        suspects: list[int] = np.flatnonzero(self.table.find_possibly_truncated(rows)).tolist()
        for i in suspects:
            row = int(rows[i])
            self.check_complete(row, files[i])
            self.table.mark_complete(row)
        return files

    def find_places(self, rows: IntArray, others: Mapping[int, Bytes]) -> Places:
        """Return where the files of some rows lie. By position, ``others`` take the place of some.

        Raises:
            SampleError: One of them cannot be read.
        """
        if not others:
            return self.read_rows(rows, self.source.find)
        own = np.delete(np.arange(len(rows)), list(others))
        return join(len(rows), [(own, self.read_rows(rows[own], self.source.find))], others)

    def find_black(self, rows: IntArray) -> dict[int, Bytes]:
        """Return the black images that take the place of some rows, by row."""
        return {row: self._black[row] for row in rows.tolist() if row in self._black} if self._black else {}

    def find_touched(self, rows: IntArray) -> IntArray:
        """Return the rows whose bytes are read here, and not by DALI alone: of those with known headers very few."""
        if not self.gives_places:
            return rows
        table = self.table
        return rows[table.is_unknown(rows) | table.find_possibly_truncated(rows) | ~table.is_native(rows)]

    def _read_contents(self, rows: IntArray) -> list[Any]:
        """Return the bytes of files. A black image may take a file's place."""
        black, numbers = self.find_black(rows), rows.tolist()
        if not black:
            return self.read_rows(rows)
        contents = iter(self.read_rows(np.array([row for row in numbers if row not in black], np.int64)))
        return [black[row] if row in black else next(contents) for row in numbers]

    def _read_headers(self, rows: IntArray, files: Sequence[Bytes]) -> None:
        starts = np.zeros((len(rows), HEADER_BYTES), np.uint8)
        for start, data in zip(starts, files, strict=True):
            start[: len(data)] = data[:HEADER_BYTES]
        lengths = np.array([len(data) & 0xFFFFFFFF for data in files], np.uint32)
        headers = parse(starts)
        if self._validator.is_on:
            headers.known[~headers.jpeg] = False  # DALI is asked about these, with all bytes of them
        self.table.update_many(rows, headers, lengths)
        others: list[int] = np.flatnonzero(~headers.known).tolist()
        found = self.validate([(files[i], self._parse_header(int(rows[i]), files[i])) for i in others])
        for i, (_, header) in zip(others, found, strict=True):
            self.table.update(int(rows[i]), header)

    def _parse_header(self, row: int, file: Bytes) -> Header:
        with self.blame(row, "decoded"):
            header = parse_header(file.data)
        if self.gives_places and header.native and file[8:12].tobytes() == b"WEBP":
            with self.blame(row, "decoded"):  # DALI decodes a damaged one, to what follows it in the shard
                decode_to_ppm(file)
        if not header.native and self.source.loses_bits(row):
            raise self.error(row, "it has more than 8 bits, and RGB has 8; give the loader images=, its column")
        return header

    def validate_headers(self) -> bool:
        if self.source.is_remote:  # a store may have a changed object; nothing but DALI's operators finds that out
            return False
        return self._validator.turn_on(has_read=not self.table.is_empty)

    def needs_threads(self, rows: IntArray) -> bool:
        """Return whether reading takes long: headers are not known, bytes are not mapped, or targets are read."""
        if not self.source.is_mapped or self.source.read_parts(rows[:0]) is not None:
            return True
        return bool(self.table.is_unknown(rows).any() or self.table.find_possibly_truncated(rows).any())

    def sizes(self, rows: IntArray) -> IntArray:
        if len(unknown := self.table.find_unknown(rows)):
            self.read_files(unknown)
        return self.table.sizes(rows)

    def find_pil_only(self, rows: IntArray) -> IntArray:
        return np.flatnonzero(~self.table.is_native(rows))

    def mark_pil_only(self, row: int) -> None:
        self.table.mark_pil_only(row)

    def substitute_black(self, row: int, size: tuple[int, int]) -> None:
        super().substitute_black(row, size)
        self.table.update(row, Header(*size, len(self._black[row]), jpeg=False, native=True))

    def restore(self, row: int) -> None:
        if row in self._black:
            super().restore(row)
            self.table.forget(np.array([row]))

    def input_stats(self) -> InputStats:
        return InputStats(self.table.non_engine_share())


class _StoredBatch(EncodedBatch):
    """The files of one batch, in memory. Their headers are in the table of their reader."""

    def __init__(self, owner: StoredReader) -> None:
        super().__init__(owner, owner.load)
        self._stored = owner
        self._parts: dict[int, Any] = {}
        self._unread: set[int] = set()
        self._found: tuple[IntArray, Places] | None = None
        self._black: dict[int, Bytes] = {}

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Start to read the files, in the threads of ``pool()``; here if they are mapped and have been read before."""
        if self._stored.needs_threads(rows):
            return Scan(np.unique(rows).tolist(), self._read, pool, _CHUNK)
        self._read(rows.tolist())
        if self._stored.gives_places and not self._stored.find_black(rows):
            self._found = rows, self._stored.find_places(rows, {})  # now, because it also lets a disk read ahead
        return Scan([], self._read, pool)

    def _read(self, rows: Sequence[int]) -> None:
        index = np.array(rows, np.int64)
        self._load_files(self._stored.find_touched(index))
        try:
            self._parts.update(zip(rows, self.source.read_parts(index) or (), strict=False))
        except Exception:  # noqa: BLE001 - targets() reads each again, and raises it in the sample's turn
            self._unread.update(rows)

    def _load_files(self, rows: IntArray) -> None:
        if len(rows):
            self._files.update(zip(rows.tolist(), self._stored.read_files(rows), strict=True))

    def decode_with_pil(self, row: int) -> Bytes:
        if row not in self._files:
            self._load_files(np.array([row], np.int64))
        return super().decode_with_pil(row)

    def check(self, row: int) -> None:
        self.decode_with_pil(row)

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Bytes], resources: ExitStack) -> Any:
        if not self._stored.gives_places:
            return super().read_inputs(rows, pixels, resources)
        black = self._black and {i: self._black[row] for i, row in enumerate(rows.tolist()) if row in self._black}
        others = {**black, **pixels}
        if self._found and not others and np.array_equal(rows, self._found[0]):
            return self._found[1]
        return self._stored.find_places(rows, others)

    def file_bytes(self, rows: IntArray) -> IntArray:
        """Return ``(N,)`` the bytes of the files that DALI copies."""
        return self._stored.table.lengths(rows) if self._stored.gives_places else super().file_bytes(rows)

    def target(self, row: int) -> Any:
        if row not in self._parts:
            return self.source.target(row)
        return self.source.make_target(self._parts.pop(row))  # a sample that comes twice has two targets

    def targets(self, rows: IntArray) -> None:
        """Read again what targets are made of, where that failed before.

        Raises:
            TargetError: It cannot be read.
        """
        for row in [row for row in dict.fromkeys(rows.tolist()) if row in self._unread]:
            try:
                self._parts.update(zip([row], self.source.read_parts(np.array([row], np.int64)) or (), strict=False))
            except Exception as error:
                if is_system_fault(error):
                    raise
                raise TargetError(row, self.source.name(row), f"its target cannot be read ({error})") from error
        self._unread.clear()

    def sizes(self, rows: IntArray) -> IntArray:
        self._black = self._stored.find_black(rows)  # another epoch may try the rows again before these are fed
        return self._stored.sizes(rows)

    def find_pil_only(self, rows: IntArray) -> IntArray:
        return self._stored.find_pil_only(rows)
