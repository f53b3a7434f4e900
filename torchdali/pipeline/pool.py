"""Pools of pipelines, which outlive an epoch: one pool for each plan, or for each kind of image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from torchdali.pipeline import graph
from torchdali.pipeline.compile import compile_plan, fuse
from torchdali.pipeline.engine import PipelineRunner
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.plans import PlanCache, PlanKey
from torchdali.pipeline.tuning import Threads, choose_decode_bytes
from torchdali.runtime import machine
from torchdali.transforms.spec import NO_INPUT_STATS, InputKind, InputStats, Spec

__all__ = ["InputKey", "PipelineCache", "PipelinePool"]

InputKey = tuple[Spec, InputKind, bool]
"""The type of images, how they are fed, and whether they are on the device already."""


class PipelinePool:
    """Idle runners for the next epoch, so that only the first epoch builds a pipeline.

    Args:
        plan: The plan that they run.
        batch_size: The batch size that the loader declares.
        threads: Chooses the number of CPU threads of a runner.
        resident: Whether pixels are fed from the device's own memory.
        decode_bytes: Maximum bytes of the files and decoded images of a run. None lets the pool choose.

    Attributes:
        plan: See above.
        decode_bytes: See above.
        seconds_waited: How long the training loop waited in the epochs that used the pool.
    """

    def __init__(
        self, plan: Plan, batch_size: int, threads: Threads, resident: bool = False, decode_bytes: int | None = None
    ) -> None:
        self.plan = plan
        self.decode_bytes = decode_bytes or choose_decode_bytes(machine.free_memory(plan.device))
        self._resident = resident
        self._batch_size = batch_size
        self._threads = threads
        self._following: dict[Spec, PipelinePool] = {}
        self._masks: dict[torch.dtype, PipelinePool] = {}
        self._idle: list[PipelineRunner] = []
        self._num_kept = 1
        self.seconds_waited = 0.0
        # The pool holds a runner while an epoch uses it. Otherwise the garbage collector could find the epoch and its
        # runner together, and finalise the pipeline before the epoch releases it.
        self._in_use: set[PipelineRunner] = set()

    def acquire(
        self, batch_size: int, stats: InputStats = NO_INPUT_STATS, pinned: int = 0, number: int = 1
    ) -> PipelineRunner:
        """Return a runner with nothing in flight: an idle one, or else a new one.

        Args:
            batch_size: Maximum number of samples in a run.
            stats: Statistics of the files that were read so far.
            pinned: Bytes of pinned memory that its runs are expected to take on their way to a GPU.
            number: Number of runners that the epoch then has. So many are kept for later ones.
        """
        self._num_kept = max(self._num_kept, number)
        threads = self._threads.choose(stats)
        runner = self._reuse(batch_size, threads)
        if runner is None:
            if number == 1:  # of two, each has half of the runs
                graph.reserve_pinned(pinned, self.plan.device)
            runner = self.make(max(batch_size, self._batch_size), threads)
        self._in_use.add(runner)
        return runner

    @property
    def has_spare(self) -> bool:
        """Whether an earlier epoch left a second runner for the next one."""
        return self._num_kept > 1 and bool(self._idle)

    def keep_one(self) -> None:
        """Keep no second runner for the next epoch. Call it before the runners are released."""
        self._num_kept = 1
        self.seconds_waited = 0.0  # so that loops which differ do not build one again and again

    def is_faster_with_two(self, stats: InputStats) -> bool:
        """Return whether two runners are faster than one: a JPEG engine is idle while one runner prepares a batch."""
        return not self.plan.grey and self._threads.needs_few(stats)

    def get_masks(self, dtype: torch.dtype) -> PipelinePool:
        """Return the pipelines that decode the mask files of the images' samples to one channel of ``dtype``."""
        if dtype not in self._masks:
            plan = compile_plan((), self.plan.device, "exact", Spec("image", dtype, 1), InputKind.ENCODED)
            # Of one channel HWC and CHW are the same. The headers were written by torchdali.
            views = (replace(plan.views[0], channels_first=True),)
            plan = replace(plan, views=views, grey=True, headers_validated=True)
            threads = self._threads.adapt_to_input(InputKind.ENCODED)
            self._masks[dtype] = PipelinePool(plan, self._batch_size, threads, decode_bytes=self.decode_bytes)
        return self._masks[dtype]

    def make(self, batch_size: int, threads: int) -> PipelineRunner:
        """Build a runner that is not part of the pool."""
        return PipelineRunner(self.plan, batch_size, threads, self._resident)

    def get_following(self, spec: Spec) -> PipelinePool:
        """Return the pipelines of what follows the plan's cut.

        Args:
            spec: The type of the images that the transform at the cut returned.
        """
        cut, plan = self.plan.cut, self.plan
        assert cut is not None
        pool = self._following.get(spec)
        if pool is None:
            after = compile_plan(
                list(cut.chain),
                plan.device,
                plan.fidelity,
                spec,
                InputKind.PIXELS,
                cut.until,
                start=cut.position,
                number=cut.number + 1,
            )
            threads, resident = self._threads.adapt_to_input(InputKind.PIXELS), plan.device.type == "cuda"
            pool = PipelinePool(fuse(after), self._batch_size, threads, resident, self.decode_bytes)
            self._following[spec] = pool
        return pool

    def _reuse(self, batch_size: int, threads: int) -> PipelineRunner | None:
        while self._idle:
            runner = self._idle.pop()
            if runner.batch_size >= batch_size and runner.threads >= threads:
                runner.drain()
                if not runner.broken:
                    return runner
            runner.close()
        return None

    def close(self) -> None:
        """Free the threads and memory of all runners. Those in use are broken from then on."""
        for runner in (*self._idle, *self._in_use):
            runner.close()
        self._idle.clear()
        self._in_use.clear()
        for pool in (*self._following.values(), *self._masks.values()):
            pool.close()
        self._following.clear()

    def close_idle(self) -> bool:
        """Free the threads and memory of idle runners. Return whether there were any, not counting inherited ones."""
        closed = not all(runner.broken for runner in self._idle)
        for masks in self._masks.values():
            closed |= masks.close_idle()
        while self._idle:
            self._idle.pop().close()
        return closed

    def release(self, runner: PipelineRunner) -> None:
        """Return a runner to the pool. Its runs in flight are dropped when it is next acquired."""
        self._in_use.discard(runner)
        if runner.broken or len(self._idle) >= self._num_kept:
            runner.close()
        else:
            self._idle.append(runner)


