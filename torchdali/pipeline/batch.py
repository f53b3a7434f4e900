"""A batch in flight: what is read, drawn and run for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchdali.pipeline.dlpack import Images
from torchdali.pipeline.engine import PipelineRunner, Views
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import Reader, Scan
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import Inputs, IntArray, Params
from torchdali.transforms.targets import Targets

__all__ = ["Batch", "Part", "TargetMaker"]


@dataclass
class Part:
    """Consecutive samples of a batch, which are one run, while PIL decodes some of their files.

    Attributes:
        place: Where they are in the batch.
        pixels: What PIL has decoded, for positions in the part, as :meth:`Reader.decode_with_pil` returns it.
        decoding: The decoding, in progress.
        held: Bytes of host memory that the part takes until its run is done.
    """

    place: slice
    pixels: dict[int, Any]
    decoding: Scan
    held: int = 0


class TargetMaker(Protocol):
    """Makes the targets of one batch whose boxes, masks and key points move."""

    def read_ahead(self, rows: IntArray, scan: Scan, pool: Callable[[], Executor]) -> None:
        """Let the threads of ``pool()`` read the files of the targets, as a part of a scan."""
        ...

    def __call__(self, batch: Batch) -> Targets | None:
        """Make the targets. Return their boxes, masks and key points, or None if there are none."""
        ...


@dataclass
class Batch:
    """A batch in flight.

    Attributes:
        reader: Reads its images.
        pool: The pipelines to run it in.
        rows: ``(N,)`` rows of the source.
        draws: The random numbers of its samples.
        views: The outputs of DALI: for each view one tensor, or one for each sample if shapes differ.
        params: The drawn parameters, for each rule of the plan.
        scan: The scan of its headers or files, in progress.
        is_started: Whether :class:`Prefetcher` has asked for its scan.
        runner: The runner of its pipeline. None if the batch is empty or failed before.
        parts: The parts of the batch that are not begun yet, each a run. Most batches have one part.
        begun: The parts that wait for PIL, or for their turn.
        runs: The numbers of its runs in flight, and the bytes that each holds in host memory.
        error: The error to raise in its turn.
        size: ``(N, 2)`` heights and widths that its parameters were drawn for.
        inputs: The parameters that are fed for it.
        targets: The boxes, masks and key points of its samples, after all moves, if there are any.
        masks: Batches of its samples' mask files, one for each dtype.
        collect: Makes the targets, and again if the batch runs again. Without it the reader has them.
    """

    reader: Reader
    pool: PipelinePool
    rows: IntArray
    draws: Draws
    views: Views = field(default_factory=Views)
    params: list[Params] = field(default_factory=list[Params])
    scan: Scan | None = None
    is_started: bool = False
    runner: PipelineRunner | None = None
    parts: deque[slice] = field(default_factory=deque[slice])
    begun: deque[Part] = field(default_factory=deque[Part])
    runs: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    error: Exception | None = None
    size: IntArray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    inputs: Inputs = field(default_factory=dict[str, npt.NDArray[Any]])
    targets: Targets | None = None
    masks: list[Batch] = field(default_factory=list["Batch"])
    collect: TargetMaker | None = None

    @property
    def num_images(self) -> int:
        """Number of images that DALI gets: videos have several for each sample."""
        return len(self.rows) * self.pool.plan.num_images

    @property
    def images(self) -> Images:
        """Return the images of the only view."""
        (images,) = self.views or [[]]
        return images

    def claim_error(self) -> Exception:
        """Return the error and forget it. Once raised, its traceback would hold the batch in a cycle."""
        error, self.error = self.error, None
        assert error is not None
        return error
