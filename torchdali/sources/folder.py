"""Image files on a disk: their paths as one matrix, and what is known of each file so far."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from torchdali.errors import SampleError
from torchdali.sources.header import Header, read_header
from torchdali.sources.scan import Scan
from torchdali.sources.source import LiftedSource, Source
from torchdali.spec import IntArray

__all__ = ["UNREADABLE", "FileSource", "FolderSource"]

UNREADABLE = (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError)
"""What PIL raises on files that are no image or a damaged one."""

_open: Callable[..., Any] = PIL.Image.open
_SHORTEST_ROW = 32  # room for the path of a file descriptor


class FileSource(Source):
    """Files, by their number.

    All paths lie in one matrix of bytes, padded with NUL, so that a batch's paths are one gather and one dense
    input of the graph. A file's header is read when its index first comes up; sizes are kept from then on.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        length = max(map(len, encoded), default=0) + 1
        length = max(length, _SHORTEST_ROW)
        rows = b"".join(path.ljust(length, b"\0") for path in encoded)
        self._matrix: npt.NDArray[np.uint8] = np.frombuffer(rows, np.uint8).reshape(len(encoded), length)
        self._size = np.zeros((len(encoded), 2), np.int32)
        self._native = np.zeros(len(encoded), np.bool_)
        self._jpeg = np.zeros(len(encoded), np.bool_)
        self._length = np.zeros(len(encoded), np.int64)
        self._whole = np.zeros(len(encoded), np.bool_)

    def learn(self, row: int, header: Header) -> None:
        """Takes what a file's header says."""
        self._native[row], self._jpeg[row] = header.native, header.jpeg
        self._length[row] = header.length
        self._size[row] = header.height, header.width

    def path(self, row: int) -> str:
        """The file of a sample."""
        return os.fsdecode(self._matrix[row].tobytes().rstrip(b"\0"))

    def name(self, row: int) -> str:
        return f"sample {row}, {self.path(row)}"

    def error(self, row: int, reason: str) -> SampleError:
        return SampleError(row, self.path(row), reason)

    def sizes(self, rows: IntArray) -> IntArray:
        return self._size[rows].astype(np.int64)

    def images(self, rows: IntArray, by_pil: IntArray, held: ExitStack) -> npt.NDArray[np.uint8]:
        """``(N, L)`` bytes: the paths of a batch, padded with NUL.

        Where PIL is to read a file, it is the path of a file in memory that has its pixels.
        """
        paths = self._matrix[rows]
        for place in by_pil.tolist():
            file = os.memfd_create("torchdali")
            held.callback(os.close, file)
            with os.fdopen(file, "wb", closefd=False) as stream:
                self.load(int(rows[place])).save(stream, format="PPM")
            name = f"/proc/self/fd/{file}".encode()
            paths[place] = 0
            paths[place, : len(name)] = np.frombuffer(name, np.uint8)
        return paths

    def scan(self, rows: IntArray, pool: Callable[[], ThreadPoolExecutor]) -> Scan:
        """Reads the headers of those files that are not known yet, in the threads of ``pool()``."""
        unknown = np.unique(rows[self._size[rows, 0] == 0])
        return Scan(unknown.tolist(), self._learn, pool)

    def foreign(self, rows: IntArray) -> IntArray:
        return np.flatnonzero(~self._native[rows])

    def changed(self, rows: IntArray, lengths: npt.NDArray[np.int32]) -> bool:
        """Whether a file of a batch has another length than when its header was read, so that its size may be wrong.

        Args:
            rows: ``(N,)`` the batch.
            lengths: ``(N, 1)`` bytes that were read of each file; of foreign files it is not looked at.
        """
        return bool((self._native[rows] & (self._length[rows] != lengths[:, 0])).any())

    def distrust(self, row: int) -> None:
        self._native[row] = False

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
        suspects = self._jpeg[rows] & self._native[rows] & ~self._whole[rows] & ~marked
        for row in rows[suspects].tolist():
            self.load(row)
            self._whole[row] = True

    def check(self, row: int) -> None:
        self.load(row)

    def load(self, row: int) -> PIL.Image.Image:
        """The image as torchvision's default loader reads it.

        Raises:
            SampleError: The file is missing, truncated or no image.
        """
        path = self.path(row)
        with self._blaming(row, "decoded"), _open(path) as image:
            return image.convert("RGB")

    def forget(self, rows: IntArray) -> IntArray:
        self._size[rows] = 0
        return rows

    def _learn(self, row: int) -> None:
        with self._blaming(row, "read as an image"):
            header = read_header(self.path(row))
        self.learn(row, header)

    @contextmanager
    def _blaming(self, row: int, what: str) -> Generator[None, None, None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self.error(row, "there is no such file") from error
        except UNREADABLE as error:
            raise self.error(row, f"it cannot be {what} ({error})") from error


class FolderSource(FileSource, LiftedSource):
    """Samples that are (file, target) pairs.

    Args:
        paths: The files.
        *about: As for :class:`LiftedSource`.
    """

    def __init__(self, paths: Sequence[str], *about: Any) -> None:
        FileSource.__init__(self, paths)
        LiftedSource.__init__(self, *about)
