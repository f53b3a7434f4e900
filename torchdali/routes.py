"""The engines for every kind of image that a transform meets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchdali.compiler import compile_plan, first_of, fuse
from torchdali.engine import EnginePool
from torchdali.plan import Plan
from torchdali.spec import Entry, Fidelity, First, Spec
from torchdali.transforms import flatten
from torchdali.tuning import Threads

__all__ = ["Route", "Routes"]

Route = tuple[Spec, Entry, bool]
"""What images are, how they are fed, and whether they are on the device already."""


class Routes:
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
        self._pools: dict[Route, EnginePool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy, pickled or not, has built nothing yet."""
        return {**self.__dict__, "_pools": {}}

    def __iter__(self) -> Iterator[Route]:
        return iter(self._pools)

    @property
    def first(self) -> First:
        """What the transforms begin with."""
        return first_of(self.chain)

    def close(self) -> None:
        """Frees the engines."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def plan(self, spec: Spec, entry: Entry) -> Plan:
        """What is done with images of one kind."""
        return fuse(compile_plan(self.transform, self.device, self._fidelity, spec, entry))

    def threads(self, entry: Entry) -> Threads:
        """DALI's CPU threads, for images that are fed in this way."""
        return Threads(self._threads, self.device, entry)

    def pool(self, route: Route) -> EnginePool:
        """The engines for images of one kind."""
        pool = self._pools.get(route)
        if pool is None:
            spec, entry, resident = route
            pool = EnginePool(self.plan(spec, entry), self._batch_size, self.threads(entry), resident)
            self._pools[route] = pool
        return pool