class PipelineCache:
    """The pipelines of a transform, for each kind of image.

    Args:
        plans: The plans of the transform.
        device: Where DALI runs.
        batch_size: The batch size to build for. A larger batch builds a new pipeline.
        threads: Number of DALI's CPU threads. With 0 it is chosen.
        decode_bytes: As for :class:`PipelinePool`.

    Attributes:
        plans: See above.
        decode_bytes: See above. It is chosen if it was None.
    """

    def __init__(
        self,
        plans: PlanCache,
        device: torch.device,
        batch_size: int,
        threads: int,
        decode_bytes: int | None = None,
    ) -> None:
        self.plans, self.device, self._threads = plans, device, threads
        self._batch_size = batch_size
        self.decode_bytes = decode_bytes or choose_decode_bytes(machine.free_memory(device))
        self._pools: dict[tuple[InputKey, int | None], PipelinePool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pipelines out. A copy builds its own."""
        return {**self.__dict__, "_pools": {}}

    def __iter__(self) -> Iterator[PlanKey]:
        return iter(dict.fromkeys((spec, input_kind) for (spec, input_kind, _), _ in self._pools))

    def close(self) -> None:
        """Free the pipelines."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def threads(self, input_kind: InputKind) -> Threads:
        """Return DALI's CPU threads for images that are fed in this way."""
        return Threads(self._threads, self.device, input_kind)

    def pool(self, key: InputKey, until: int | None = None) -> PipelinePool:
        """Return the pipelines for one kind of image; ``until`` as for :func:`compile_plan`."""
        pool = self._pools.get((key, until))
        if pool is None:
            spec, input_kind, resident = key
            plan, threads = self.plans.get((spec, input_kind), until), self.threads(input_kind)
            pool = PipelinePool(plan, self._batch_size, threads, resident, self.decode_bytes)
            self._pools[key, until] = pool
        return pool
