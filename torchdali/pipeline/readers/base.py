"""The base class of readers, with the methods that the prefetcher calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchdali.errors import SampleError
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.readers.scan import Scan
from torchdali.samples.image import decode_to_ppm
from torchdali.samples.on_error import BLACK_IMAGE, find_substitutes
from torchdali.samples.pil import PILHeader
from torchdali.sources import UNREADABLE, Source, error_text, is_system_fault
from torchdali.sources.source import ReadError
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import NO_INPUT_STATS, Inputs, InputStats, IntArray
from torchdali.transforms.targets import Targets

__all__ = ["Reader", "decode_with_pil"]

_NO_POSITIONS: IntArray = np.empty(0, np.int64)


class Reader:
    """Reads a source for the pipelines. The methods here are right for images that cannot be damaged.

    Args:
        source: The samples.
        adjust_orientation: Whether images are turned by their EXIF orientation while they are decoded. Sizes follow it.

    Attributes:
        substitute: What takes the place of an unreadable sample with ``on_error="replace"``, for messages.
        bad_rows: Rows of samples that are known to be unreadable, if ``on_error`` lets others take their place.
        has_time_limit: Whether batches have one. Then the thread that iterates must not wait for a file.
    """

    has_time_limit: bool = False
    substitute: str = BLACK_IMAGE
    bad_rows: frozenset[int] = frozenset()
    _missing_rows: frozenset[int] = frozenset()

    adjust_orientation: bool = False

    def __init__(self, source: Source, adjust_orientation: bool = False) -> None:
        self.source, self.adjust_orientation = source, adjust_orientation

    @property
    def is_resident(self) -> bool:
        """Whether :meth:`read_inputs` returns tensors on the GPU."""
        return self.source.resident

    def describe_decoding(self, plan: Plan) -> str:
        """Return what decodes the samples if it is not DALI, for ``explain()``; else an empty string."""
        return ""

    def sample_bytes(self, plan: Plan) -> int:
        """Return how much memory the decoded images of a sample take before DALI gets them, in bytes."""
        return 0

    def mark_bad(self, rows: Iterable[int], error: SampleError) -> None:
        """Mark samples as bad: permanently if the content is bad, for this epoch if the system failed to read it."""
        self.bad_rows = self.bad_rows.union(rows)
        cause = error.__cause__
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno):  # PIL's have no number
            self._missing_rows = self._missing_rows.union(rows)

    def begin_epoch(self) -> None:
        """Try samples again whose files were missing or took too much memory: a network share may be back."""
        for row in self._missing_rows:
            self.restore(row)
        self.bad_rows, self._missing_rows = self.bad_rows - self._missing_rows, frozenset()

    def restore(self, row: int) -> None:
        """Give the sample itself again, in place of :attr:`substitute`."""

    def name(self, row: int) -> str:
        """Return a sample's index and name, for messages."""
        return f"sample {row}, {self.source.name(row)}"

    def error(self, row: int, reason: str) -> SampleError:
        """Return the error that blames a sample."""
        return SampleError(row, self.source.name(row), reason)

    def blame(self, row: int, what: str) -> Blame:
        """Return a context that turns what reading a file raises into a SampleError: "it cannot be ``what``"."""
        return Blame(self, row, what)

    def check_complete(self, row: int, file: npt.NDArray[np.uint8]) -> None:
        """Raise SampleError if a JPEG is truncated: a GPU's JPEG engine fills the missing part with grey, silently.

        A file that ends in an end-of-image marker is complete. PIL decodes others.
        """
        if file[-2:].tobytes() != b"\xff\xd9":
            with self.blame(row, "decoded"):
                decode_to_ppm(file)

    def pil_header(self, row: int) -> PILHeader | None:
        """Return what the PIL image of a sample has besides pixels; None if there is none, or it cannot be read."""
        return None

    def read_rows(self, rows: IntArray, read: Callable[[IntArray], Any] | None = None) -> Any:
        """Return what the source reads.

        Args:
            rows: ``(N,)`` rows of samples.
            read: The method of the source to call, if it is not ``read``.

        Raises:
            SampleError: The source cannot read a sample.
        """
        read = read or self.source.read
        try:
            return read(rows)
        except ReadError as error:
            text = getattr(error.error, "strerror", None) or error_text(error.error)
            raise self.error(int(rows[error.position]), f"it cannot be read ({text})") from error.error
        except Exception:
            for row in rows.tolist():
                try:
                    read(np.array([row], np.int64))
                except Exception as error:
                    if is_system_fault(error):
                        raise
                    raise self.error(row, f"it cannot be read ({type(error).__name__}: {error})") from error
            raise

    def open_batch(self) -> Reader:
        """Return the reader of one batch: itself, or one that holds the batch's data."""
        return self

    def bind_draws(self, draws: Draws, plan: Plan) -> Reader:
        """Return the reader of one batch, if what it reads depends on its samples' random numbers.

        Args:
            draws: The random numbers of the batch's samples.
            plan: What runs on the batch.
        """
        return self.open_batch()

    def add_params(self, draws: Draws) -> Draws:
        """Return the random numbers of the batch, with what rules load from them: see :class:`Draws`."""
        return draws

    def move_to(self, device: torch.device) -> None:
        """Prepare for pipelines on a device."""

    def validate_headers(self) -> bool:
        """Return whether headers are validated before DALI decodes any: it leaves files that DALI refuses to PIL."""
        return False

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Start to read what the drawing of parameters needs, in the threads of ``pool()``."""
        return Scan([], lambda _: None, pool)

    def sizes(self, rows: IntArray) -> IntArray:
        """Return ``(N, 2)`` heights and widths of a batch that was scanned."""
        raise NotImplementedError

    def origins(self, rows: IntArray) -> IntArray | None:
        """Return ``(N, 2)`` tops and lefts of what is read of the images of a batch; None if they are whole."""
        return None

    def target(self, row: int) -> Any:
        """Return the target of a sample. It runs functions of the user."""
        return self.source.target(row)

    def targets(self, rows: IntArray) -> Targets | None:
        """Return the boxes, masks and key points of a batch, which moves may change; None if there are none."""
        return None

    def get_drawn(self, rows: IntArray, size: IntArray) -> tuple[Inputs, Targets | None] | None:
        """Return the inputs to feed and the moved annotations of a batch, if they are drawn already.

        Args:
            rows: Its rows.
            size: ``(N, 2)`` heights and widths of its images.
        """
        return None

    gives_places: bool = False
    """Whether :meth:`read_inputs` returns :class:`torchdali.sources.places.Places`, in place of bytes."""

    opens_files: bool = False
    """Whether what :meth:`decode_with_pil` returns is an open file."""

    def decode_with_pil(self, row: int) -> Any:
        """Decode a file with PIL, in one of several threads. Return what :meth:`read_inputs` takes in its place.

        Readers of other samples than image files have no use for it.

        Raises:
            SampleError: It cannot be decoded.
        """

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return the images of a batch, in the form that the plan's ``input_kind`` says.

        Args:
            rows: ``(N,)`` the batch.
            pixels: For positions in it what :meth:`decode_with_pil` returned.
            resources: Takes what must be closed when the run is done.
        """
        raise NotImplementedError

    def input_stats(self) -> InputStats:
        """Return statistics of the files read so far, which decide the number of threads."""
        return NO_INPUT_STATS

    def file_bytes(self, rows: IntArray) -> IntArray:
        """Return ``(N,)`` the bytes that DALI reads of the files of a scanned batch; 0 for images in memory."""
        return np.zeros(len(rows), np.int64)

    def find_pil_only(self, rows: IntArray) -> IntArray:
        """Return ``(M,)`` positions in a scanned batch of files that DALI does not decode as PIL does."""
        return _NO_POSITIONS

    def mark_pil_only(self, row: int) -> None:
        """Leave a sample to PIL from now on."""

    def has_changed(self, rows: IntArray, lengths: npt.NDArray[np.int32], sizes: IntArray) -> bool:
        """Return whether files changed between the drawing of parameters and the run.

        Args:
            rows: ``(N,)`` the batch.
            lengths: ``(N, 1)`` bytes that DALI read of each file.
            sizes: ``(N, 2)`` heights and widths that the parameters were drawn for.
        """
        return False

    def check_endings(self, rows: IntArray, endings: npt.NDArray[np.uint8]) -> None:
        """Raise SampleError if a file is truncated; ``endings`` is ``(N, 2)``, the last two bytes of each."""

    def check(self, row: int) -> None:
        """Raise SampleError if a sample is damaged. Called after its batch failed."""

    def forget(self, rows: IntArray) -> None:
        """Forget what was read of the samples of a batch."""

    def read_size(self, row: int) -> tuple[int, int] | None:
        """Return height and width of one image, scanned or not; None if it cannot be read."""
        try:
            height, width = self.sizes(np.array([row]))[0].tolist()
        except SampleError:
            return None
        return height, width

    def substitute_black(self, row: int, size: tuple[int, int]) -> None:
        """Give :attr:`substitute`, of this height and width, for a sample from now on."""
        raise NotImplementedError

    def find_substitutes(self, bad: npt.NDArray[np.bool_]) -> IntArray | None:
        """Return ``(N,)`` for each position in a batch the position whose image to take; ``bad`` is ``(N,)``."""
        return find_substitutes(bad)

    def close(self) -> None:
        """Free its threads until the next use."""


