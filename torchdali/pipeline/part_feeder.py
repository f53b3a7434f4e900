"""Feed the parts of batches to DALI in order, while threads decode files of later parts with PIL.

PIL holds no lock of the interpreter while it decodes. So the iterating thread waits only for files whose batch is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack

import numpy as np

from torchdali.pipeline.batch import Batch, Part
from torchdali.pipeline.engine import PipelineRunner, RunTimeoutError
from torchdali.pipeline.parts import count_decoded_bytes, split
from torchdali.pipeline.readers import ScanTimeoutError, decode_with_pil
from torchdali.runtime import machine
from torchdali.runtime.exceptions import EpochEndedError, defer
from torchdali.runtime.threads import DaemonThreadPoolExecutor
from torchdali.transforms.spec import IntArray

__all__ = ["PartFeeder"]

_HELD_RUNS = 2
"""The files and PIL's pixels of all parts in flight take at most as much memory as so many runs."""
_OPEN_SHARE = 6
"""The most images of PIL in a run, if each is an open file: one for so many that the process may open. DALI opens all
files of a run at once, too."""


class PartFeeder:
    """Feeds the parts of batches, each of which is a run."""

    def __init__(self) -> None:
        self._held_bytes = 0
        self._threads: DaemonThreadPoolExecutor | None = None

    def split(self, batch: Batch) -> deque[slice]:
        """Return the parts of a batch whose parameters were drawn."""
        if not batch.pool.plan.needs_decoding:
            return deque([slice(0, len(batch.rows))])
        held = count_decoded_bytes(batch.size) + batch.reader.file_bytes(batch.rows)
        if batch.reader.opens_files:
            by_pil = batch.reader.find_pil_only(batch.rows)
            held[by_pil] = np.maximum(held[by_pil], _weigh_open_file(batch))
        return deque(split(held, batch.pool.decode_bytes))

    def feed_ready(self, batches: Sequence[Batch]) -> None:
        """Feed the parts whose files are decoded, in order, and begin to decode others while there is room.

        An error is kept until its batch's turn.
        """
        for act in (self._begin_parts, self._feed_parts):
            for batch in batches:
                if not self._try(act, batch):
                    break

    def feed(self, batch: Batch, timeout: float) -> None:
        """Feed the parts of the batch that is due. Wait for the next one if none is in flight.

        Args:
            batch: The batch. It has parts left, or runs in flight.
            timeout: Seconds to wait at most; 0 waits as long as it takes.

        Raises:
            SampleError: PIL cannot decode a file.
            RunTimeoutError: It does not in time.
        """
        self._begin_parts(batch)
        if not batch.runs:
            if not batch.begun:
                self._begin(batch)
            self._feed(batch, timeout)
        self._feed_parts(batch)

    def feed_alone(self, batch: Batch, runner: PipelineRunner, place: slice, by_pil: IntArray) -> None:
        """Feed a part of a batch that runs again, and wait for PIL before. ``by_pil`` has positions in the batch."""
        part = self._make_part(batch, place, by_pil[(by_pil >= place.start) & (by_pil < place.stop)] - place.start)
        part.decoding.wait()
        _submit(batch, runner, part)

    def release(self, held: int) -> None:
        """Return the memory of a run that was taken."""
        self._held_bytes -= held

    def drop(self, batch: Batch) -> None:
        """Drop the parts of a batch that were not fed."""
        self._held_bytes -= sum(part.held for part in batch.begun)
        batch.parts.clear()
        batch.begun.clear()

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._held_bytes = 0
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _try(self, act: Callable[[Batch], bool], batch: Batch) -> bool:
        try:
            return act(batch)
        except EpochEndedError:
            raise
        except Exception as error:  # noqa: BLE001 - raised in the batch's turn
            self.drop(batch)
            batch.error = defer(error)
            return True

    def _begin_parts(self, batch: Batch) -> bool:
        """Begin the parts for which there is room. Return whether that is all."""
        while batch.parts and self._begin(batch, self._held_bytes):
            pass
        return not batch.parts

    def _begin(self, batch: Batch, others: int = 0) -> bool:
        """Begin the next part of a batch, unless it and ``others`` take too much memory. Return whether it did."""
        place, reader = batch.parts[0], batch.reader
        rows, size = batch.rows[place], batch.size[place]
        by_pil = reader.find_pil_only(rows)
        pixels, limit = count_decoded_bytes(size[by_pil]), batch.pool.decode_bytes
        if reader.opens_files:
            pixels = np.maximum(pixels, _weigh_open_file(batch))
        held = int(reader.file_bytes(rows).sum() + pixels.sum())
        if held and others and others + held > _HELD_RUNS * limit:
            return False
        part = self._make_part(batch, place, by_pil)
        part.held = held
        batch.parts.popleft()
        batch.begun.append(part)
        self._held_bytes += held
        return True

    def _make_part(self, batch: Batch, place: slice, by_pil: IntArray) -> Part:
        pixels, decoding = decode_with_pil(batch.reader, batch.rows[place], by_pil, self._get_threads)
        return Part(place, pixels, decoding)

    def _feed_parts(self, batch: Batch) -> bool:
        """Feed the parts whose files are decoded. Return whether that is all."""
        while batch.begun and batch.begun[0].decoding.is_done():
            self._feed(batch, 0)
        return not (batch.begun or batch.parts)

    def _feed(self, batch: Batch, timeout: float) -> None:
        part, runner = batch.begun[0], batch.runner
        assert runner is not None
        try:
            part.decoding.wait(timeout or None)
        except ScanTimeoutError as error:
            raise RunTimeoutError from error
        number = _submit(batch, runner, part)
        batch.begun.popleft()
        batch.runs.append((number, part.held))

    def _get_threads(self) -> Executor:
        if self._threads is None:
            self._threads = DaemonThreadPoolExecutor(machine.count_available_cores(), "torchdali-pil")
        return self._threads


def _weigh_open_file(batch: Batch) -> int:
    """Return the bytes that an open file counts as, so that one limit holds both."""
    return batch.pool.decode_bytes * _OPEN_SHARE // machine.max_open_files()


def _submit(batch: Batch, runner: PipelineRunner, part: Part) -> int:
    """Schedule a part of a batch. Return the number of its run."""
    rows, inputs = batch.rows, batch.inputs
    if len(rows) > part.place.stop - part.place.start:
        rows, inputs = rows[part.place], {name: x[part.place] for name, x in inputs.items()}
    with ExitStack() as resources:
        return runner.submit(batch.reader.read_inputs(rows, part.pixels, resources), inputs, resources)
