"""Every file of a source through DALI's decoder, in batches; and who is at fault where a batch fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import PIL.Image
import torch
from torchvision.transforms import v2

from torchdali.errors import SampleError
from torchdali.pipeline.compile import compile_plan
from torchdali.pipeline.engine import PipelinePool, PipelineRunner, RunOutputs
from torchdali.pipeline.tuning import Threads
from torchdali.sources import FileSource
from torchdali.tools.commands.files import Problem, cut_off
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import IntArray

__all__ = ["Decoder", "diagnose"]

_NOTHING: IntArray = np.empty(0, np.int64)
_BATCH = 128
_BATCH_BYTES = 2**28
"""Decoded; an image that is larger is a batch of its own."""
_WINDOW = 3
_TRUNCATED = "it ends before its image does"


class Decoder:
    """Decodes files whose headers are known.

    Args:
        source: The files.
        device: Where DALI decodes.
        threads: For what PIL decodes.
        tick: Called with the number of files that were just done.
    """

    def __init__(
        self, source: FileSource, device: torch.device, threads: ThreadPoolExecutor, tick: Callable[[int], None]
    ) -> None:
        self._source, self._threads, self._tick = source, threads, tick
        # Whole images are decoded, as the plan is not fused, and a pixel of each comes out.
        plan = compile_plan([v2.ToImage(), v2.CenterCrop(1)], device, "exact")
        self._pool = PipelinePool(plan, _BATCH, Threads(0, device, plan.input_kind))
        self._engine: PipelineRunner | None = None
        self._flying: deque[tuple[PipelineRunner, IntArray]] = deque()

    def decode(self, chunks: Iterable[IntArray]) -> Iterator[list[Problem]]:
        """Decodes files; gives now and then the problems that were found since.

        Args:
            chunks: Numbers of files, some at a time.
        """
        waiting: list[Future[Problem | None]] = []
        for rows in chunks:
            by_pil = np.zeros(len(rows), np.bool_)
            by_pil[self._source.foreign(rows)] = True
            before, waiting = waiting, [self._threads.submit(self._by_pil, row) for row in rows[by_pil].tolist()]
            for batch in self._batches(rows[~by_pil]):
                while len(self._flying) >= _WINDOW:
                    yield self._land()
                engine = self._leased()
                if self._submitted(engine, batch):
                    self._flying.append((engine, batch))
                else:
                    yield self._at_fault(batch)
                    self._tick(len(batch))
            yield from self._results(before)
        while self._flying:
            yield self._land()
        yield from self._results(waiting)

    def _results(self, futures: Iterable[Future[Problem | None]]) -> Iterator[list[Problem]]:
        for future in futures:
            problem = future.result()
            self._tick(1)
            if problem:
                yield [problem]

    def close(self) -> None:
        """Frees the pipeline."""
        self._pool.close()

    def _batches(self, rows: IntArray) -> Iterator[IntArray]:
        total = np.cumsum(3 * self._source.sizes(rows).prod(1))
        start = 0
        while start < len(rows):
            before = total[start - 1] if start else 0
            fitting = int(np.searchsorted(total, before + _BATCH_BYTES, "right"))
            stop = min(max(fitting, start + 1), start + _BATCH)
            yield rows[start:stop]
            start = stop

    def _leased(self) -> PipelineRunner:
        if self._engine is None or self._engine.broken:
            self._engine = self._pool.acquire(_BATCH, self._source.seen())
        return self._engine

    def _submitted(self, engine: PipelineRunner, rows: IntArray) -> bool:
        plan = self._pool.plan
        inputs, _ = plan.draw(Draws(epoch_key(0, 0), rows, np.zeros_like(rows)), self._source.sizes(rows))
        with ExitStack() as held:
            try:
                engine.submit(self._source.images(rows, _NOTHING, held), inputs, held)
            except RuntimeError:
                return False
        return True

    def _land(self) -> list[Problem]:
        engine, rows = self._flying.popleft()
        try:
            taken = engine.take()
        except RuntimeError:
            problems = self._at_fault(rows)
        else:
            problems = self._suspected(rows, taken)
        self._tick(len(rows))
        return problems

    def _suspected(self, rows: IntArray, taken: RunOutputs) -> list[Problem]:
        """What is wrong with files that DALI decoded without a word, as JPEG engines do with truncated ones."""
        if self._sound(rows, taken):
            return []
        parts = [slice(place, place + 1) for place in range(len(rows))]
        alone = [RunOutputs([], taken.endings[part], taken.lengths[part]) for part in parts]
        suspects = [part for part, of_it in zip(parts, alone, strict=True) if not self._sound(rows[part], of_it)]
        return [problem for part in suspects if (problem := self._by_pil(int(rows[part][0])))]

    def _sound(self, rows: IntArray, taken: RunOutputs) -> bool:
        try:
            self._source.check_endings(rows, taken.endings)
        except SampleError:
            return False
        # Of a file that was changed meanwhile only PIL can tell.
        return not self._source.changed(rows, taken.lengths, self._source.sizes(rows))

    def _at_fault(self, rows: IntArray) -> list[Problem]:
        """Who is to blame for a batch that failed: files that PIL does not read either, or that DALI alone refuses."""
        found = list(self._threads.map(self._by_pil, rows.tolist()))
        problems = [problem for problem in found if problem]
        read = rows[[problem is None for problem in found]]
        if problems and (len(read) == 0 or self._passes(self._leased(), read, problems)):
            return problems
        alone = self._pool.make(1, threads=1)
        for row in read:
            one = np.array([row])
            if not self._passes(alone, one, problems):
                path = self._source.path(int(row))
                if cut_off(path):
                    problems.append(Problem(path, "truncated", f"{_TRUNCATED}; PIL still reads it"))
                else:
                    problems.append(Problem(path, "refused", "DALI does not decode it, and PIL does, more slowly"))
        alone.close()
        return problems

    def _passes(self, engine: PipelineRunner, rows: IntArray, problems: list[Problem]) -> bool:
        """Whether DALI decodes files now; adds what else is found of them. Nothing else may be in flight."""
        while self._flying:
            problems += self._land()
        if not self._submitted(engine, rows):
            return False
        try:
            taken = engine.take()
        except RuntimeError:
            return False
        problems += self._suspected(rows, taken)
        return True

    def _by_pil(self, row: int) -> Problem | None:
        try:
            self._source.load(row)
        except SampleError as error:
            return diagnose(error)
        except Exception as error:  # noqa: BLE001 - PIL raises anything on files that were made to break it
            return Problem(self._source.path(row), "corrupt", f"it cannot be decoded ({error!r})")
        return None


def diagnose(error: SampleError) -> Problem:
    """The kind of problem that an error is about."""
    cause = error.__cause__
    if isinstance(cause, PIL.Image.DecompressionBombError):
        return Problem(error.path, "too large", error.reason)
    if isinstance(cause, OSError) and cause.errno is not None:
        return Problem(error.path, "unreadable", error.reason)
    if "truncated" in str(cause) or cut_off(error.path):
        return Problem(error.path, "truncated", f"{_TRUNCATED} ({cause})")
    return Problem(error.path, "corrupt", error.reason)
