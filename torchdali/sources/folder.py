"""Image files on a disk: their paths as one matrix, and what is known of each file so far."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from torchdali.errors import SampleError
from torchdali.sources.headers.batch import MANY, HeaderError, ReadHeaders, parse
from torchdali.sources.headers.header import Header, most_pixels, read_header
from torchdali.sources.headers.scan import Scan
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.paths import Paths, table_of
from torchdali.sources.source import NativeSource, Source
from torchdali.transforms.spec import InputStats, IntArray

__all__ = ["UNREADABLE", "FileSource", "FolderSource", "words_of"]

UNREADABLE = (
    *(OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError),
    *(RuntimeError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error),
)
"""What PIL raises on files that are no image or a damaged one."""


def words_of(error: BaseException) -> str:
    """What an exception of ``UNREADABLE`` says, but for the name of the file, or where in memory it was."""
    return "cannot identify image file" if isinstance(error, PIL.UnidentifiedImageError) else str(error)


_open: Callable[..., Any] = PIL.Image.open
_Size = tuple[int, int]


class FileSource(Source):
    """Files, by their number.

    A batch's paths are one gather and one dense input of the graph. A file's header is read when its index first comes
    up, and kept from then on.

    Args:
        paths: The files.
        facts: What is known of them; nothing by default.

    Attributes:
        read_headers: Reads the first bytes of many files; None where there is nothing faster than one by one.
    """

    read_headers: ReadHeaders | None = None
    _vets = False

    def __init__(self, paths: Sequence[str] | Paths, facts: HeaderTable | None = None) -> None:
        self._paths = paths if isinstance(paths, Paths) else Paths([table_of(paths)])
        self._facts = facts or HeaderTable(HeaderColumns.unknown(len(self._paths)))
        self._black: dict[int, _Size] = {}

    def learn(self, row: int, header: Header) -> None:
        """Takes what a file's header says."""
        self._facts.learn(row, header)

    def path(self, row: int) -> str:
        """The file of a sample."""
        return self._paths[row]

    def paths(self, rows: IntArray) -> list[bytes]:
        """The files of samples, as the system takes them."""
        paths = self._paths.gather(rows)
        chosen: npt.NDArray[np.bytes_] = paths.view(f"S{paths.shape[1]}")
        return chosen[:, 0].tolist()  # without the padding

    def keep_modified(self) -> None:
        """From now on :meth:`stamps` are known of all files whose headers are."""
        self._facts.keep_modified()

    def stamps(self, rows: IntArray) -> IntArray:
        """``(N, 2)`` lengths and times of modification that the files had when their headers were read."""
        return self._facts.stamps(rows)

    def learn_from(self, other: FileSource) -> bool:
        """Takes over what is known of the same files, and what will be; False where the files are others."""
        if not self._paths.same(other._paths):
            return False
        self._facts = other._facts
        return True

    def name(self, row: int) -> str:
        return f"sample {row}, {self.path(row)}"

    def error(self, row: int, reason: str) -> SampleError:
        return SampleError(row, self.path(row), reason)

    def sizes(self, rows: IntArray) -> IntArray:
        # Another batch, or a cache, may have forgotten some since they were scanned.
        if len(unknown := self._facts.unknown(rows)):
            if self._vets:
                self._read_many(unknown)
            else:  # here, where nobody else's file is waited for
                self._read_each(unknown.tolist())
        return self._facts.sizes(rows)

    def images(self, rows: IntArray, by_pil: IntArray, held: ExitStack) -> npt.NDArray[np.uint8]:
        """``(N, L)`` bytes: the paths of a batch, padded with NUL.

        Where PIL is to read a file, it is the path of a file in memory that has its pixels.
        """
        paths = self._paths.gather(rows)
        for place in by_pil.tolist():
            image = self.load(int(rows[place]))
            if [image.height, image.width] != self.sizes(rows[place : place + 1])[0].tolist():
                # The batch is then run again, with headers read anew.
                raise RuntimeError(f"{self.path(int(rows[place]))} changed since its header was read")
            file = os.memfd_create("torchdali")
            held.callback(os.close, file)
            with os.fdopen(file, "wb", closefd=False) as stream:
                image.save(stream, format="PPM")
            name = f"/proc/self/fd/{file}".encode()
            paths[place] = 0
            paths[place, : len(name)] = np.frombuffer(name, np.uint8)
        return paths

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Reads the headers of those files that are not known yet, in the threads of ``pool()``."""
        unknown = self._facts.unknown(rows)
        few = len(unknown) < (1 if self._vets else MANY)
        if few or self.read_headers is None or (self._facts.keeps_modified and not self._vets):
            return Scan(unknown.tolist(), self._read_each, pool)
        return Scan([0], lambda _: self._read_many(unknown), pool)

    def _read_many(self, rows: IntArray) -> None:
        """Reads headers together; one by one those of files that were replaced, as these say something else.

        Where few are to be vetted, or DALI does not read them all, Python looks first: what is for PIL, no file or a
        pipe need not be vetted.
        """
        replaced = np.isin(rows, list(self._black))
        self._read_each(rows[replaced].tolist())
        rows = rows[~replaced]
        if not len(rows) or (len(rows) >= MANY and self._read_together(rows)):
            return
        if self._vets:
            self._validate_headers(np.array([row for row in rows.tolist() if self._is_native(row)], np.int64))
        else:
            self._read_each(rows.tolist())

    def _validate_headers(self, rows: IntArray) -> None:
        """Reads headers by halves where DALI refuses some, which are for PIL then."""
        if not len(rows) or self._read_together(rows):
            return
        if len(rows) == 1:
            self.read(int(rows[0]), by_pil=True)
            return
        for half in np.array_split(rows, 2):
            self._validate_headers(half)

    def _read_together(self, rows: IntArray) -> bool:
        """Whether all headers could be read."""
        assert self.read_headers is not None
        try:
            heads, lengths = self.read_headers(self._paths.gather(rows), self._vets)
        except HeaderError:
            return False
        except RuntimeError:  # there are no threads, or no memory, for it
            if self._vets:
                raise
            return False
        if not self._facts.keeps_modified:
            self._facts.learn_many(rows, parse(heads), lengths)
        self._read_each(self._facts.unknown(rows).tolist())
        return True

    def _read_each(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.read(row)

    def _is_native(self, row: int) -> bool:
        """Whether DALI decodes a file as PIL does, as far as Python tells; learns the header of one that is for PIL."""
        with self.blaming(row, "read as an image"):
            header = read_header(self.path(row))
        if not header.native:
            self.learn(row, header)
        return header.native

    def leave(self) -> None:
        if self.read_headers:
            self.read_headers.abandon()

    def seen(self) -> InputStats:
        return InputStats(self._facts.beside_engine(), self.read_headers.wait if self.read_headers else 0.0)

    def file_bytes(self, rows: IntArray) -> int:
        return self._facts.bytes_of(rows)

    def foreign(self, rows: IntArray) -> IntArray:
        too_large = self._facts.sizes(rows).prod(axis=1) > most_pixels()  # as an index may say
        return np.flatnonzero(~self._facts.native(rows) | too_large)

    def changed(self, rows: IntArray, lengths: npt.NDArray[np.int32], sizes: IntArray) -> bool:
        """Whether a file of a batch has another length or size than when its parameters were drawn.

        Args:
            rows: ``(N,)`` the batch.
            lengths: ``(N, 1)`` bytes that were read of each file; of foreign files it is not looked at.
            sizes: ``(N, 2)`` heights and widths that its parameters were drawn for. Another batch may have found out
                meanwhile that a file is another one.
        """
        other = self._facts.of_other_length(rows, np.ascontiguousarray(lengths[:, 0]))
        return bool((self._facts.native(rows) & other).any() or (self._facts.sizes(rows) != sizes).any())

    def mark_pil_only(self, row: int) -> None:
        self._facts.mark_pil_only(row)

    def check_endings(self, rows: IntArray, endings: npt.NDArray[np.uint8]) -> None:
        """Finds JPEGs that end before their image does.

        The JPEG engine fills what is missing with grey and says nothing. A file that ends in an end-of-image marker
        is taken for whole; of the others some have bytes after their image, which PIL reads once to be sure.

        Args:
            rows: ``(N,)`` the batch.
            endings: ``(N, 2)`` the last two bytes that were read of each file.

        Raises:
            SampleError: A file is truncated.
        """
        marked = (endings[:, 0] == 0xFF) & (endings[:, 1] == 0xD9)
        suspects = self._facts.may_be_cut(rows) & ~marked
        for row in rows[suspects].tolist():
            self.load(row)
            self._facts.whole(row)

    def check(self, row: int) -> None:
        self.load(row)

    def size_of(self, row: int) -> _Size | None:
        with suppress(SampleError):
            return super().size_of(row)
        return None

    def replace(self, row: int, size: _Size) -> None:
        self._black[row] = size
        self.read(row)

    def black(self, row: int) -> PIL.Image.Image | None:
        """The image that stands for a sample that was replaced."""
        if row not in self._black:
            return None
        height, width = self._black[row]
        return PIL.Image.new("RGB", (width, height))

    def load(self, row: int) -> PIL.Image.Image:
        """The image as torchvision's default loader reads it.

        Raises:
            SampleError: The file is missing, truncated or no image.
        """
        if black := self.black(row):
            return black
        path = self.path(row)
        with self.blaming(row, "decoded"), _open(path) as image:
            return image.convert("RGB")

    def forget(self, rows: IntArray) -> None:
        self._facts.forget(rows)

    def read(self, row: int, by_pil: bool = False) -> None:
        """Reads a file's header.

        Args:
            row: Its sample.
            by_pil: Whether PIL is to decode the file, whatever its header says.

        Raises:
            SampleError: The file is missing or no image.
        """
        if black := self.black(row):
            self.learn(row, Header(black.height, black.width, 0, jpeg=False, native=False))
            return
        with self.blaming(row, "read as an image"):
            header = read_header(self.path(row))
        self.learn(row, header._replace(native=header.native and not by_pil))

    def blaming(self, row: int, what: str) -> _Blaming:
        """A context that makes a SampleError of what reading a file raises; ``what`` it cannot be then."""
        return _Blaming(self, row, what)


class _Blaming:
    """See :meth:`FileSource.blaming`.

    No generator: what ``contextlib`` throws into one that raises something else is held by its own traceback, in a
    cycle, from Python 3.12 on. With it would be the epoch that was under way.
    """

    def __init__(self, source: FileSource, row: int, what: str) -> None:
        self._source, self._row, self._what = source, row, what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, FileNotFoundError):
            raise self._source.error(self._row, "there is no such file") from error
        # A TimeoutError is the storage's, or of a signal handler that bounds a step: no fault of the file.
        if isinstance(error, UNREADABLE) and not isinstance(error, TimeoutError):
            raise self._source.error(self._row, f"it cannot be {self._what} ({words_of(error)})") from error


class FolderSource(FileSource, NativeSource):
    """Samples that are (file, target) pairs.

    Args:
        paths: The files.
        facts: What is known of them.
        *about: As for :class:`NativeSource`.
    """

    def __init__(self, paths: Paths, facts: HeaderTable, *about: Any) -> None:
        FileSource.__init__(self, paths, facts)
        NativeSource.__init__(self, *about)

    def validate_headers(self, device: torch.device) -> bool:
        # Once begun it goes on, for the sake of iterators that rely on it; and some headers may have been read before.
        self._vets = self._vets or (device.type == "cuda" and self._facts.nothing)
        return self._vets

    def close(self) -> None:
        if self.read_headers:
            self.read_headers.close()
