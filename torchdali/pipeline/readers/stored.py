"""Image files within larger files, which do not change: their headers are read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.encoded import Bytes, EncodedBatch, EncodedFile, EncodedReader
from torchdali.samples.image import decode_to_ppm
from torchdali.sources import HEADER_BYTES, Source, parse_header
from torchdali.sources.headers.batch import parse
from torchdali.sources.headers.table import HeaderTable
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
        self._table = table

    def __reduce__(self) -> tuple[type[StoredReader], tuple[Source, HeaderTable | None]]:
        # Another process reads the headers again, because the table is as long as the dataset.
        return StoredReader, (self.source, self.source.headers())

    def for_batch(self) -> Reader:
        return EncodedBatch(self, self.load, chunk=_CHUNK)

    def load(self, rows: Sequence[int]) -> list[EncodedFile]:
        """Return the files of some rows.

        Raises:
            SampleError: One of them cannot be read, is no image, or is truncated.
        """
        if not self._black.keys().isdisjoint(rows):
            # A black image takes a file's place: rare, so that each is looked at alone.
            load_black = super().load
            return [(load_black if row in self._black else self.load)([row])[0] for row in rows]
        index = np.array(rows, np.int64)
        contents: list[Any] = self.read_rows(index)
        files: list[Bytes] = [np.frombuffer(content, np.uint8) for content in contents]
        if len(unknown := np.flatnonzero(self._table.is_unknown(index))):
            self._read_headers(index[unknown], [files[int(i)] for i in unknown])
        suspects: list[int] = np.flatnonzero(self._table.may_be_truncated(index)).tolist()
        for i in suspects:
            if files[i][-2:].tobytes() != b"\xff\xd9":
                with self.blame(rows[i], "decoded"):  # a GPU's JPEG engine fills the missing part with grey, silently
                    decode_to_ppm(files[i])
            self._table.mark_complete(rows[i])
        return list(zip(files, self._table.headers(index), strict=True))

    def _read_headers(self, rows: IntArray, files: Sequence[Bytes]) -> None:
        starts = np.zeros((len(rows), HEADER_BYTES), np.uint8)
        for start, data in zip(starts, files, strict=True):
            start[: len(data)] = data[:HEADER_BYTES]
        lengths = np.array([len(data) for data in files], np.int64).astype(np.int32)
        headers = parse(starts)
        self._table.update_many(rows, headers, lengths)
        others: list[int] = np.flatnonzero(~headers.known).tolist()
        for i in others:
            row = int(rows[i])
            with self.blame(row, "read as an image"):
                self._table.update(row, parse_header(files[i].data))

    def input_stats(self) -> InputStats:
        return InputStats(self._table.non_engine_share())
