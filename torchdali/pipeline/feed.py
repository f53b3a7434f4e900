"""The prefetcher: it schedules runs of DALI for batches of indices, and returns their images in order.

Everything here happens in the thread that iterates. DALI's runs are asynchronous, so scheduling takes one to two
milliseconds a batch. No thread of torchdali can outlive an epoch or hide an exception. What a worker has drawn for its
batch is not drawn again.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from torchdali.errors import PipelineError, SampleError
from torchdali.pipeline.batch import Batch
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.engine import PipelineRunner, RunOutputs, RunTimeoutError
from torchdali.pipeline.part_feeder import PartFeeder
from torchdali.pipeline.parts import count_decoded_bytes, join_outputs
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import MaskReader, ScanTimeoutError, group_masks, put_decoded
from torchdali.pipeline.tuning import choose_pinned_bytes
from torchdali.pipeline.windows import move_window
from torchdali.runtime import devices, machine
from torchdali.runtime.exceptions import CLOSED, NEW_EPOCH, EpochEndedError, defer
from torchdali.runtime.threads import DaemonThreadPoolExecutor
from torchdali.transforms import SampleTransformError
from torchdali.transforms.spec import InputKind, IntArray
from torchdali.transforms.targets.stored import EncodedMask

__all__ = ["Batch", "Prefetcher"]

_SCAN_THREADS = 16
_FIRST_DEPTH = 3
"""Batches in flight until two were returned. An iterator may be asked for one batch alone, and the first is urgent."""

_SECONDS_WAITED = 5.0
"""A second pipeline is built if a loop waits so long by the epoch's end. It takes half a second, and saves a tenth."""
_FREE_RUNS = 8
"""A second pipeline is built if the device has free memory for the decoded images of so many runs."""
_OPEN_RUNS = 3
"""A second pipeline is built if the files of so many runs may be open: of two runs, and of one for all else."""


