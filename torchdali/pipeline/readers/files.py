"""The reader of image files on a disk, with a table of their headers."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.header_reader import FirstBytes, HeaderReader, HeaderValidator
from torchdali.pipeline.readers.memory_files import KeptFiles, MemoryFile
from torchdali.pipeline.readers.scan import Scan
from torchdali.samples.image import convert_to_rgb
from torchdali.samples.pil import PILHeader, read_pil_header
from torchdali.sources import UNREADABLE, Header, Source, read_file, read_header
from torchdali.sources.headers.batch import parse
from torchdali.sources.headers.header import max_pixels
from torchdali.sources.headers.metadata import has_late_metadata, turn_info
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.paths import Paths, build_table
from torchdali.transforms.spec import InputStats, IntArray

__all__ = ["FileReader"]

_open: Callable[..., Any] = PIL.Image.open
_Size = tuple[int, int]

_MAX_READ = 2**26
"""Bytes of files that are in memory at once for DALI to validate their headers."""


class FileReader(Reader):
    """Reads files. Their paths are one gather and one dense input of the pipeline.

    A file's header is read when its row is first requested, and stored.

    Args:
        source: The files.
        adjust_orientation: As for :class:`Reader`. The headers of an index do not tell orientations, and are not used.

    Attributes:
        table: The known headers.
    """

    opens_files = True

    def __init__(self, source: Source, adjust_orientation: bool = False) -> None:
        super().__init__(source, adjust_orientation)
        known = None if adjust_orientation else source.headers()
        self.table = known or HeaderTable(HeaderColumns.unknown(len(source)))
        self._header_reader, self._validator, self._kept = HeaderReader(), HeaderValidator(), KeptFiles()
        self._black: dict[int, _Size] = {}

    def __reduce__(self) -> tuple[type[FileReader], tuple[Source, bool]]:
        # Another process reads the headers again, because the table is as long as the dataset.
        return FileReader, (self.source, self.adjust_orientation)

    def paths(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        """Return ``(N, L)`` the paths of samples for DALI, padded with NUL."""
        paths = self._read_paths(rows)
        if (paths == ord(":")).any() and b"://" in paths.tobytes():  # DALI would open a URI, even of a network
            paths = _pad([os.path.abspath(path) for path in map(_unpad, paths)])  # noqa: PTH100 - resolve() follows links
        return paths

    def path(self, row: int) -> str:
        """Return the path of a sample's file."""
        return _unpad(self._read_paths(np.array([row]))[0])

    @contextmanager
    def _locate(self, row: int) -> Generator[str]:
        """Give the path of a sample's file, or of its copy, which stays open meanwhile."""
        copy = self._kept.get(row)
        yield os.fsdecode(copy.path) if copy else self.path(row)

    def _read_paths(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        paths: Any = self.read_rows(rows)
        return paths if hasattr(paths, "dtype") else _pad(paths)

    def _read_paths_as_bytes(self, rows: IntArray) -> list[bytes]:
        paths = np.ascontiguousarray(self._read_paths(rows))
        return paths.view(f"S{paths.shape[1]}").ravel().tolist()

    def share_headers(self, other: FileReader) -> bool:
        """Use the header table of another reader, if it has the same files and sizes. Return whether it has."""
        if self.adjust_orientation != other.adjust_orientation or not self.source.has_same_files(other.source):
            return False
        self.table = other.table
        return True

    def move_to(self, device: torch.device) -> None:
        """Validate headers on a device that decodes."""
        self._validator.device = device

    def validate_headers(self) -> bool:
        """Return whether headers are validated before DALI decodes any. See :class:`HeaderValidator`."""
        return self._validator.turn_on(has_read=not self.table.is_empty)  # headers of an index were not validated

    def sizes(self, rows: IntArray) -> IntArray:
        # Another batch, or a cache, may have forgotten some of them after the scan. This thread waits only for these.
        if len(unknown := self.table.find_unknown(rows)):
            self._read_each(unknown.tolist())
        return self.table.sizes(rows)

    def decode_with_pil(self, row: int) -> MemoryFile:
        image = self.load(row)
        if [image.height, image.width] != self.sizes(np.array([row]))[0].tolist():
            # The batch is then run again, and its headers are read again.
            raise RuntimeError(f"{self.path(row)} changed since its header was read")
        return MemoryFile.save(image)

    def read_inputs(
        self, rows: IntArray, pixels: Mapping[int, MemoryFile], resources: ExitStack
    ) -> npt.NDArray[np.uint8]:
        """Return ``(N, L)`` the paths of a batch, padded with NUL.

        For a file that PIL has decoded, it is the path of a file in memory with its pixels. For a file that was kept
        when its header was read, it is the path of its copy.
        """
        paths = self.paths(rows)
        copies = self._kept.take(rows)
        resources.enter_context(nullcontext(copies))  # which are thus open until the run is done
        for file in pixels.values():
            resources.callback(file.close)
        for position, file in {**copies, **pixels}.items():
            paths[position] = 0
            paths[position, : len(file.path)] = np.frombuffer(file.path, np.uint8)
        return paths

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Start to read the headers that are not known yet, in the threads of ``pool()``."""
        unknown = self.table.find_unknown(rows)
        if self.table.has_stamps or not len(unknown):
            return Scan(unknown.tolist(), self._read_each, pool)
        paths, learn = self._read_paths_as_bytes(unknown), partial(self._learn, unknown, self._kept, pool)
        return self._header_reader.scan(paths, learn, pool, self._kept, self.has_time_limit)

    def _learn(
        self, rows: IntArray, kept: KeptFiles, pool: Callable[[], Executor], first: FirstBytes, scan: Scan
    ) -> None:
        """Learn headers together from first bytes. Let a thread read one by one those that these do not tell."""
        for i, copy in first.copies.items():
            kept.add(int(rows[i]), copy)
        headers = parse(first.data, self.adjust_orientation)
        if self._black:
            headers.known[np.isin(rows, list(self._black))] = False
        if self._validator.is_on:
            headers.known[~headers.jpeg] = False  # DALI is asked about these, with all bytes of them
        self.table.update_many(rows, headers, first.lengths)
        if others := rows[~headers.known].tolist():
            scan.add(others, self._read_each, pool, chunk=len(others))

    def _read_each(self, rows: Sequence[int]) -> None:
        """Read headers one by one. Leave files that DALI refuses to PIL. It is not asked about JPEGs."""
        headers = {row: self._read_header(row) for row in rows}
        others = [row for row in rows if headers[row].native and not headers[row].jpeg]
        refused = self._find_refused(others, headers) if self._validator.is_on else set[int]()
        for row, header in headers.items():
            self.table.update(row, header._replace(native=header.native and row not in refused))

    def _find_refused(self, rows: Sequence[int], headers: Mapping[int, Header]) -> set[int]:
        """Return which files DALI refuses. It is given all bytes of them, few files at once."""
        refused, begin = set[int](), 0
        while begin < len(rows):
            end = begin + 1
            while end < len(rows) and sum(headers[row].length for row in rows[begin : end + 1]) <= _MAX_READ:
                end += 1
            files: list[npt.NDArray[np.uint8]] = []
            for row in rows[begin:end]:
                with self.blame(row, "read as an image"), self._locate(row) as path:
                    files.append(read_file(path)[0])
            refused.update(rows[begin + i] for i in self._validator.find_refused(files))
            begin = end
        return refused

    def read_header(self, row: int) -> None:
        """Read a file's header, and do not validate it.

        Raises:
            SampleError: The file is missing or no image.
        """
        self.table.update(row, self._read_header(row))

    def _read_header(self, row: int) -> Header:
        if black := self.black(row):
            return Header(black.height, black.width, 0, jpeg=False, native=False)
        with self.blame(row, "read as an image"), self._locate(row) as path:
            return read_header(path, self.adjust_orientation)

    def input_stats(self) -> InputStats:
        return InputStats(self.table.non_engine_share(), self._header_reader.wait, self._header_reader.is_on_network)

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
        is_rewritten = other.any() and (self.table.is_native(rows) & other).any()
        return bool(is_rewritten or (self.table.sizes(rows) != sizes).any())

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
        self._kept.take(rows)
        self.table.forget(rows)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._kept = KeptFiles()  # an epoch that ended early has left some, whose files may change

    def load(self, row: int) -> PIL.Image.Image:
        """Return the image as torchvision's default loader reads it, turned if ``adjust_orientation`` says so.

        Raises:
            SampleError: The file is missing, truncated or no image.
        """
        if black := self.black(row):
            return black
        with self.blame(row, "decoded"), self._locate(row) as path, _open(path) as image:
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
        self._kept = KeptFiles()
        self._validator.close()


def _pad(paths: Sequence[str | bytes]) -> npt.NDArray[np.uint8]:
    """Return ``(N, L)`` paths, each padded with at least one NUL."""
    return Paths([build_table(paths)]).gather(np.arange(len(paths)))


def _unpad(path: npt.NDArray[np.uint8]) -> str:
    return os.fsdecode(path.tobytes().rstrip(b"\0"))
