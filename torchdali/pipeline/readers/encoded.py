"""Image files whose bytes are in memory when DALI decodes them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.header_reader import HeaderValidator
from torchdali.pipeline.readers.scan import Scan
from torchdali.samples.image import decode_to_ppm, make_black
from torchdali.samples.pil import PILHeader, read_pil_header
from torchdali.sources import UNREADABLE, Header, Source, parse_header
from torchdali.transforms.spec import InputStats, IntArray

__all__ = ["EncodedBatch", "EncodedFile", "EncodedReader"]

Bytes = npt.NDArray[np.uint8]
_open: Callable[..., Any] = PIL.Image.open
EncodedFile = tuple[Bytes, Header]
"""The bytes of a file, and its header."""


class EncodedBatch(Reader):
    """The files of one batch, in memory.

    Args:
        owner: The reader of the whole source.
        load: Returns the files of some rows.
        patience: As for :class:`Scan`.
    """

    def __init__(
        self,
        owner: Reader,
        load: Callable[[Sequence[int]], list[EncodedFile]],
        patience: float = 0.0,
    ) -> None:
        super().__init__(owner.source, owner.adjust_orientation)
        self._owner, self._load, self._patience = owner, load, patience
        self._files: dict[int, Bytes] = {}
        self._headers: dict[int, Header] = {}

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Start to read the files, in the threads of ``pool()``."""
        return Scan(np.unique(rows).tolist(), self._read, pool, patience=self._patience)

    def _read(self, rows: Sequence[int]) -> None:
        for row, (data, header) in zip(rows, self._load(rows), strict=True):
            self._files[row], self._headers[row] = data, header

    def sizes(self, rows: IntArray) -> IntArray:
        return np.array([self._headers[row][:2] for row in rows.tolist()], np.int64).reshape(-1, 2)

    def decode_with_pil(self, row: int) -> Bytes:
        with self.blame(row, "decoded"):
            return decode_to_ppm(self._files[row], self.adjust_orientation)

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Bytes], resources: ExitStack) -> list[Bytes]:
        """Return the bytes of each file; if PIL has decoded it, those of another file with its pixels."""
        images: list[Bytes] = [self._files[row] for row in rows.tolist()]
        for position, image in pixels.items():
            images[position] = image
        return images

    def input_stats(self) -> InputStats:
        return self._owner.input_stats()

    def find_pil_only(self, rows: IntArray) -> IntArray:
        pil_only = [position for position, row in enumerate(rows.tolist()) if not self._headers[row].native]
        return np.union1d(np.array(pil_only, np.int64), self._owner.find_pil_only(rows))

    def mark_pil_only(self, row: int) -> None:
        self._owner.mark_pil_only(row)

    def check(self, row: int) -> None:
        if row in self._files:
            self.decode_with_pil(row)

    def forget(self, rows: IntArray) -> None:
        self._owner.forget(rows)


class EncodedReader(Reader):
    """Reads a source that gives the bytes of image files. They are read again for every batch."""

    def __init__(self, source: Source, adjust_orientation: bool = False) -> None:
        super().__init__(source, adjust_orientation)
        self._black: dict[int, Bytes] = {}
        self._pil_only: set[int] = set()
        self._validator = HeaderValidator()
        self._num_read = self._num_non_engine = 0

    def open_batch(self) -> Reader:
        return EncodedBatch(self, self.load)

    def move_to(self, device: torch.device) -> None:
        self._validator.device = device

    def validate_headers(self) -> bool:
        return self._validator.turn_on()

    def load(self, rows: Sequence[int]) -> list[EncodedFile]:
        """Return the files of some rows.

        Raises:
            SampleError: One of them cannot be read, is no image, or is truncated.
        """
        contents = iter(self.read_rows(np.array([row for row in rows if row not in self._black], np.int64)))
        return self.validate(
            [self._inspect(row, self._black[row] if row in self._black else next(contents)) for row in rows]
        )

    def validate(self, files: list[EncodedFile]) -> list[EncodedFile]:
        """Return files with their headers. One that DALI refuses is not native. It is not asked about JPEGs."""
        if self._validator.is_on:
            asked = [i for i, (_, header) in enumerate(files) if header.native and not header.jpeg]
            for i in self._validator.find_refused([files[i][0] for i in asked]):
                data, header = files[asked[i]]
                files[asked[i]] = data, header._replace(native=False)
        return files

    def _inspect(self, row: int, content: Any) -> EncodedFile:
        data: Bytes = np.frombuffer(content, np.uint8)
        with self.blame(row, "read as an image"):
            header = parse_header(data.data, self.adjust_orientation)
        self._num_read += 1
        self._num_non_engine += not header.baseline
        if header.jpeg and header.native:
            self.check_complete(row, data)
        return data, header

    def input_stats(self) -> InputStats:
        return InputStats(self._num_non_engine / max(self._num_read, 1))

    def find_pil_only(self, rows: IntArray) -> IntArray:
        return np.flatnonzero(np.isin(rows, list(self._pil_only)))

    def mark_pil_only(self, row: int) -> None:
        self._pil_only.add(row)

    def sizes(self, rows: IntArray) -> IntArray:
        return np.array([header[:2] for _, header in self.load(rows.tolist())], np.int64).reshape(-1, 2)

    def pil_header(self, row: int) -> PILHeader | None:
        if row in self._black:
            return None
        try:
            with _open(io.BytesIO(self.source.read(np.array([row], np.int64))[0])) as image:
                return read_pil_header(image, converted=True)
        except UNREADABLE:
            return None

    def restore(self, row: int) -> None:
        self._black.pop(row, None)

    def substitute_black(self, row: int, size: tuple[int, int]) -> None:
        self._black[row] = make_black(size).data

    def close(self) -> None:
        self._validator.close()
