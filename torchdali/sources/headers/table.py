"""A table of the known headers of image files: nine bytes for each file."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchdali.sources.headers.batch import TOO_LARGE, Headers
from torchdali.sources.headers.header import Header
from torchdali.transforms.spec import IntArray

__all__ = ["HeaderColumns", "HeaderTable"]

_NATIVE, _JPEG, _COMPLETE, _BASELINE = 1, 2, 4, 8


class HeaderColumns(NamedTuple):
    """The columns of a header table.

    Attributes:
        sizes: ``(N, 2)`` uint16 heights and widths; 0 if the header was not read.
        lengths: ``(N,)`` uint32 bytes of the files, modulo 2**32.
        flags: ``(N,)`` uint8, a sum of four flags. 1: DALI decodes the file as PIL does. 2: the file is a JPEG. 4: PIL
            found it complete, although it does not end in an end-of-image marker. 8: it is a baseline JPEG.
    """

    sizes: npt.NDArray[np.uint16]
    lengths: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint8]

    @staticmethod
    def unknown(count: int) -> HeaderColumns:
        """Return empty columns for ``count`` files. The system allocates their pages when they are written."""
        return HeaderColumns(np.zeros((count, 2), np.uint16), np.zeros(count, np.uint32), np.zeros(count, np.uint8))


class HeaderTable:
    """The headers of files, by the row of a sample.

    Several threads may update the table at once, each for other samples.

    Args:
        columns: The columns. Updates are written to these arrays.
        files: ``(N,)`` for each sample the number of its file; None if samples and files have the same numbers.
    """

    def __init__(self, columns: HeaderColumns, files: npt.NDArray[Any] | None = None) -> None:
        self._columns = columns
        self._sizes, self._lengths, self._flags = columns
        self._files = files
        self._large: dict[int, tuple[int, int]] = {}
        self._modified: IntArray | None = None

    @property
    def columns(self) -> HeaderColumns:
        """A copy of the columns. It lacks the sizes of images with a side above 65,534 pixels."""
        sizes = np.array(self._sizes)
        sizes[sizes[:, 0] == TOO_LARGE] = 0
        return self._columns._replace(sizes=sizes)

    def update(self, row: int, header: Header) -> None:
        """Store a file's header."""
        file = self._to_file(row)
        self._flags[file] = _NATIVE * header.native | _JPEG * header.jpeg | _BASELINE * header.baseline
        self._lengths[file] = header.length & 0xFFFFFFFF
        if self._modified is not None:
            self._modified[file] = header.modified
        if max(header.height, header.width) < TOO_LARGE:
            self._sizes[file] = header.height, header.width
        else:
            self._large[file] = header.height, header.width
            self._sizes[file] = TOO_LARGE

    def update_many(self, rows: IntArray, headers: Headers, lengths: npt.NDArray[np.uint32]) -> None:
        """Store the headers of many files. Skip those that are not known from the first bytes."""
        files = self._to_files(rows)[headers.known]
        jpeg, baseline = headers.jpeg[headers.known], headers.baseline[headers.known]
        self._flags[files] = _NATIVE | _JPEG * jpeg | _BASELINE * baseline
        self._lengths[files] = lengths[headers.known]
        self._sizes[files] = headers.sizes[headers.known]

    @property
    def is_empty(self) -> bool:
        """Whether no header is known."""
        return not self._sizes[:, 0].any()

    @property
    def has_stamps(self) -> bool:
        """Whether the table has :meth:`stamps`."""
        return self._modified is not None

    def find_unknown(self, rows: IntArray) -> IntArray:
        """Return the rows whose headers are not known yet, each row once."""
        unknown = rows[self.is_unknown(rows)]
        return np.unique(unknown) if len(unknown) else unknown

    def is_unknown(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Return ``(N,)`` whether the headers of files are not known yet."""
        return self._sizes[self._to_files(rows), 0] == 0

    def sizes(self, rows: IntArray) -> IntArray:
        """Return ``(N, 2)`` heights and widths."""
        files = self._to_files(rows)
        sizes = self._sizes[files].astype(np.int64)
        if self._large:
            for i in np.flatnonzero(sizes[:, 0] == TOO_LARGE).tolist():
                sizes[i] = self._large[int(files[i])]
        return sizes

    def is_native(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Return ``(N,)`` whether DALI decodes the files as PIL does."""
        flags: Any = self._flags[self._to_files(rows)]
        return flags & _NATIVE != 0

    def non_engine_share(self) -> float:
        """Return the share of the known files that the GPU's JPEG engine does not decode."""
        flags: Any = self._flags[self._sizes[:, 0] != 0]
        if not len(flags):
            return 0.0
        required = _NATIVE | _BASELINE
        return int(np.count_nonzero((flags & required) != required)) / len(flags)

    def lengths(self, rows: IntArray) -> IntArray:
        """Return ``(N,)`` bytes of the files, modulo 2**32."""
        return self._lengths[self._to_files(rows)].astype(np.int64)

    def has_other_length(self, rows: IntArray, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return ``(N,)`` whether files have another length now. int32 lengths above 2**31 wrap around."""
        return self._lengths[self._to_files(rows)] != lengths.view(np.uint32)

    def find_possibly_truncated(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Return ``(N,)`` whether files are JPEGs for DALI that PIL has not found complete."""
        flags: Any = self._flags[self._to_files(rows)]
        return (flags & (_NATIVE | _JPEG | _COMPLETE)) == (_NATIVE | _JPEG)

    def record_modified(self) -> None:
        """Record the times of modification from now on, 8 bytes for each file. Forget all headers read before."""
        if self._modified is None:
            self._modified = np.zeros(len(self._lengths), np.int64)
            self._sizes[:] = 0

    def stamps(self, rows: IntArray) -> IntArray:
        """Return ``(N, 2)`` lengths modulo 2**32, and times of modification in nanoseconds."""
        assert self._modified is not None
        files = self._to_files(rows)
        return np.stack((self._lengths[files].astype(np.int64), self._modified[files]), axis=1)

    def mark_complete(self, row: int) -> None:
        """Record that PIL has found the file complete."""
        self._flags[self._to_file(row)] |= _COMPLETE

    def mark_pil_only(self, row: int) -> None:
        """Record that DALI does not decode the file as PIL does."""
        self._flags[self._to_file(row)] &= 0xFF ^ _NATIVE

    def forget(self, rows: IntArray) -> None:
        """Forget the headers of files."""
        self._sizes[self._to_files(rows)] = 0

    def _to_files(self, rows: IntArray) -> npt.NDArray[Any]:
        return rows if self._files is None else self._files[rows]

    def _to_file(self, row: int) -> int:
        return row if self._files is None else int(self._files[row])
