"""``cache="host"`` for what is fetched of object stores."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchdali.pipeline.cache.base import Cache, choose_budget, mib
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.feed import Prefetcher

__all__ = ["Bytes", "HostObjects", "ObjectCache"]

Bytes = npt.NDArray[np.uint8]


class ObjectCache(Cache):
    """A cache of objects and of parts of them, by their names, ETags and places. The source looks them up."""

    def make_prefetcher(self, prefetch_depth: int, timeout: float, sampler: Any, clock: Clock) -> Prefetcher:
        return Prefetcher(prefetch_depth, timeout, clock)

    @abstractmethod
    def get(self, key: tuple[object, ...]) -> Bytes | None:
        """See :class:`torchdali.sources.source.ContentCache`."""

    @abstractmethod
    def add(self, key: tuple[object, ...], content: Bytes) -> None:
        """See :class:`torchdali.sources.source.ContentCache`."""


class HostObjects(ObjectCache):
    """Objects in host memory. One that does not fit is fetched again in every epoch.

    Args:
        state: As for :class:`Cache`.
        budget: As for :class:`Cache`.
    """

    def __init__(self, state: object, budget: int | None) -> None:
        super().__init__(state, budget)
        self._budget = budget
        self._contents: dict[Any, Bytes] = {}
        self._used = 0

    def get(self, key: tuple[object, ...]) -> Bytes | None:
        return self._contents.get(key)

    def add(self, key: tuple[object, ...], content: Bytes) -> None:
        with self._lock:
            if self._budget is None:
                self._budget = choose_budget(torch.device("cpu"))
            if key in self._contents or self._used + len(content) > self._budget:
                return
            self._used += len(content)
        copy: Bytes = np.array(content)  # what was fetched may be a part of a larger block
        copy.flags.writeable = False
        self._contents[key] = copy

    def close(self) -> None:
        with self._lock:
            self._contents, self._used, self._budget = {}, 0, 0

    def describe(self) -> str:
        most = "half of what is free when it begins" if self._budget is None else mib(self._budget)
        return f"{len(self._contents):,} objects, in host memory: {mib(self._used)} of at most {most}"
