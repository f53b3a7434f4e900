"""The plan of a native dataset, with what runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchdali.pipeline.cache import Cache
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.feed import Prefetcher
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import Reader
from torchdali.pipeline.retry import RetryingPrefetcher
from torchdali.pipeline.tuning import Threads
from torchdali.samples.annotations import LabelsGetters
from torchdali.samples.on_error import ErrorPolicy
from torchdali.sources import Source

__all__ = ["NativePlan"]


@dataclass(frozen=True)
class NativePlan:
    """The plan of a native dataset, and the pipelines that run it.

    Attributes:
        key: The values that the plan depends on.
        reader: Reads the samples.
        pool: The pipelines, and the plan that they run.
        chain: All transforms, in order.
        threads: Chooses the number of DALI's CPU threads.
        prefetch_depth: Number of batches in flight.
        cache: The cache of files or images, if there is one.
        labels_getters: Those of the transforms, which find the labels of boxes.
    """

    key: object
    reader: Reader
    pool: PipelinePool
    chain: tuple[Any, ...]
    threads: Threads
    prefetch_depth: int
    cache: Cache | None = None
    labels_getters: LabelsGetters = ()

    @property
    def source(self) -> Source:
        """The samples."""
        return self.reader.source

    @property
    def plan(self) -> Plan:
        """The steps from a file to an image in the batch."""
        return self.pool.plan

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self.pool.plan.device

    def open(self, timeout: float, sampler: Any, clock: Clock, errors: ErrorPolicy) -> Prefetcher | RetryingPrefetcher:
        """Return the prefetcher for one epoch, whose samples come from ``sampler``."""
        self.reader.begin_epoch()
        self.reader.has_time_limit = timeout > 0

        def make(clock: Clock) -> Prefetcher:
            if self.cache:
                return self.cache.make_prefetcher(self.prefetch_depth, timeout, sampler, clock)
            return Prefetcher(self.prefetch_depth, timeout, clock)

        return RetryingPrefetcher(make(clock), lambda: make(Clock(self.device)), errors) if errors else make(clock)
