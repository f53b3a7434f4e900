"""What is known of image files so far, in nine bytes each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchdali.sources.headers.batch import LARGE, Headers
from torchdali.sources.headers.header import Header
from torchdali.transforms.spec import IntArray

__all__ = ["HeaderColumns", "HeaderTable"]

_NATIVE, _JPEG, _WHOLE, _BASELINE = 1, 2, 4, 8


class HeaderColumns(NamedTuple):
    """What is known of files, each array with the files in front.

    Attributes:
        sizes: ``(N, 2)`` uint16: height and width; 0 where the header was not read.
        lengths: ``(N,)`` uint32: bytes of the file, modulo 2**32.
        flags: ``(N,)`` uint8: 1 where DALI decodes the file as PIL does, 2 where it is a JPEG, 4 where PIL found it
            whole although it does not end in an end-of-image marker, 8 where it is a baseline JPEG.
    """

    sizes: npt.NDArray[np.uint16]
    lengths: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint8]

    @staticmethod
    def unknown(count: int) -> HeaderColumns:
        """Nothing is known; the system gives memory as facts are learnt."""
        return HeaderColumns(np.zeros((count, 2), np.uint16), np.zeros(count, np.uint32), np.zeros(count, np.uint8))


class HeaderTable:
    """What headers said, by sample.

    Several threads may learn at once, each of another sample.

    Args:
        columns: What is known already; it is written to.
        files: ``(N,)`` for each sample the number of its file; None where sample and file have the same number.
    """

    def __init__(self, columns: HeaderColumns, files: npt.NDArray[Any] | None = None) -> None:
        self._columns = columns
        self._sizes, self._lengths, self._flags = columns
        self._files = files
        self._large: dict[int, tuple[int, int]] = {}
        self._modified: IntArray | None = None

    @property
    def columns(self) -> HeaderColumns:
        """What is known; sizes of which a side is longer than 65,534 pixels are not in it."""
        sizes = np.array(self._sizes)
        sizes[sizes[:, 0] == LARGE] = 0
        return self._columns._replace(sizes=sizes)

    def learn(self, row: int, header: Header) -> None:
        """Takes what a file's header says."""
        file = self._one(row)
        self._flags[file] = _NATIVE * header.native | _JPEG * header.jpeg | _BASELINE * header.baseline
        self._lengths[file] = header.length & 0xFFFFFFFF
        if self._modified is not None:
            self._modified[file] = header.modified
        if max(header.height, header.width) < LARGE:
            self._sizes[file] = header.height, header.width
        else:
            self._large[file] = header.height, header.width
            self._sizes[file] = LARGE

    def learn_many(self, rows: IntArray, heads: Headers, lengths: npt.NDArray[np.int32]) -> None:
        """Takes what the first bytes of files say, where they do."""
        files = self._of(rows)[heads.known]
        jpeg, baseline = heads.jpeg[heads.known], heads.baseline[heads.known]
        self._flags[files] = _NATIVE | _JPEG * jpeg | _BASELINE * baseline
        self._lengths[files] = lengths[heads.known].view(np.uint32)
        self._sizes[files] = heads.sizes[heads.known]

    @property
    def nothing(self) -> bool:
        """Whether nothing is known."""
        return not self._sizes[:, 0].any()

    @property
    def keeps_modified(self) -> bool:
        """Whether :meth:`stamps` are known."""
        return self._modified is not None

    def unknown(self, rows: IntArray) -> IntArray:
        """Those rows whose headers were not read yet, each once."""
        return np.unique(rows[self._sizes[self._of(rows), 0] == 0])

    def sizes(self, rows: IntArray) -> IntArray:
        """``(N, 2)`` heights and widths."""
        files = self._of(rows)
        sizes = self._sizes[files].astype(np.int64)
        if self._large:
            for place in np.flatnonzero(sizes[:, 0] == LARGE).tolist():
                sizes[place] = self._large[int(files[place])]
        return sizes

    def native(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """``(N,)`` whether DALI decodes the files as PIL does."""
        flags: Any = self._flags[self._of(rows)]
        return flags & _NATIVE != 0

    def beside_engine(self) -> float:
        """The share of the known files that are not for a card's JPEG engine."""
        flags: Any = self._flags[self._sizes[:, 0] != 0]
        if not len(flags):
            return 0.0
        wanted = _NATIVE | _BASELINE
        return int(np.count_nonzero((flags & wanted) != wanted)) / len(flags)

    def bytes_of(self, rows: IntArray) -> int:
        """Bytes of all those files."""
        return int(self._lengths[self._of(rows)].sum(dtype=np.int64))

    def of_other_length(self, rows: IntArray, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """``(N,)`` whether files are not as long as they were; ``(N,)`` lengths, those above 2**31 wrapped around."""
        return self._lengths[self._of(rows)] != lengths.view(np.uint32)

    def may_be_cut(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """``(N,)`` whether files are JPEGs for DALI that PIL did not read to their end."""
        flags: Any = self._flags[self._of(rows)]
        return (flags & (_NATIVE | _JPEG | _WHOLE)) == (_NATIVE | _JPEG)

    def keep_modified(self) -> None:
        """From now on :meth:`stamps` are known; what was learnt before must be learnt again, and takes 8 bytes more."""
        if self._modified is None:
            self._modified = np.zeros(len(self._lengths), np.int64)
            self._sizes[:] = 0

    def stamps(self, rows: IntArray) -> IntArray:
        """``(N, 2)`` lengths, modulo 2**32, and when files were last modified, in nanoseconds."""
        assert self._modified is not None
        files = self._of(rows)
        return np.stack((self._lengths[files].astype(np.int64), self._modified[files]), axis=1)

    def whole(self, row: int) -> None:
        """PIL read the file to its end."""
        self._flags[self._one(row)] |= _WHOLE

    def mark_pil_only(self, row: int) -> None:
        """From now on DALI does not decode the file as PIL does."""
        self._flags[self._one(row)] &= 0xFF ^ _NATIVE

    def forget(self, rows: IntArray) -> None:
        """Makes files unknown again."""
        self._sizes[self._of(rows)] = 0

    def _of(self, rows: IntArray) -> npt.NDArray[Any]:
        return rows if self._files is None else self._files[rows]

    def _one(self, row: int) -> int:
        return row if self._files is None else int(self._files[row])
