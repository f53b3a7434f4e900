"""Decode files in batches with DALI, and find the faulty files of a batch that fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torchvision.transforms import v2

from torchdali.errors import SampleError
from torchdali.pipeline.compile import compile_plan
from torchdali.pipeline.engine import PipelineRunner, RunOutputs
from torchdali.pipeline.parts import count_decoded_bytes, split
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import FileReader
from torchdali.pipeline.tuning import Threads
from torchdali.samples.image import DEEP_MODES
from torchdali.tools.commands.files import Problem, is_cut_off
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import IntArray

_BATCH = 128
_BATCH_BYTES = 2**28
"""Bound of a batch's decoded bytes. A larger image is a batch of its own."""
_DEPTH = 3
"""Number of batches in flight."""
_TRUNCATED = "it ends before its image does"


class Decoder:
    """Decodes files with known headers.

    Args:
        reader: Reads the files.
        device: Device on which DALI decodes.
        threads: Threads in which PIL decodes.
        tick: Called with the number of files that were just decoded.
    """

    def __init__(
        self, reader: FileReader, device: torch.device, threads: ThreadPoolExecutor, tick: Callable[[int], None]
    ) -> None:
        self._reader, self._threads, self._tick = reader, threads, tick
        # The plan is not fused, so whole images are decoded. One pixel of each comes out.
        plan = compile_plan([v2.ToImage(), v2.CenterCrop(1)], device, "exact")
        self._pool = PipelinePool(plan, _BATCH, Threads(0, device, plan.input_kind))
        self._runner: PipelineRunner | None = None
        self._in_flight: deque[tuple[PipelineRunner, IntArray]] = deque()

    def decode(self, chunks: Iterable[IntArray]) -> Iterator[list[Problem]]:
        """Decode the files with these numbers, and yield problems as they are found."""
        waiting: list[Future[Problem | None]] = []
        for rows in chunks:
            by_pil = np.zeros(len(rows), np.bool_)
            by_pil[self._reader.find_pil_only(rows)] = True
            before, waiting = waiting, [self._threads.submit(self._load, row) for row in rows[by_pil].tolist()]
            for batch in self._split_batches(rows[~by_pil]):
                while len(self._in_flight) >= _DEPTH:
                    yield self._finish()
                runner = self._get_runner()
                if self._submit(runner, batch):
                    self._in_flight.append((runner, batch))
                else:
                    yield self._find_faulty(batch)
                    self._tick(len(batch))
            yield from self._wait_for(before)
        while self._in_flight:
            yield self._finish()
        yield from self._wait_for(waiting)

    def _wait_for(self, futures: Iterable[Future[Problem | None]]) -> Iterator[list[Problem]]:
        for future in futures:
            problem = future.result()
            self._tick(1)
            if problem:
                yield [problem]

    def close(self) -> None:
        """Free the pipeline."""
        self._pool.close()

    def _split_batches(self, rows: IntArray) -> Iterator[IntArray]:
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            yield from (part[place] for place in split(count_decoded_bytes(self._reader.sizes(part)), _BATCH_BYTES))

    def _get_runner(self) -> PipelineRunner:
        if self._runner is None or self._runner.broken:
            self._runner = self._pool.acquire(_BATCH, self._reader.input_stats())
        return self._runner

    def _submit(self, runner: PipelineRunner, rows: IntArray) -> bool:
        """Submit a batch. Return False if DALI refuses it."""
        plan = self._pool.plan
        inputs, _ = plan.draw(Draws(epoch_key(0, 0), rows, np.zeros_like(rows)), self._reader.sizes(rows))
        with ExitStack() as resources:
            try:
                runner.submit(self._reader.read_inputs(rows, {}, resources), inputs, resources)
            except RuntimeError:
                return False
        return True

    def _finish(self) -> list[Problem]:
        """Finish the oldest batch in flight, and return its problems."""
        runner, rows = self._in_flight.popleft()
        try:
            outputs = runner.take()
        except RuntimeError:
            problems = self._find_faulty(rows)
        else:
            problems = self._find_truncated(rows, outputs)
        self._tick(len(rows))
        return problems

    def _find_truncated(self, rows: IntArray, outputs: RunOutputs) -> list[Problem]:
        """Return the problems of files that DALI decoded without an error. JPEG engines accept truncated files."""
        if self._is_complete(rows, outputs):
            return []
        parts = [slice(i, i + 1) for i in range(len(rows))]
        alone = [RunOutputs([], outputs.endings[part], outputs.lengths[part]) for part in parts]
        suspects = [part for part, own in zip(parts, alone, strict=True) if not self._is_complete(rows[part], own)]
        return [problem for part in suspects if (problem := self._load(int(rows[part][0])))]

    def _is_complete(self, rows: IntArray, outputs: RunOutputs) -> bool:
        try:
            self._reader.check_endings(rows, outputs.endings)
        except SampleError:
            return False
        # The ending of a file that was changed since its header was read proves nothing. PIL decodes such files.
        return not self._reader.has_changed(rows, outputs.lengths, self._reader.sizes(rows))

    def _find_faulty(self, rows: IntArray) -> list[Problem]:
        """Return the problems of a batch that failed: files that PIL cannot read either, or that only DALI refuses."""
        results = list(self._threads.map(self._load, rows.tolist()))
        problems = [problem for problem in results if problem]
        readable = rows[[problem is None for problem in results]]
        if problems and (len(readable) == 0 or self._try_decoding(self._get_runner(), readable, problems)):
            return problems
        single = self._pool.make(1, threads=1)
        for row in readable:
            if not self._try_decoding(single, np.array([row]), problems):
                path = self._reader.path(int(row))
                if is_cut_off(path):
                    problems.append(Problem(path, "truncated", f"{_TRUNCATED}; PIL still reads it"))
                else:
                    problems.append(Problem(path, "refused", "DALI does not decode it, and PIL does, more slowly"))
        single.close()
        return problems

    def _try_decoding(self, runner: PipelineRunner, rows: IntArray, problems: list[Problem]) -> bool:
        """Return True if DALI decodes the files. Finish all other batches first, and append new problems."""
        while self._in_flight:
            problems += self._finish()
        if not self._submit(runner, rows):
            return False
        try:
            outputs = runner.take()
        except RuntimeError:
            return False
        problems += self._find_truncated(rows, outputs)
        return True

    def _load(self, row: int) -> Problem | None:
        """Decode a file with PIL, and return its problem."""
        try:
            self._reader.load(row)
        except SampleError as error:
            return diagnose(error)
        except Exception as error:  # noqa: BLE001 - on files made to break it, PIL raises errors of any type
            return Problem(self._reader.path(row), "corrupt", f"it cannot be decoded ({error!r})")
        return _find_clipping(self._reader.path(row))


def _find_clipping(path: str) -> Problem | None:
    """Return the problem of a file that PIL decodes and whose values ``convert("RGB")`` clips to 8 bits."""
    with cast("Any", PIL.Image.open)(path) as image:
        if image.mode not in DEEP_MODES:
            return None
        values: npt.NDArray[Any] = np.asarray(image)
        if np.array_equal(values, np.clip(values, 0, 255).astype(np.uint8)):
            return None
        reason = (
            f"its values are {values.min():g} to {values.max():g}, of which ImageFolder makes whole numbers up to 255"
        )
    return Problem(path, "clipped", reason)


def diagnose(error: SampleError) -> Problem:
    """Return the problem that an error is about."""
    cause = error.__cause__
    if isinstance(cause, PIL.Image.DecompressionBombError):
        return Problem(error.path, "too large", error.reason)
    if isinstance(cause, OSError) and cause.errno is not None:
        return Problem(error.path, "unreadable", error.reason)
    if "truncated" in str(cause) or is_cut_off(error.path):
        return Problem(error.path, "truncated", f"{_TRUNCATED} ({cause})")
    return Problem(error.path, "corrupt", error.reason)
