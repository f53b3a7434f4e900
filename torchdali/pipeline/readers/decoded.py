"""Batches of samples that threads decode before their turn, and sounds, which are read so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.errors import SampleError
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.scan import Scan
from torchdali.sources import Source
from torchdali.transforms.spec import IntArray

__all__ = ["DecodedBatch", "DecodingReader", "WaveformReader"]


class DecodedBatch(Reader):
    """The decoded samples of one batch.

    Args:
        source: The samples.
        decode: Called in threads with the row of a sample and its place in the batch.

    Attributes:
        chunk: How many samples a thread decodes in a row.
    """

    chunk = 1

    def __init__(self, source: Source, decode: Callable[[int, int], Any]) -> None:
        super().__init__(source)
        self._decode = decode
        self._rows: list[int] = []
        self._decoded: dict[int, Any] = {}

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Start to decode the samples, in the threads of ``pool()``."""
        self._rows = rows.tolist()
        missing = [place for place in range(len(rows)) if place not in self._decoded]
        return Scan(missing, self._decode_places, pool, self.chunk)

    def _decode_places(self, places: Sequence[int]) -> None:
        for place in places:
            self._decoded[place] = self._decode(self._rows[place], place)

    def take(self, rows: IntArray) -> list[Any]:
        """Return all samples of the batch, or some."""
        return [self._decoded[place] for place in self.find_places(rows)]

    def find_places(self, rows: IntArray) -> Sequence[int]:
        """Return where all samples of the batch are in it, or some."""
        is_whole = len(rows) == len(self._rows)
        return range(len(rows)) if is_whole else [self._rows.index(row) for row in rows.tolist()]


class DecodingReader(Reader):
    """Reads a source of samples that threads decode. It keeps the sizes of those that were replaced.

    Args:
        source: The samples.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._replaced: dict[int, tuple[int, int]] = {}

    def restore(self, row: int) -> None:
        self._replaced.pop(row, None)

    def substitute_black(self, row: int, size: tuple[int, int]) -> None:
        self._replaced[row] = size


class WaveformReader(DecodingReader):
    """Reads a source of sounds. Its ``read`` returns ``(1, time, channels)`` arrays."""

    substitute = "silence"

    def describe_decoding(self, plan: Plan) -> str:
        return "soundfile, in threads of this process"

    def open_batch(self) -> Reader:
        return _WaveformBatch(self.source, lambda row, _: self.decode(row))

    def decode(self, row: int) -> npt.NDArray[Any]:
        """Return ``(1, time, channels)`` the samples of a sound.

        Raises:
            SampleError: It cannot be decoded.
        """
        if row in self._replaced:
            return np.zeros((*self._replaced[row], self.source.spec.channels), self.source.spec.dtype_name)
        with self.blame(row, "decoded"):
            return self.source.read(np.array([row], np.int64))[0]

    def read_size(self, row: int) -> tuple[int, int] | None:
        try:
            return 1, self.decode(row).shape[1]
        except SampleError:
            return None


class _WaveformBatch(DecodedBatch):
    """The sounds of one batch."""

    chunk = 4  # a sound of some seconds takes about as long as passing it to a thread

    def sizes(self, rows: IntArray) -> IntArray:
        return np.array([sound.shape[:2] for sound in self.take(rows)], np.int64).reshape(-1, 2)

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return an array for each sound."""
        return self.take(rows)