def decode_with_pil(
    reader: Reader, rows: IntArray, positions: IntArray, pool: Callable[[], Executor]
) -> tuple[dict[int, Any], Scan]:
    """Start to decode files with PIL, in the threads of ``pool()``. Return where their pixels appear, and the work.

    Args:
        reader: The reader.
        rows: ``(N,)`` the batch.
        positions: ``(M,)`` positions of the files in it.
        pool: As for :class:`Scan`.
    """
    pixels: dict[int, Any] = {}

    def decode(positions: Sequence[int]) -> None:
        for position in positions:
            pixels[position] = reader.decode_with_pil(int(rows[position]))

    return pixels, Scan(positions.tolist(), decode, pool, chunk=1)


class Blame:
    """See :meth:`Reader.blame`.

    This is no generator. From Python 3.12 on, ``contextlib`` throws into a generator, and an exception that replaces
    the thrown one is then held by its own traceback, in a cycle that keeps the epoch alive. No version mends it yet:
    https://github.com/python/cpython/issues/129280.
    """

    def __init__(self, reader: Reader, row: int, what: str) -> None:
        self._reader, self._row, self._what = reader, row, what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, FileNotFoundError):
            raise self._reader.error(self._row, "there is no such file") from error
        if isinstance(error, UNREADABLE) and not is_system_fault(error):
            raise self._reader.error(self._row, f"it cannot be {self._what} ({error_text(error)})") from error