class Prefetcher:
    """The batches of one epoch.

    Args:
        prefetch_depth: Batches in flight.
        timeout: Seconds that a batch may take; 0 means no limit.
        clock: The clock of the epoch, if it has one.
        runs_in_flight: Number of runs that a pipeline will have in flight, if it is not ``prefetch_depth``.
    """

    def __init__(
        self, prefetch_depth: int, timeout: float, clock: Clock | None = None, runs_in_flight: int | None = None
    ) -> None:
        self._prefetch_depth, self._timeout = prefetch_depth, timeout
        self._runs_in_flight = runs_in_flight or prefetch_depth
        self._clock = clock or Clock(torch.device("cpu"))
        self._waiting: deque[Batch] = deque()
        self._in_flight: deque[Batch] = deque()
        self._feeder = PartFeeder()
        self._runners: list[tuple[PipelinePool, PipelineRunner]] = []
        self._teams: dict[PipelinePool, list[PipelineRunner]] = {}  # those that take new batches
        self._threads: DaemonThreadPoolExecutor | None = None
        self._num_returned = prefetch_depth if runs_in_flight else 0  # if so, the caller limits what is in flight
        self._has_decided = False  # about a second pipeline
        self._ended = ""
        self._timed_out = f"DataLoader timed out after {timeout} seconds; {NEW_EPOCH}"

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_flight)

    def put(self, batch: Batch) -> None:
        """Add a batch. Its run is scheduled as soon as there is room."""
        self._check()
        with devices.use(batch.pool.plan.device):
            self._waiting.append(batch)
            self._start_scans()
            self._schedule_ready()

    def get(self) -> Batch:
        """Return the next batch.

        Raises:
            SampleError: A file of it is missing, damaged, truncated or cannot be transformed.
            PipelineError: DALI failed on it for another reason.
            EpochEndedError: It took longer than the timeout, or an earlier call was interrupted.
        """
        self._check()
        with devices.use((self._in_flight or self._waiting)[0].pool.plan.device):
            if not self._in_flight:
                self._schedule()
            batch = self._in_flight[0]
            failure: Exception | None = None
            try:
                self._finish(batch)
            except EpochEndedError:
                self._give_up_others()
                raise
            except Exception as error:  # noqa: BLE001 - raised when the next runs are scheduled
                failure = error
            self._in_flight.popleft()
            self._num_returned += 1
            self._start_scans()
            self._schedule_ready()  # outside the `except`: else this error becomes the context of later ones
            try:
                if failure:
                    raise failure
                return batch
            finally:
                del failure

    def _check(self) -> None:
        if self._ended:
            raise EpochEndedError(self._ended)

    def end(self) -> None:
        """Close, and let later calls raise that the epoch was closed."""
        self.close()
        self._ended = CLOSED

    def close(self) -> None:
        """Drop the batches in flight and release the runners."""
        self._waiting.clear()
        self._in_flight.clear()
        self._feeder.close()
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        for pool in self._teams:
            pool.seconds_waited += self._clock.timed.waited
            if self._clock.is_loop_slower:
                pool.keep_one()
        self._teams.clear()
        while self._runners:
            pool, runner = self._runners.pop()
            pool.release(runner)

    def _scan_threads(self) -> DaemonThreadPoolExecutor:
        if self._threads is None:
            self._threads = DaemonThreadPoolExecutor(_SCAN_THREADS, "torchdali-scan")
        return self._threads

    def _start_scans(self) -> None:
        """Start the scans of the waiting batches. Those of videos hold frames, so they wait for their batch's turn."""
        self._clock.lap("feed")
        for batch in self._waiting:
            if batch.is_started or (batch.pool.plan.num_frames and self._num_scans > self._prefetch_depth):
                continue
            self._start_scan(batch)
        self._clock.lap("headers")

    @property
    def _num_scans(self) -> int:
        """Number of batches whose scan was started, and that are not done."""
        return len(self._in_flight) + sum(batch.is_started for batch in self._waiting)

    def _start_scan(self, batch: Batch) -> None:
        batch.is_started = True
        try:
            batch.reader = batch.reader.bind_draws(batch.draws, batch.pool.plan)
            batch.scan = batch.reader.scan(batch.rows, self._scan_threads)
            if batch.collect:
                batch.collect.read_ahead(batch.rows, batch.scan, self._scan_threads)
        except Exception as error:  # noqa: BLE001 - raised in the batch's turn
            batch.error = defer(error)

    def _schedule_ready(self) -> None:
        """Schedule the batches that need no waiting."""
        self._feed_ready()
        while self._waiting and len(self._in_flight) < self._depth:
            scan = self._waiting[0].scan
            if not self._waiting[0].is_started or (scan and not scan.is_done()):
                return
            self._schedule()
            self._feed_ready()

    @property
    def _depth(self) -> int:
        """Batches that may be in flight now."""
        return self._prefetch_depth if self._num_returned > 1 else min(self._prefetch_depth, _FIRST_DEPTH)

    def _feed_ready(self) -> None:
        pending = [one for batch in self._in_flight for one in (batch, *batch.masks) if one.parts or one.begun]
        if pending:
            self._feeder.feed_ready(pending)

    def _schedule(self) -> None:
        """Draw the next batch's parameters and split it. Keep an error until its turn."""
        batch = self._waiting[0]
        if not batch.is_started:
            self._start_scan(batch)
        self._in_flight.append(batch)
        self._waiting.popleft()
        if batch.error:
            return
        try:
            self._prepare(batch)
            if len(batch.rows):
                self._begin(batch)
            batch.masks = []  # not those of the batch that this one is a copy of
            for reader in group_masks(batch.targets):
                rows, pool = np.arange(len(reader.masks)), batch.pool.get_masks(reader.masks[0].dtype)
                batch.masks.append(Batch(reader, pool, rows, batch.draws, size=reader.sizes(rows)))
                self._begin(batch.masks[-1])
        except EpochEndedError:
            raise
        except Exception as error:  # noqa: BLE001 - raised in the batch's turn
            batch.error = defer(error)

    def _begin(self, batch: Batch) -> None:
        batch.runner = self._get_runner(batch)
        batch.parts, batch.begun, batch.runs = self._feeder.split(batch), deque(), deque()

    def _prepare(self, batch: Batch) -> None:
        if batch.scan:
            self._clock.lap("feed")
            try:
                batch.scan.wait(self._timeout or None)
            except ScanTimeoutError as error:
                raise EpochEndedError(self._timed_out) from error
            self._clock.lap("headers")
        try:
            self._draw(batch)
        except SampleTransformError as error:
            row = error.row // batch.pool.plan.num_images
            raise batch.reader.error(int(batch.rows[row]), str(error)) from error

    def _draw(self, batch: Batch) -> None:
        plan, reader = batch.pool.plan, batch.reader
        batch.size = reader.sizes(batch.rows)
        if drawn := reader.get_drawn(batch.rows, batch.size):
            inputs, batch.targets = drawn
        else:
            batch.targets = batch.collect(batch) if batch.collect else reader.targets(batch.rows)
            draws, size = plan.expand_frames(reader.add_params(batch.draws), batch.size)
            inputs, batch.params = plan.draw(draws, size, batch.targets)
        batch.inputs = move_window(plan, inputs, reader.origins(batch.rows))

    def _take(self, batch: Batch) -> RunOutputs:
        """Return the outputs of a batch. Take all runs of it, also after one failed, because others follow.

        Raises:
            RuntimeError, MemoryError: A run failed.
            Exception: The error of the batch.
        """
        runner, outputs, failure = batch.runner, list[RunOutputs](), batch.error and batch.claim_error()
        if failure:
            self._feeder.drop(batch)
        while runner and (batch.runs or batch.begun or batch.parts):
            try:
                self._feeder.feed(batch, self._timeout)
                number, held = batch.runs.popleft()
                self._feeder.release(held)
                outputs.append(runner.take(self._timeout, number))
            except (EpochEndedError, RunTimeoutError):
                raise
            except Exception as error:  # noqa: BLE001 - raised after the other runs
                failure = failure or error
                self._feeder.drop(batch)
        if not failure:
            return join_outputs(outputs)
        try:
            raise failure
        finally:
            del failure

    def _get_runner(self, batch: Batch) -> PipelineRunner:
        """Return the runners by turns. Add a second one if the training loop waits for the first."""
        team = self._teams.get(batch.pool, [])
        runners = [runner for runner in team if runner.batch_size >= batch.num_images and not runner.broken]
        if runners and (len(runners) > 1 or not (batch.pool.has_spare or self._needs_second(batch))):
            team.remove(runners[0])
            team.append(runners[0])
            return runners[0]
        reader = batch.reader
        pinned = choose_pinned_bytes(int(reader.file_bytes(batch.rows).sum()), self._runs_in_flight)
        largest = max([batch.num_images, *(runner.batch_size for runner in runners)])
        runner = batch.pool.acquire(largest, reader.input_stats(), pinned, len(runners) + 1)
        self._runners.append((batch.pool, runner))
        self._teams[batch.pool] = [*runners, runner]
        return runner

    def _needs_second(self, batch: Batch) -> bool:
        """Return whether a second pipeline makes batches faster, and there is room for it. Decide once an epoch."""
        pool = batch.pool
        if self._has_decided or not self._clock.waits_for_dali:
            return False
        if pool.seconds_waited + self._clock.expected_wait < _SECONDS_WAITED:
            return False
        self._has_decided = True
        if pool.plan.input_kind is InputKind.FILES and _OPEN_RUNS * batch.num_images > machine.max_open_files():
            return False  # DALI opens all files of a run at once
        run = min(int(count_decoded_bytes(batch.size).sum()), pool.decode_bytes)
        has_room = machine.free_memory(pool.plan.device) > _FREE_RUNS * run
        return has_room and pool.is_faster_with_two(batch.reader.input_stats())

    def _give_up_others(self) -> None:
        """Give up the runs beside one that did not end: they may wait for the same storage, or the same lock."""
        if any(runner.is_abandoned for _, runner in self._runners):
            for _, runner in self._runners:
                runner.give_up()

    def _finish(self, batch: Batch) -> None:
        if batch.runner is None and batch.error is None:
            return
        reader = batch.reader
        try:
            decoded = [pair for masks in batch.masks for pair in self._take_masks(masks)]  # first: they must be taken
            outputs = self._take_outputs(batch)
        except RunTimeoutError as error:
            raise EpochEndedError(self._timed_out) from error
        batch.views = outputs.views
        reader.check_endings(batch.rows, outputs.endings)
        if batch.masks and batch.targets:
            device = batch.pool.plan.device
            put_decoded(
                batch.targets, decoded, device, lambda i: reader.blame(int(batch.rows[i]), "decoded with its mask")
            )

    def _take_masks(self, batch: Batch) -> list[tuple[EncodedMask, torch.Tensor]]:
        """Return mask files with their pixels; nothing if DALI failed."""
        assert isinstance(batch.reader, MaskReader)
        try:
            return list(zip(batch.reader.masks, self._take(batch).views[0], strict=True)) if batch.runner else []
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, EpochEndedError):
                raise
            return []

    def _take_outputs(self, batch: Batch) -> RunOutputs:
        """Return the outputs of a run. If it failed, or files have changed, run the batch again."""
        try:
            self._clock.lap("feed")
            outputs = self._take(batch)
            self._clock.lap("DALI")
        except (SampleError, EpochEndedError):
            raise
        except (RuntimeError, MemoryError):
            return self._run_again(batch)
        return self._run_again(batch) if batch.reader.has_changed(batch.rows, outputs.lengths, batch.size) else outputs

    def _run_again(self, batch: Batch) -> RunOutputs:
        """Run a batch again after it failed or its files changed, and find the sample at fault.

        A sample that PIL reads and DALI does not is read by PIL from now on.
        """
        reader, rows = batch.reader, batch.rows
        for row in rows.tolist():
            reader.check(row)
        reader.forget(rows)
        batch.scan = reader.scan(rows, self._scan_threads)
        self._prepare(batch)
        runner = batch.pool.make(batch.num_images, threads=1)
        pil_only = reader.find_pil_only(rows)
        outputs = self._try_run(runner, batch, pil_only)
        if isinstance(outputs, RunOutputs):
            return outputs
        native = np.setdiff1d(np.arange(len(rows)), pil_only)
        refused = [position for position in native.tolist() if not self._is_valid_alone(runner, batch, position)]
        outputs = self._try_run(runner, batch, np.union1d(pil_only, np.array(refused, np.int64)))
        if not isinstance(outputs, RunOutputs):
            blamed = refused or list(range(len(rows)))
            names = "; ".join(reader.name(int(rows[position])) for position in blamed[:3])
            raise PipelineError(
                f"DALI failed on {len(blamed)} of {len(rows)} samples ({names}): {outputs}"
            ) from outputs
        for position in refused:
            reader.mark_pil_only(int(rows[position]))
        return outputs

    def _is_valid_alone(self, runner: PipelineRunner, batch: Batch, position: int) -> bool:
        only, count = slice(position, position + 1), batch.pool.plan.num_images
        alone = Batch(batch.reader, batch.pool, batch.rows[only], batch.draws)
        images = slice(position * count, (position + 1) * count)
        alone.size, alone.inputs = batch.size[only], {name: x[images] for name, x in batch.inputs.items()}
        return isinstance(self._try_run(runner, alone, np.empty(0, np.int64)), RunOutputs)

    def _try_run(self, runner: PipelineRunner, batch: Batch, by_pil: IntArray) -> RunOutputs | Exception:
        """Run a batch alone. Return its outputs, or the error that DALI raised."""
        outputs: list[RunOutputs] = []
        try:
            for place in self._feeder.split(batch):
                self._feeder.feed_alone(batch, runner, place, by_pil)
                outputs.append(runner.take())
        except EpochEndedError:
            raise
        except (RuntimeError, MemoryError) as error:
            return error
        return join_outputs(outputs)
