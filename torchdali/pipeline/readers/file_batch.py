"""The files of one batch, each read once: what tells the header is what DALI decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.pipeline.readers.base import Reader, decode_in_threads
from torchdali.pipeline.readers.scan import Scan
from torchdali.samples.image import decode_to_ppm
from torchdali.sources import Header
from torchdali.sources.headers.batch import MIN_BATCH_READ
from torchdali.transforms.spec import InputStats, IntArray

__all__ = ["FileBatch", "HeldFiles"]

_CHUNK = 4
"""Number of files that a thread reads in a row, of a batch that is too small to be read by DALI."""


class HeldFiles:
    """Files in memory, by row, and what their headers say. Several threads may add files at once.

    The table of all headers does not serve for them: another batch may find another file in a file's place.

    Args:
        room: Maximum number of bytes.

    Attributes:
        room: Bytes that are left.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._files: dict[int, Any] = {}
        self._sizes: dict[int, Sequence[int]] = {}
        self._pil_only: set[int] = set()

    def add(self, rows: Iterable[int], files: Iterable[Any], length: int) -> None:
        """Keep files: arrays, or tensors of DALI on the host. Together they have ``length`` bytes."""
        self._files.update(zip(rows, files, strict=True))
        self.room -= length

    def add_sizes(self, rows: Iterable[int], sizes: Iterable[Sequence[int]]) -> None:
        """Keep heights and widths of files."""
        self._sizes.update(zip(rows, sizes, strict=True))

    def add_header(self, row: int, header: Header) -> None:
        """Keep what the header of a file says."""
        self.add_sizes([row], [header[:2]])
        if not header.native:
            self.leave_to_pil([row])

    def leave_to_pil(self, rows: Iterable[int]) -> None:
        """Keep that DALI does not decode files as PIL does."""
        self._pil_only.update(rows)

    def __contains__(self, row: int) -> bool:
        return row in self._files

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._files))

    def has_all(self, rows: Iterable[int]) -> bool:
        """Return whether all these files are kept, and their sizes are known."""
        return self._sizes.keys() >= set(rows) and self._files.keys() >= set(rows)

    def __getitem__(self, row: int) -> Any:
        return self._files[row]

    def bytes(self, row: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a file."""
        return np.asarray(self._files[row])

    def sizes(self, rows: IntArray) -> IntArray:
        """Return ``(N, 2)`` heights and widths."""
        return np.array([self._sizes[row] for row in rows.tolist()], np.int64).reshape(-1, 2)

    def find_pil_only(self, rows: IntArray) -> IntArray:
        """Return ``(M,)`` positions in a batch of files that DALI does not decode as PIL does."""
        return np.flatnonzero(np.isin(rows, list(self._pil_only)))


class FileBatch(Reader):
    """The files of one batch. If a header is not known yet, the files are read whole, and kept until DALI decodes them.

    If they do not fit the memory, only their headers are read, and DALI reads the files again.

    Args:
        files: The ``FileReader`` of all files. Its module imports this one, so that the type has no name here.
    """

    def __init__(self, files: Any) -> None:
        super().__init__(files.source, files.adjust_orientation)
        self._files = files
        self._held = HeldFiles(0)
        self._rows: set[int] = set()

    @property
    def in_memory(self) -> bool:
        """See :class:`Reader`. It is known when the scan has ended."""
        return bool(self._rows) and self._held.has_all(self._rows)

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        files = self._files
        self._held, self._rows = HeldFiles(files.batch_bytes), set()
        if not len(files.table.find_unknown(rows)):
            return files.scan(rows, pool)
        held, unique = self._held, list(dict.fromkeys(rows.tolist()))
        self._rows = set(unique)
        if len(unique) < MIN_BATCH_READ and not files.validates:
            return Scan(unique, lambda some: files.read_each(some, held), pool, _CHUNK)
        return Scan([0], lambda _: files.read_many(np.array(unique, np.int64), held), pool)

    def abandon(self) -> None:
        self._files.abandon()

    def sizes(self, rows: IntArray) -> IntArray:
        return self._held.sizes(rows) if self.in_memory else self._files.sizes(rows)

    def read_inputs(self, rows: IntArray, by_pil: IntArray, resources: ExitStack) -> Any:
        """Return the bytes of each file, or the paths if the files are not in memory."""
        if not self.in_memory:
            return self._files.read_inputs(rows, by_pil, resources)
        images = [self._held[row] for row in rows.tolist()]

        def decode(position: int) -> None:
            row = int(rows[position])
            with self.blame(row, "decoded"):
                images[position] = decode_to_ppm(self._held.bytes(row), self.adjust_orientation)

        decode_in_threads(decode, by_pil)
        return images

    def input_stats(self) -> InputStats:
        return self._files.input_stats()

    def file_bytes(self, rows: IntArray) -> IntArray:
        return self._files.file_bytes(rows)

    def find_pil_only(self, rows: IntArray) -> IntArray:
        pil_only = self._files.find_pil_only(rows)
        return np.union1d(pil_only, self._held.find_pil_only(rows)) if self.in_memory else pil_only

    def mark_pil_only(self, row: int) -> None:
        self._files.mark_pil_only(row)

    def has_changed(self, rows: IntArray, lengths: npt.NDArray[np.int32], sizes: IntArray) -> bool:
        return not self.in_memory and self._files.has_changed(rows, lengths, sizes)

    def check_endings(self, rows: IntArray, endings: npt.NDArray[np.uint8]) -> None:
        if not self.in_memory:  # else they were checked when the files were read
            self._files.check_endings(rows, endings)

    def check(self, row: int) -> None:
        self._files.check(row)

    def forget(self, rows: IntArray) -> None:
        self._files.forget(rows)
