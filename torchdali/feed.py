"""Index batches in, batches of images out, in order: the window of runs in flight, and who failed.

Everything here happens in the thread that iterates. DALI's runs are asynchronous, so keeping the window full takes
one to two milliseconds a batch, and there is no thread of ours that could outlive an epoch or hide an exception.
"""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchdali import graph
from torchdali.engine import Engine, EnginePool, Taken, Views
from torchdali.errors import PipelineError, SampleError
from torchdali.rng import Draws, Words
from torchdali.sources import FolderSource, Scan
from torchdali.spec import Inputs, IntArray, Params
from torchdali.transforms import RowError

__all__ = ["Batch", "Feed"]

_SCAN_THREADS = 16
_ANEW = "this epoch cannot go on, a new one can be started"
_INTERRUPTED = f"the loader was interrupted; {_ANEW}"


@dataclass
class Batch:
    """One batch on its way.

    Attributes:
        index: ``(N,)`` indices into the dataset, in the sampler's order.
        draws: The random numbers of its samples.
        views: What DALI put out: for each view one tensor, or one a sample where shapes differ.
        params: What was drawn, for each rule of the plan.
        scan: Its files' headers, being read.
        inputs: What is fed for it.
        engine: Where it runs; None where it is empty or failed before.
        error: What it will raise in its turn.
    """

    index: IntArray
    draws: Draws
    views: Views = field(default_factory=Views)
    params: list[Params] = field(default_factory=list[Params])
    scan: Scan | None = None
    engine: Engine | None = None
    error: Exception | None = None
    inputs: Inputs = field(default_factory=dict[str, npt.NDArray[Any]])

    @property
    def images(self) -> torch.Tensor | list[torch.Tensor]:
        """The images of the only view."""
        (images,) = self.views or [[]]
        return images

    def claim_error(self) -> Exception:
        """The error, which is kept no longer: raised, its traceback would hold the batch in a cycle."""
        error, self.error = self.error, None
        assert error is not None
        return error


