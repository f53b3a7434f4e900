"""The reader of image files on a disk, with a table of their headers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.header_reader import HeaderError, HeaderReader
from torchdali.pipeline.readers.scan import Scan
from torchdali.samples.image import convert_to_rgb
from torchdali.samples.pil import PILHeader, read_pil_header
from torchdali.sources import UNREADABLE, Header, Source, read_header
from torchdali.sources.headers.batch import MIN_BATCH_READ, parse
from torchdali.sources.headers.header import max_pixels
from torchdali.sources.headers.metadata import has_late_metadata, turn_info
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.paths import Paths, build_table
from torchdali.transforms.spec import InputStats, IntArray

__all__ = ["FileReader"]

_open: Callable[..., Any] = PIL.Image.open
_Size = tuple[int, int]

_SAMPLE = 8
"""Number of files whose lengths are known before DALI reads many whole files for their first bytes."""
_LONG = 2**19
"""Mean length in bytes above which Python reads the first bytes of each file, because DALI can only read whole files.
Those take many times as long to decode."""
_MAX_READ = 2**28
"""Bytes of files that DALI reads at once to validate their headers."""


class FileReader(Reader):
    """Reads files. Their paths are one gather and one dense input of the pipeline.

    A file's header is read when its row is first requested, and stored.

    Args:
        source: The files.
        header_reader: Reads the first bytes of many files in DALI's threads. Without it files are read one by one.
        adjust_orientation: As for :class:`Reader`. The headers of an index do not tell orientations, and are not used.

    Attributes:
        table: The known headers.
    """

    _validates = False
    opens_files = True

    def __init__(
        self, source: Source, header_reader: HeaderReader | None = None, adjust_orientation: bool = False
    ) -> None:
        super().__init__(source, adjust_orientation)
        known = None if adjust_orientation else source.headers()
        self.table = known or HeaderTable(HeaderColumns.unknown(len(source)))
        self._header_reader = header_reader
        self._black: dict[int, _Size] = {}
        self._num_read = self._bytes_read = 0

    def __reduce__(self) -> tuple[type[FileReader], tuple[Source, HeaderReader | None, bool]]:
        # Another process reads the headers again, because the table is as long as the dataset.
        return FileReader, (self.source, self._header_reader, self.adjust_orientation)

    def paths(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        """Return ``(N, L)`` the paths of samples for DALI, padded with NUL."""
        paths = self._read_paths(rows)
        if (paths == ord(":")).any() and b"://" in paths.tobytes():  # DALI would open a URI, even of a network
            paths = _pad([os.path.abspath(path) for path in map(_unpad, paths)])  # noqa: PTH100 - resolve() follows links
        return paths

    def path(self, row: int) -> str:
        """Return the path of a sample's file."""
        return _unpad(self._read_paths(np.array([row]))[0])

    def _read_paths(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        paths: Any = self.read_rows(rows)
        return paths if hasattr(paths, "dtype") else _pad(paths)

    def share_headers(self, other: FileReader) -> bool:
        """Use the header table of another reader, if it has the same files and sizes. Return whether it has."""
        if self.adjust_orientation != other.adjust_orientation or not self.source.has_same_files(other.source):
            return False
        self.table = other.table
        return True

    def move_to(self, device: torch.device) -> None:
        """Validate headers on a device that decodes."""
        if self._header_reader:
            self._header_reader.device = device

    def validate_headers(self) -> bool:
        """Return whether DALI reads each header before it decodes any, and leaves the files that it refuses to PIL."""
        # It stays true, because iterators rely on it. DALI has not validated headers that come from an index.
        reader = self._header_reader
        self._validates = self._validates or bool(reader and reader.device.type == "cuda" and self.table.is_empty)
        return self._validates

    def sizes(self, rows: IntArray) -> IntArray:
        # Another batch, or a cache, may have forgotten some of them after the scan.
        if len(unknown := self.table.find_unknown(rows)):
            if self._validates:
                self._read_many(unknown)
            else:  # in this thread, so that it waits only for these files
                self._read_each(unknown.tolist())
        return self.table.sizes(rows)

    def decode_with_pil(self, row: int) -> MemoryFile:
        image = self.load(row)
        if [image.height, image.width] != self.sizes(np.array([row]))[0].tolist():
            # The batch is then run again, and its headers are read again.
            raise RuntimeError(f"{self.path(row)} changed since its header was read")
        return MemoryFile(image)

    def read_inputs(
        self, rows: IntArray, pixels: Mapping[int, MemoryFile], resources: ExitStack
    ) -> npt.NDArray[np.uint8]:
        """Return ``(N, L)`` the paths of a batch, padded with NUL.

        For a file that PIL has decoded, it is the path of a file in memory with its pixels.
        """
        paths = self.paths(rows)
        for position, file in pixels.items():
            resources.callback(file.close)
            paths[position] = 0
            paths[position, : len(file.path)] = np.frombuffer(file.path, np.uint8)
        return paths

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Start to read the headers that are not known yet, in the threads of ``pool()``."""
        unknown = self.table.find_unknown(rows)
        few = len(unknown) < (1 if self._validates else MIN_BATCH_READ)
        alone = (self.table.has_stamps or self._mean_length > _LONG) and not self._validates
        if few or alone or self._header_reader is None:
            return Scan(unknown.tolist(), self._read_each, pool)
        return Scan([0], lambda _: self._read_many(unknown), pool)

    def _read_many(self, rows: IntArray) -> None:
        """Read headers together; one by one if a black image takes a file's place.

        If there are few to validate, or DALI refuses one, Python looks first: a file for PIL, no file at all or a pipe
        needs no validation.
        """
        replaced = np.isin(rows, list(self._black))
        self._read_each(rows[replaced].tolist())
        rows = rows[~replaced]
        if not self._num_read:
            for row in rows[:_SAMPLE].tolist():
                self._is_native(row)
        together = len(rows) >= MIN_BATCH_READ and self._mean_length <= _LONG
        if not len(rows) or (together and self._read_together(rows)):
            return
        if self._validates:
            self._validate_by_halves(np.array([row for row in rows.tolist() if self._is_native(row)], np.int64))
        else:
            self._read_each(rows.tolist())

    def _validate_by_halves(self, rows: IntArray) -> None:
        """Find the files whose headers DALI refuses, and leave them to PIL."""
        too_long = len(rows) > 1 and len(rows) * self._mean_length > _MAX_READ
        if not len(rows) or (not too_long and self._read_together(rows, vetted=True)):
            return
        if len(rows) == 1:
            self.read_header(int(rows[0]), by_pil=True)
            return
        for half in np.array_split(rows, 2):
            self._validate_by_halves(half)

    def _read_together(self, rows: IntArray, vetted: bool = False) -> bool:
        """Return whether all headers could be read.

        Args:
            rows: The samples.
            vetted: Whether Python has found the files native, so that DALI may read any header. Else it reads those of
                JPEGs alone, and other files are vetted first.
        """
        assert self._header_reader is not None
        try:
            header_bytes, lengths = self._header_reader(self.paths(rows), self._validates, vetted)
        except HeaderError:
            return False
        except RuntimeError:  # there are no threads or no memory for the pipeline
            if self._validates:
                raise
            return False
        self._count_bytes(len(rows), int(lengths.view(np.uint32).sum()))
        headers = parse(header_bytes, self.adjust_orientation)
        to_vet = self._validates and not vetted
        if to_vet:
            headers.known[~headers.jpeg] = False
        if not self.table.has_stamps:
            self.table.update_many(rows, headers, lengths)
        self._read_each(self.table.find_unknown(rows[headers.known] if to_vet else rows).tolist())
        if to_vet:
            unknown = self.table.find_unknown(rows).tolist()
            self._validate_by_halves(np.array([row for row in unknown if self._is_native(row)], np.int64))
        return True

    def _read_each(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.read_header(row)

    def _is_native(self, row: int) -> bool:
        """Return whether DALI decodes a file as PIL does, as far as Python tells; learn the header of one for PIL."""
        with self.blame(row, "read as an image"):
            header = read_header(self.path(row), self.adjust_orientation)
        self._count_bytes(1, header.length)
        if not header.native:
            self.table.update(row, header)
        return header.native

    def _count_bytes(self, count: int, length: int) -> None:
        self._num_read += count
        self._bytes_read += length

    @property
    def _mean_length(self) -> float:
        """Mean length of the files whose headers were read; 0 if there are none."""
        return self._bytes_read / max(self._num_read, 1)

    def read_header(self, row: int, by_pil: bool = False) -> None:
        """Read a file's header.

        Args:
            row: Its sample.
            by_pil: Whether PIL must decode the file, whatever its header says.

        Raises:
            SampleError: The file is missing or no image.
        """
        if black := self.black(row):
            self.table.update(row, Header(black.height, black.width, 0, jpeg=False, native=False))
            return
        with self.blame(row, "read as an image"):
            header = read_header(self.path(row), self.adjust_orientation)
        self._count_bytes(1, header.length)
        self.table.update(row, header._replace(native=header.native and not by_pil))

    def abandon(self) -> None:
        if self._header_reader:
            self._header_reader.abandon()

    def input_stats(self) -> InputStats:
        return InputStats(self.table.non_engine_share(), self._header_reader.wait if self._header_reader else 0.0)

    def file_bytes(self, rows: IntArray) -> IntArray:
        return self.table.lengths(rows)

    def find_pil_only(self, rows: IntArray) -> IntArray:
        too_large = self.table.sizes(rows).prod(axis=1) > max_pixels()  # an index may have such sizes
        return np.flatnonzero(~self.table.is_native(rows) | too_large)

    def mark_pil_only(self, row: int) -> None:
        self.table.mark_pil_only(row)

    def has_changed(self, rows: IntArray, lengths: npt.NDArray[np.int32], sizes: IntArray) -> bool:
        # The lengths of files for PIL are those of files in memory. Another batch may have read a header again.
        other = self.table.has_other_length(rows, np.ascontiguousarray(lengths[:, 0]))
        return bool((self.table.is_native(rows) & other).any() or (self.table.sizes(rows) != sizes).any())

    def check_endings(self, rows: IntArray, endings: npt.NDArray[np.uint8]) -> None:
        """Raise SampleError if a JPEG ends before its image does.

        A GPU's JPEG engine fills the missing part with grey, and reports no error. A file that ends in an end-of-image
        marker is complete. Some others have bytes after their image, so PIL reads each of those once.
        """
        marked = (endings[:, 0] == 0xFF) & (endings[:, 1] == 0xD9)
        suspects = self.table.find_possibly_truncated(rows) & ~marked
        for row in rows[suspects].tolist():
            self.load(row)
            self.table.mark_complete(row)

    def check(self, row: int) -> None:
        self.load(row)

    def forget(self, rows: IntArray) -> None:
        self.table.forget(rows)

    def load(self, row: int) -> PIL.Image.Image:
        """Return the image as torchvision's default loader reads it, turned if ``adjust_orientation`` says so.

        Raises:
            SampleError: The file is missing, truncated or no image.
        """
        if black := self.black(row):
            return black
        path = self.path(row)
        with self.blame(row, "decoded"), _open(path) as image:
            return convert_to_rgb(image, self.adjust_orientation)

    def pil_header(self, row: int) -> PILHeader | None:
        if row in self._black:
            return None
        try:
            with _open(self.path(row)) as image:
                if has_late_metadata(image):
                    image.load()
                header = read_pil_header(image, converted=True)
                return header._replace(info=turn_info("RGB", header.info)) if self.adjust_orientation else header
        except UNREADABLE:
            return None

    def substitute_black(self, row: int, size: _Size) -> None:
        self._black[row] = size
        self.read_header(row)

    def restore(self, row: int) -> None:
        if self._black.pop(row, None):
            self.table.forget(np.array([row]))

    def black(self, row: int) -> PIL.Image.Image | None:
        """Return the black image that takes a sample's place, or None."""
        if row not in self._black:
            return None
        height, width = self._black[row]
        return PIL.Image.new("RGB", (width, height))

    def close(self) -> None:
        if self._header_reader:
            self._header_reader.close()


class MemoryFile:
    """A file in memory with the pixels of an image, until it is closed.

    Attributes:
        path: Its path, for this process.
    """

    _file: int | None = None

    def __init__(self, image: PIL.Image.Image) -> None:
        self._file = file = os.memfd_create("torchdali")
        with os.fdopen(file, "wb", closefd=False) as stream:
            image.save(stream, format="PPM")
        self.path = f"/proc/self/fd/{file}".encode()

    def close(self) -> None:
        """Close the file, and free its memory."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.close()


def _pad(paths: Sequence[str | bytes]) -> npt.NDArray[np.uint8]:
    """Return ``(N, L)`` paths, each padded with at least one NUL."""
    return Paths([build_table(paths)]).gather(np.arange(len(paths)))


def _unpad(path: npt.NDArray[np.uint8]) -> str:
    return os.fsdecode(path.tobytes().rstrip(b"\0"))
