"""Batches of samples that threads decode before their turn, and sounds, which are read so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.errors import SampleError
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.scan import Scan
from torchdali.sources import Source
from torchdali.transforms.spec import IntArray

_QUICK, _PATIENCE = 0.5e-3, 0.1
"""Seconds in which a quick sound is read, and for which a thread waits for its turn."""

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
    """Reads a source of sounds. Its ``read`` returns ``(1, time, channels)`` arrays.

    Only two threads at a time read sounds that take less than half a millisecond each, such as WAV files in memory. A
    sound is then mostly calls of the system, which let go of the interpreter's lock. With more threads each call waits
    longer to get it back: 16 threads read half as many sounds. Slower sounds are decoded in C, or wait for storage.

    Args:
        source: The samples.
    """

    substitute = "silence"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._seconds = 0.0
        self._two_at_a_time = threading.Semaphore(2)

    def __reduce__(self) -> tuple[type[WaveformReader], tuple[Source]]:
        return WaveformReader, (self.source,)  # turns are of one process

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._seconds = 0.0
        self._two_at_a_time = threading.Semaphore(2)  # a thread that still reads gives its turn back to the old one

    def describe_decoding(self, plan: Plan) -> str:
        return "soundfile, in threads of this process"

    def open_batch(self) -> Reader:
        return _WaveformBatch(self, lambda row, _: self.decode(row))

    @property
    def chunk(self) -> int:
        """How many sounds a thread reads in a row: few until they are known to be quick."""
        return 16 if 0 < self._seconds < _QUICK else 4

    @contextmanager
    def limit_threads(self) -> Generator[None, None, None]:
        """Let in two threads at a time while sounds are quick, else all.

        A thread waits no longer than 0.1 s, because sounds may turn out to be slow, or a file may never answer.
        """
        turns = self._two_at_a_time
        has_turn = self._seconds < _QUICK and turns.acquire(timeout=_PATIENCE)
        try:
            yield
        finally:
            if has_turn:
                turns.release()

    def note_time(self, seconds: float) -> None:
        """Note how long a sound took. Slow sounds are remembered until the next epoch.

        One time alone makes no sounds slow: pipelines are built beside the first ones, with the interpreter's lock.
        """
        if self._seconds < _QUICK:
            self._seconds += 0.1 * (min(seconds, 2 * _QUICK) - self._seconds)

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

    def __init__(self, reader: WaveformReader, decode: Callable[[int, int], Any]) -> None:
        super().__init__(reader.source, decode)
        self._reader, self.chunk = reader, reader.chunk

    def _decode_places(self, places: Sequence[int]) -> None:
        with self._reader.limit_threads():
            begin = perf_counter()
            super()._decode_places(places)
            self._reader.note_time((perf_counter() - begin) / len(places))

    def sizes(self, rows: IntArray) -> IntArray:
        return np.array([sound.shape[:2] for sound in self.take(rows)], np.int64).reshape(-1, 2)

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return an array for each sound."""
        return self.take(rows)
