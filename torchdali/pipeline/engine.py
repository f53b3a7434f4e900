"""The runner of a pipeline: its inputs, its runs in flight, and what happens at a fork."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchdali.pipeline import dlpack, graph
from torchdali.pipeline.host_calls import FORKED, limit_wait
from torchdali.pipeline.plan import Plan
from torchdali.runtime import devices, lifecycle
from torchdali.runtime.events import Event
from torchdali.runtime.exceptions import INTERRUPTED, EpochEndedError, is_raised_by_dali
from torchdali.runtime.threads import DaemonThreadPoolExecutor

__all__ = ["PipelineRunner", "RunOutputs", "RunTimeoutError", "Views"]

Views = list[dlpack.Images]

_NOTHING: npt.NDArray[Any] = np.empty((0, 0), np.uint8)
_leaked: list[ExitStack] = []


class RunOutputs(NamedTuple):
    """The outputs of one run.

    Attributes:
        views: For each view of the plan its images: one tensor, or one per sample if shapes differ.
        endings: ``(N, 2)`` the last two bytes of each file; empty if no paths were fed.
        lengths: ``(N, 1)`` the length of each file in bytes; likewise.
    """

    views: Views
    endings: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]


class RunTimeoutError(Exception):
    """A run did not finish in time."""


class PipelineRunner(lifecycle.Resource):
    """A built pipeline and its scheduled runs.

    Args:
        plan: The plan that it runs.
        batch_size: Maximum number of samples in a run.
        threads: Number of DALI's CPU threads.
        resident: Whether pixels are fed from the device's own memory.

    Attributes:
        broken: Whether it cannot be used any more: interrupted, timed out, closed, or inherited by a forked process.
        is_abandoned: Whether a run of it did not end, or another runner's.
    """

    def __init__(self, plan: Plan, batch_size: int, threads: int, resident: bool = False) -> None:
        self.batch_size, self.threads = batch_size, threads
        self._views = len(plan.views)
        self._input_kind = plan.input_kind
        self._resources: deque[ExitStack] = deque()
        self._unreleased: deque[tuple[Event | None, ExitStack]] = deque()
        self.broken = self.is_abandoned = self._closed = self._is_inherited = False
        self._num_submitted = self._num_taken = 0
        self._device = plan.device
        with devices.use(plan.device):
            self._pipeline: Any = graph.build(plan, batch_size, threads, resident)
        lifecycle.install_exit_hook()
        super().__init__()

    def renew(self) -> None:
        """See :class:`torchdali.runtime.lifecycle.Resource`."""
        self.broken = self._is_inherited = True

    @property
    def in_flight(self) -> int:
        """Number of runs that were scheduled and not taken."""
        return len(self._resources)

    def submit(self, images: Any, inputs: Mapping[str, Any], resources: ExitStack | None = None) -> int:
        """Schedule a run, without waiting for it. Return the run's number.

        Args:
            images: The batch, in the form that the plan's ``input_kind`` says. DALI does not copy an array on the
                host, so it must not change.
            inputs: The parameters that the plan feeds.
            resources: Closed when the run is done. The runner takes them over.
        """
        with self._end_epoch_on_error():
            self._release_finished()
            kept = self._pipeline.feed_images(self._input_kind.value, images)
            for name, value in inputs.items():
                self._pipeline.feed_array(name, value)
            stack = resources.pop_all() if resources else ExitStack()
            stack.callback(_keep_until_done, images, kept)
            self._resources.append(stack)  # before DALI reads it: an interrupt may come as soon as it does
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
            EpochEndedError: The oldest run is another one, because an earlier call was interrupted. Or the process was
                forked, and DALI waits for a lock without end.
            RunTimeoutError: It did not finish in time. The runner cannot be used any more.
        """
        with self._end_epoch_on_error():
            if number not in (None, self._num_taken + 1) or not self._resources:
                raise EpochEndedError(INTERRUPTED)
            outputs = self._take(timeout)
        try:
            if isinstance(outputs, Exception):
                raise outputs
            return outputs
        finally:
            del outputs  # CPython: the traceback of a raised exception refers to this frame, which would be a cycle

    @contextmanager
    def _end_epoch_on_error(self) -> Generator[None, None, None]:
        """End the epoch, and mark the runner as broken, if the block raises: DALI may have done half of a call."""
        if self._closed:  # by a cache that was replaced; the prefetcher then runs the batch again
            raise RuntimeError("the runner was closed with this run in flight")
        if self.broken:
            raise EpochEndedError(INTERRUPTED)
        self.broken = True
        with lifecycle.native_call(), devices.use(self._device):
            try:
                yield
            except (EpochEndedError, RunTimeoutError):
                raise
            except Exception as error:
                raise EpochEndedError(INTERRUPTED) from error
        self.broken = False

    def _take(self, timeout: float) -> RunOutputs | Exception:
        """Return the result of the oldest run, or what DALI raised in it."""
        stream = dlpack.get_stream(self._device)

        def share() -> Any:
            with devices.use(self._device):  # in the thread that waits, too
                return self._pipeline.share_outputs(stream)

        limit = timeout or limit_wait(self._pipeline.host_calls)
        try:
            outputs = _call_with_timeout(limit, share) if limit else share()
        except RunTimeoutError as error:
            self._abandon()
            if not timeout:
                raise EpochEndedError(FORKED) from error
            raise
        except (RuntimeError, MemoryError, UnicodeDecodeError) as error:
            if not is_raised_by_dali(error):
                raise
            self._num_taken += 1
            self._resources.popleft().close()
            # DALI's message contains the file's name. Its binding raises UnicodeDecodeError if that is not UTF-8.
            return RuntimeError(str(error)) if isinstance(error, UnicodeDecodeError) else error
        views: Views = [dlpack.to_torch(outputs[i], stream) for i in range(self._views)]
        file_info = [dlpack.to_array(outputs[i]) for i in range(self._views, len(outputs))]
        self._pipeline.release_outputs()
        self._num_taken += 1
        self._unreleased.append((stream.record_event(Event()) if stream else None, self._resources.popleft()))
        self._release_finished()
        return RunOutputs(views, *(file_info or (_NOTHING, _NOTHING)))

    def _release_finished(self) -> None:
        """Close the resources of finished runs. On a GPU, copies may still be running when outputs are shared."""
        while self._unreleased and (self._unreleased[0][0] is None or self._unreleased[0][0].query()):
            self._unreleased.popleft()[1].close()

    def give_up(self) -> None:
        """Give up the runs in flight, if there are any. The runner cannot be used any more then."""
        if self.in_flight:
            self.broken = True
            self._abandon()

    def _abandon(self) -> None:
        """Leak the pipeline and the files of its runs. A closed descriptor could be reused while DALI reads from it."""
        self.is_abandoned = True
        graph.leak(self._pipeline)
        _leaked.extend(self._resources)
        self._resources.clear()

    def drain(self) -> None:
        """Wait for the runs in flight and drop their results and errors."""
        while self.in_flight and not self.broken:
            with suppress(RuntimeError, MemoryError):
                self.take()

    def close(self) -> None:
        """Wait for the runs in flight, drop them, and free the pipeline's threads and memory."""
        if not lifecycle.hand_over(self._close):
            self._close()

    def _close(self) -> None:
        self.broken = self._closed = True
        if self._is_inherited:
            return  # a forked process frees nothing, and must not call CUDA
        if devices.has_failed(self._device.index):
            self._resources.extend(stack for _, stack in self._unreleased)
            self._unreleased.clear()
            self._abandon()
        with devices.use(self._device):
            self._pipeline.close()
            for event, stack in self._unreleased:
                if event:
                    event.synchronize()
                self._resources.append(stack)
        self._unreleased.clear()
        while self._resources:
            self._resources.popleft().close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_pipeline") and not finalizing():  # at exit DALI has already shut its pipelines down
            self.close()


def _keep_until_done(images: Any, kept: Any) -> None:
    """Do nothing. As a callback it keeps alive what was fed: DALI reads it without a copy."""


def _call_with_timeout(timeout: float, call: Callable[[], Any]) -> Any:
    """Run ``call`` in a thread and return its result. Abandon the thread if it does not return in time."""
    thread = DaemonThreadPoolExecutor(1, "torchdali-wait")
    future = thread.submit(call)
    thread.shutdown(wait=False)
    if not futures.wait([future], timeout).done:
        raise RunTimeoutError
    try:
        return future.result()
    finally:
        del future  # its error's traceback would hold this frame in a cycle
