"""One running pipeline: what is fed, what is in flight, and what happens to it at a fork."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchdali.pipeline import dlpack, graph
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.tuning import Threads
from torchdali.runtime import devices, lifecycle
from torchdali.runtime.events import Event
from torchdali.runtime.exceptions import INTERRUPTED, EpochEndedError, is_raised_by_dali
from torchdali.transforms.spec import NOTHING_SEEN, InputStats

__all__ = ["PipelinePool", "PipelineRunner", "RunOutputs", "RunTimeoutError", "Views"]

Views = list[dlpack.Images]

_NOTHING: npt.NDArray[Any] = np.empty((0, 0), np.uint8)
_LEFT_BEHIND: list[ExitStack] = []


class RunOutputs(NamedTuple):
    """The outputs of one run.

    Attributes:
        views: For each view of the plan its images: one tensor, or one a sample where shapes differ.
        endings: ``(N, 2)`` the last two bytes of each file; empty where no paths were fed.
        lengths: ``(N, 1)`` bytes that were read of each file; likewise.
    """

    views: Views
    endings: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]


class RunTimeoutError(Exception):
    """A run did not finish in time."""


class PipelineRunner:
    """A built pipeline and the runs that were scheduled in it.

    Args:
        plan: What it runs.
        batch_size: The most samples that a run may have.
        threads: Number of DALI's CPU threads.
        resident: Whether pixels are fed from the device's own memory.
    """

    def __init__(self, plan: Plan, batch_size: int, threads: int, resident: bool = False) -> None:
        self.batch_size, self.threads = batch_size, threads
        self._views = len(plan.views)
        self._entry = plan.entry
        self._held: deque[ExitStack] = deque()
        self._settling: deque[tuple[Event | None, ExitStack]] = deque()
        self._broken = False
        self._num_submitted = self._num_taken = 0
        self._process = os.getpid()
        self._device = plan.device
        with devices.on(plan.device):
            self._pipeline: Any = graph.build(plan, batch_size, threads, resident)
        lifecycle.install_exit_hook()

    @property
    def broken(self) -> bool:
        """Whether it is of no use any more: interrupted, timed out, or inherited by a forked process."""
        return self._broken or self._process != os.getpid()

    @property
    def in_flight(self) -> int:
        """Runs that were scheduled and not taken."""
        return len(self._held)

    def submit(self, images: Any, inputs: Mapping[str, Any], held: ExitStack | None = None) -> int:
        """Schedule a run, without waiting for it. Return the run's number.

        Args:
            images: The batch itself, as the plan's ``entry`` says. On the host it is not copied, and must
                not change.
            inputs: What the plan feeds.
            held: What the run reads; it is taken over, and closed when the run is done.
        """
        with self._whole_call():
            self._settle()
            self._pipeline.feed_input(self._entry, images)
            for name, value in inputs.items():
                self._pipeline.feed_input(name, value)
            stack = held.pop_all() if held else ExitStack()
            stack.callback(_done_with, images)
            self._held.append(stack)  # before DALI reads it: an interrupt may come as soon as it does
            self._pipeline.schedule_run()
            self._num_submitted += 1
            return self._num_submitted

    def take(self, timeout: float = 0, number: int | None = None) -> RunOutputs:
        """Return the result of the oldest run in flight, ready on torch's current stream.

        Args:
            timeout: Seconds to wait at most; 0 waits as long as it takes.
            number: The run that the caller expects, as ``submit`` returned it.

        Raises:
            RuntimeError: The run failed. The runs after it are not harmed.
            EpochEndedError: The oldest run is another one, because an earlier call was interrupted.
            RunTimeoutError: It did not finish in time. The runner cannot be used any more.
        """
        with self._whole_call():
            if number not in (None, self._num_taken + 1) or not self._held:
                raise EpochEndedError(INTERRUPTED)
            outputs = self._take(timeout)
        try:
            if isinstance(outputs, Exception):
                raise outputs
            return outputs
        finally:
            del outputs  # raised, its traceback would hold it in a cycle

    @contextmanager
    def _whole_call(self) -> Generator[None, None, None]:
        """Break the runner, and end the epoch, if an exception leaves the block: DALI may have done half of a call."""
        if self.broken:
            raise EpochEndedError(INTERRUPTED)
        self._broken = True
        with lifecycle.native_call(), devices.on(self._device):
            try:
                yield
            except (EpochEndedError, RunTimeoutError):
                raise
            except Exception as error:
                raise EpochEndedError(INTERRUPTED) from error
        self._broken = False

    def _take(self, timeout: float) -> RunOutputs | Exception:
        """Return the result of the oldest run, or what DALI raised in it."""
        stream = dlpack.stream_of(self._device)

        def share() -> Any:
            with devices.on(self._device):  # in the thread that waits, too
                return self._pipeline.share_outputs(stream)

        try:
            outputs = _within(timeout, share) if timeout else share()
        except RunTimeoutError:
            self._abandon()
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_raised_by_dali(error):
                raise
            self._num_taken += 1
            self._held.popleft().close()
            return error
        views: Views = [dlpack.to_torch(outputs[i], stream) for i in range(self._views)]
        about = [dlpack.to_array(outputs[i]) for i in range(self._views, len(outputs))]
        self._pipeline.release_outputs()
        self._num_taken += 1
        self._settling.append((stream.record_event(Event()) if stream else None, self._held.popleft()))
        self._settle()
        return RunOutputs(views, *(about or (_NOTHING, _NOTHING)))

    def _settle(self) -> None:
        """Gives back what runs have read. On a GPU their copies may still be under way when the outputs are shared."""
        while self._settling and (self._settling[0][0] is None or self._settling[0][0].query()):
            self._settling.popleft()[1].close()

    def _abandon(self) -> None:
        """Leaves the pipeline to itself. What its runs read is never closed: files, or others under their numbers."""
        graph.forget(self._pipeline)
        _LEFT_BEHIND.extend(self._held)
        self._held.clear()

    def drain(self) -> None:
        """Waits for what is in flight and drops it, failures too: nobody asks for it any more."""
        while self.in_flight and not self.broken:
            with suppress(RuntimeError, MemoryError):
                self.take()

    def close(self) -> None:
        """Waits for what is in flight, drops it, and frees the pipeline's threads and memory."""
        self._broken = True
        # In a forked process nothing is freed, and CUDA cannot be asked for the current device.
        here = self._process == os.getpid()
        if here and devices.failed(self._device.index):
            self._held.extend(stack for _, stack in self._settling)
            self._settling.clear()
            self._abandon()
        with devices.on(self._device) if here else nullcontext():
            self._pipeline.close()
            for event, stack in self._settling:
                if event and here:
                    event.synchronize()
                self._held.append(stack)
        self._settling.clear()
        while self._held:
            self._held.popleft().close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_pipeline") and not finalizing():  # DALI has shut its pipelines down by then
            self.close()