class Feed:
    """The batches of one epoch.

    Args:
        source: Where the samples are.
        pool: The engines to run them in.
        key: The epoch's random key.
        window: Batches in flight.
        timeout: Seconds that a batch may take; 0 for ever.
    """

    def __init__(self, source: FolderSource, pool: EnginePool, key: Words, window: int, timeout: float) -> None:
        self._source, self._pool, self._key = source, pool, key
        self._window, self._timeout = window, timeout
        self._drawn_before = np.zeros(len(source), np.uint32)
        self._last_row = np.zeros(len(source), np.uint32)
        self._waiting: deque[Batch] = deque()
        self._flying: deque[Batch] = deque()
        self._engines: list[Engine] = []
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._over = ""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._flying)

    def push(self, indices: Sequence[int]) -> None:
        """Takes the sampler's indices of one batch and starts to work on it as soon as its turn comes."""
        with self._uninterrupted():
            self._push(indices)

    def _push(self, indices: Sequence[int]) -> None:
        count = len(self._source)
        index = np.asarray([operator.index(i) for i in indices], np.int64)
        outside = (index < -count) | (index >= count)
        if outside.any():
            raise IndexError(f"the sampler gave index {int(index[outside][0])} for a dataset of {count} samples")
        index = np.where(index < 0, index + count, index)
        batch = Batch(index, Draws(self._key, index, self._occurrences(index)))
        batch.scan = self._source.scan(index, self._scan_threads)
        self._waiting.append(batch)
        self._advance()

    def pop(self) -> Batch:
        """The next batch.

        Raises:
            SampleError: A file of it is missing, damaged, truncated or cannot be transformed.
            PipelineError: DALI failed on it for another reason.
            RuntimeError: It took longer than the timeout.
        """
        if self._process != os.getpid():
            raise RuntimeError("an iterator cannot be used in a forked process; iterate over the loader anew there")
        with self._uninterrupted():
            if not self._flying:
                self._launch(self._waiting.popleft())
            batch = self._flying.popleft()
            try:
                self._land(batch)
            except Exception:
                if self._over is _INTERRUPTED:
                    self._advance()
                raise
            self._advance()
            return batch

    @contextmanager
    def _uninterrupted(self) -> Generator[None, None, None]:
        """Ends the epoch where a KeyboardInterrupt comes in between: nobody knows what is in flight then."""
        if self._over:
            raise RuntimeError(self._over)
        self._over = _INTERRUPTED
        try:
            yield
        except Exception:
            if self._over is _INTERRUPTED:
                self._over = ""
            raise
        self._over = ""

    def close(self) -> None:
        """Drops what is under way and returns the engines."""
        self._waiting.clear()
        self._flying.clear()
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        if self._process == os.getpid():
            while self._engines:
                self._pool.give_back(self._engines.pop())

    def _occurrences(self, index: IntArray) -> IntArray:
        """How often each index was drawn before in this epoch, duplicates within the batch counted in order."""
        rows = np.arange(len(index))
        before = self._drawn_before[index].astype(np.int64)
        self._last_row[index] = rows
        if not np.array_equal(self._last_row[index], rows):
            order = np.argsort(index, kind="stable")
            ordered = index[order]
            before[order] += rows - np.searchsorted(ordered, ordered)
        self._drawn_before[index] = before + 1
        return before

    def _scan_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="torchdali-scan")
        return self._threads

    def _advance(self) -> None:
        """Launches what may be launched without waiting."""
        while self._waiting and len(self._flying) < self._window:
            scan = self._waiting[0].scan
            if scan and not scan.done():
                return
            self._launch(self._waiting.popleft())

    def _launch(self, batch: Batch) -> None:
        """Draws a batch's parameters and schedules it. What is wrong with it is kept for its turn."""
        self._flying.append(batch)
        try:
            self._prepare(batch)
            if len(batch.index):
                engine = self._engine_for(len(batch.index))
                self._submit(engine, batch, self._source.foreign(batch.index))
                batch.engine = engine
        except (SampleError, TimeoutError) as error:
            batch.error = error

    def _prepare(self, batch: Batch) -> None:
        if batch.scan:
            batch.scan.wait(self._timeout or None)
        try:
            batch.inputs, batch.params = self._pool.plan.draw(batch.draws, self._source.sizes(batch.index))
        except RowError as error:
            index = int(batch.index[error.row])
            raise SampleError(index, self._source.path(index), str(error)) from error

    def _submit(self, engine: Engine, batch: Batch, by_pil: IntArray) -> None:
        """Schedules a batch; files of the rows ``by_pil`` are read by PIL, and DALI gets their pixels in memory."""
        paths = self._source.paths(batch.index)
        with ExitStack() as files:
            for row in by_pil.tolist():
                file = os.memfd_create("torchdali")
                files.callback(os.close, file)
                with os.fdopen(file, "wb", closefd=False) as stream:
                    self._source.load(int(batch.index[row])).save(stream, format="PPM")
                name = f"/proc/self/fd/{file}".encode()
                paths[row] = 0
                paths[row, : len(name)] = np.frombuffer(name, np.uint8)
            engine.submit({graph.PATHS: paths, **batch.inputs}, files)

    def _engine_for(self, batch_size: int) -> Engine:
        if not self._engines or self._engines[-1].batch_size < batch_size:
            self._engines.append(self._pool.lease(batch_size))
        return self._engines[-1]

    def _land(self, batch: Batch) -> None:
        try:
            if batch.error:
                raise batch.claim_error()
            if batch.engine is None:
                return
            taken = batch.engine.take(self._timeout)
        except SampleError:
            raise
        except TimeoutError as error:
            self._over = f"DataLoader timed out after {self._timeout} seconds; {_ANEW}"
            raise RuntimeError(self._over) from error
        except RuntimeError:
            taken = self._again(batch)
        else:
            if self._source.changed(batch.index, taken.lengths):
                taken = self._again(batch)
        batch.views = taken.views
        self._source.check_endings(batch.index, taken.endings)

    def _again(self, batch: Batch) -> Taken:
        """Runs a batch whose files are not what they were, or that failed, and finds the sample that is to blame.

        A sample that PIL reads and only DALI does not is read by PIL, now and from now on.
        """
        for index in batch.index.tolist():
            self._source.load(index)
        batch.scan = self._source.scan(self._source.forget(batch.index), self._scan_threads)
        self._prepare(batch)
        engine = Engine(self._pool.plan, len(batch.index), 1)
        foreign = self._source.foreign(batch.index)
        with suppress(RuntimeError):
            self._submit(engine, batch, foreign)
            return engine.take()
        native = np.setdiff1d(np.arange(len(batch.index)), foreign)
        refused = [row for row in native.tolist() if not self._passes_alone(engine, batch, row)]
        try:
            self._submit(engine, batch, np.union1d(foreign, np.array(refused, np.int64)))
            taken = engine.take()
        except RuntimeError as error:
            blamed = refused or list(range(len(batch.index)))
            named = "; ".join(self._source.name(int(batch.index[row])) for row in blamed[:3])
            raise PipelineError(
                f"DALI failed on {len(blamed)} of {len(batch.index)} samples ({named}): {error}"
            ) from error
        for row in refused:
            self._source.distrust(int(batch.index[row]))
        return taken

    def _passes_alone(self, engine: Engine, batch: Batch, row: int) -> bool:
        one = slice(row, row + 1)
        try:
            inputs = {name: x[one] for name, x in batch.inputs.items()}
            engine.submit({graph.PATHS: self._source.paths(batch.index[one]), **inputs})
            engine.take()
        except RuntimeError:
            return False
        return True
