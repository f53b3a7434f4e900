"""The engines for every kind of image that a transform meets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchdali.pipeline.compile import compile_plan, first_of, fuse
from torchdali.pipeline.engine import PipelinePool
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.tuning import Threads
from torchdali.transforms import flatten
from torchdali.transforms.spec import Fidelity, First, InputKind, Spec

__all__ = ["InputKey", "PipelineCache"]

InputKey = tuple[Spec, InputKind, bool]
"""What images are, how they are fed, and whether they are on the device already."""


class PipelineCache:
    """A transform, compiled for one kind of image after the other, when it first comes.

    Args:
        transform: A torchvision transform or a chain of them.
        device: Where DALI runs.
        fidelity: "exact" or "fast".
        batch_size: The batch size to build for; larger batches build anew.
        threads: Number of DALI's CPU threads; 0 lets it be chosen.
    """

    def __init__(self, transform: Any, device: torch.device, fidelity: Fidelity, batch_size: int, threads: int) -> None:
        self.transform, self.device, self._threads = transform, device, threads
        self.chain: tuple[Any, ...] = tuple(flatten(transform))
        self._fidelity: Fidelity = fidelity
        self._batch_size = batch_size
        self._pools: dict[tuple[InputKey, int | None], PipelinePool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy, pickled or not, has built nothing yet."""
        return {**self.__dict__, "_pools": {}}

    def __iter__(self) -> Iterator[InputKey]:
        return iter(dict.fromkeys(route for route, _ in self._pools))

    @property
    def first(self) -> First:
        """What the transforms begin with."""
        return first_of(self.chain)

    def close(self) -> None:
        """Frees the engines."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def plan(self, spec: Spec, input_kind: InputKind, until: int | None = None) -> Plan:
        """What is done with images of one kind; ``until`` as for :func:`compile_plan`."""
        return fuse(compile_plan(self.transform, self.device, self._fidelity, spec, input_kind, until))

    def threads(self, input_kind: InputKind) -> Threads:
        """DALI's CPU threads, for images that are fed in this way."""
        return Threads(self._threads, self.device, input_kind)

    def pool(self, route: InputKey, until: int | None = None) -> PipelinePool:
        """The engines for images of one kind; ``until`` as for :func:`compile_plan`."""
        pool = self._pools.get((route, until))
        if pool is None:
            spec, input_kind, resident = route
            pool = PipelinePool(
                self.plan(spec, input_kind, until), self._batch_size, self.threads(input_kind), resident
            )
            self._pools[route, until] = pool
        return pool

    def pools(self, routes: Sequence[InputKey], together: bool) -> list[PipelinePool]:
        """The engines for images of several kinds.

        Args:
            routes: The kinds.
            together: Whether there are samples with more than one of them, for whose images torchvision draws once.
        """
        pools = [self.pool(route) for route in routes]
        until = _drawn_apart([pool.plan for pool in pools]) if together else None
        return [self.pool(route, until) for route in routes] if until else pools


def _drawn_apart(plans: Sequence[Plan]) -> int | None:
    """Where torch begins for one of the plans, from 1, if after that DALI draws anything for another one.

    The two draw in different ways, and so two crops of one sample's images would be two crops.
    """
    begins = [step.position for plan in plans for step in plan.steps if step.where == "torch"]
    drawn = [step.position for plan in plans for step in plan.steps if step.where == "DALI" and step.randomness]
    return min(begins) if begins and drawn and max(drawn) >= min(begins) else None