class PipelinePool:
    """Engines that wait for their next epoch, so that only the first one pays for building.

    Args:
        plan: What they run.
        batch_size: The batch size that the loader declares.
        threads: Says how many CPU threads an engine gets.
        resident: Whether pixels are fed from the device's own memory.
    """

    def __init__(self, plan: Plan, batch_size: int, threads: Threads, resident: bool = False) -> None:
        self.plan = plan
        self._resident = resident
        self._batch_size = batch_size
        self._threads = threads
        self._idle: list[PipelineRunner] = []
        # Held here while an epoch has them: the garbage collector may find an epoch and its engine together, and
        # would then finalise the pipeline before the epoch could give it back.
        self._leased: set[PipelineRunner] = set()

    def acquire(self, batch_size: int, seen: InputStats = NOTHING_SEEN, pinned: int = 0) -> PipelineRunner:
        """An engine with nothing in flight for batches up to this size; another iterator's if it is done with it.

        Args:
            batch_size: The most samples that a run will have.
            seen: What is known of the files by now.
            pinned: Bytes of pinned memory that its runs are expected to take on their way to a GPU.
        """
        threads = self._threads.number(seen)
        engine = self._reuse(batch_size, threads)
        if engine is None:
            graph.reserve_pinned(pinned, self.plan.device)
            engine = self.make(max(batch_size, self._batch_size), threads)
        self._leased.add(engine)
        return engine

    def make(self, batch_size: int, threads: int) -> PipelineRunner:
        """An engine of one's own."""
        return PipelineRunner(self.plan, batch_size, threads, self._resident)

    def _reuse(self, batch_size: int, threads: int) -> PipelineRunner | None:
        while self._idle:
            engine = self._idle.pop()
            if engine.batch_size >= batch_size and engine.threads >= threads:
                engine.drain()
                if not engine.broken:
                    return engine
            engine.close()
        return None

    def close(self) -> None:
        """Frees the threads and memory of all engines; those that somebody has are of no use any more."""
        for engine in (*self._idle, *self._leased):
            engine.close()
        self._idle.clear()
        self._leased.clear()

    def close_idle(self) -> bool:
        """Frees the threads and memory of the engines that nobody has; whether there were any."""
        closed = bool(self._idle)
        while self._idle:
            self._idle.pop().close()
        return closed

    def release(self, engine: PipelineRunner) -> None:
        """Returns a leased engine; what it has in flight is dropped when it is next leased."""
        self._leased.discard(engine)
        if engine.broken or self._idle:
            engine.close()
        else:
            self._idle.append(engine)


def _done_with(images: Any) -> None:
    """Keeps what was fed alive until here."""


def _within(timeout: float, call: Callable[[], Any]) -> Any:
    """The result of ``call``, from a thread that is left behind if it does not return in time.

    Where there is no thread to be had, this one waits as long as it takes: a run that nobody took would be taken for
    the next one.
    """
    results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:  # noqa: BLE001 - it is raised below, in the thread that asked
            results.put((None, error))

    try:
        threading.Thread(target=run, name="torchdali-wait", daemon=True).start()
    except RuntimeError:  # there can be no more
        return call()
    try:
        result, error = results.get(timeout=timeout)
    except queue.Empty:
        raise RunTimeoutError from None
    if error:
        raise error
    return result
