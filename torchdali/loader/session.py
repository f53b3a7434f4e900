"""What a loader builds when it is iterated over: source, plan and engines, anew where something is another one now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from torchdali.errors import TransformError, UnsupportedDatasetError
from torchdali.loader.epoch import Compiled
from torchdali.pipeline import graph
from torchdali.pipeline.cache import Cache, cached, check_arguments
from torchdali.pipeline.compile import compile_plan, fuse
from torchdali.pipeline.engine import PipelinePool
from torchdali.pipeline.header_reader import HeaderReader
from torchdali.pipeline.routes import PipelineCache
from torchdali.pipeline.tuning import Threads, check_numbers, fitting_window
from torchdali.runtime import devices, machine
from torchdali.samples.on_error import ErrorPolicy
from torchdali.samples.tree import is_default_collate
from torchdali.sources import FolderSource, NativeSource, dataset_state, from_dataset
from torchdali.transforms import flatten, snapshot
from torchdali.transforms.spec import Fidelity
from torchdali.workers.validation import ProxyPlan, stacks

__all__ = ["Building"]

_RESIDENT_BYTES = 2**30
"""Pixels that are already in memory are kept on the GPU where they take no more than this."""

_MOST = 2**31 - 1
"""The largest batch that DALI can be told of."""


class Building:
    """The methods of a loader that build, and what they build from."""

    transform: Any
    batch_transform: Callable[..., Any] | None
    device: str | int | torch.device
    fidelity: Fidelity
    cache: Literal["host", "device"] | None
    cache_bytes: int | None
    _source: NativeSource | None
    _source_state: object
    _not_lifted: str
    _tolerance: ErrorPolicy
    _window: int | None
    _compiled: Compiled | None = None
    _proxy: ProxyPlan | None = None
    _cache: Cache | None = None

    @staticmethod
    def _lift(dataset: Any) -> tuple[NativeSource | None, object, str]:
        """The samples where they need not be asked for, what tells a changed dataset, and else why they must be."""
        try:
            return from_dataset(dataset), dataset_state(dataset), ""
        except UnsupportedDatasetError as error:
            return None, id(dataset), str(error)

    def _lift_again(self) -> None:
        """Looks anew at a dataset that is read and was changed since."""
        dataset = cast("Any", self).dataset
        if self._source is not None and dataset_state(dataset) != self._source_state:
            self._source, self._source_state, self._not_lifted = self._lift(dataset)
        self._check_cache()

    def _check_cache(self) -> None:
        check_arguments(self.cache, self.cache_bytes, self._source, self._not_lifted)

    def _compile(self) -> Compiled:
        """The source, plan and engines; anew where the dataset, a transform or the device is another one now."""
        device = graph.resolve(self.device)  # torch's current one may be set after the loader is made
        key = (self._source, device, snapshot(self.transform), cast("Any", self).num_workers, self.fidelity)
        key = (*key, self.cache, self.cache_bytes, self._window)
        if not self._compiled or self._compiled.state != key:
            with devices.on(device):
                self._compiled = self._compile_on(device, key)
        return self._compiled

    def _compile_on(self, device: torch.device, key: object) -> Compiled:
        assert self._source is not None
        loader = cast("Any", self)
        source = self._source.on(device, _RESIDENT_BYTES)
        if isinstance(source, FolderSource):
            source.read_headers = source.read_headers or HeaderReader()
            source.read_headers.device = device
        chain = tuple(flatten(source.transform) + flatten(self.transform))
        plan = compile_plan(list(chain), device, self.fidelity, source.spec, source.entry)
        if is_default_collate(loader.collate_fn, read=True) and not plan.suffix and plan.spec.kind == "pil":
            raise TransformError(
                "the transforms end in PIL images, which default_collate does not take; add v2.ToImage() or "
                "v2.PILToTensor() to them"
            )
        if device.type == "cuda":
            machine.warn_of_few_connections()
        workers: int = loader.num_workers
        check_numbers(num_workers=workers, prefetch_factor=self._window)
        size = self._declared_batch_size()
        resident = source.resident
        if self.cache and isinstance(source, FolderSource):
            kept = (self.cache, self.cache_bytes, self._cache)
            self._cache, plan = cached(*kept, source, plan, chain, size, workers)
            resident = plan.entry == "packed" and device.type == "cuda"
        else:
            plan = replace(fuse(plan), headers_validated=source.validate_headers(device))
            self._free_cache()
        threads = Threads(workers, device, plan.entry)
        free = machine.memory_for_batches(device)
        window = self._window or fitting_window(size * plan.sample_bytes, free)
        pool = PipelinePool(plan, size, threads, resident)
        return Compiled(key, source, pool, chain, threads, window, self._cache)

    def _proxy_now(self) -> ProxyPlan | None:
        """What is done with a batch that the dataset gave; None where DataLoader itself does all there is to do."""
        device = graph.resolve(self.device)
        if self.transform is None and self.batch_transform is None and device.type == "cpu" and not self._tolerance:
            return None
        key = (device, snapshot(self.transform), self.fidelity, stacks(self))
        if self._proxy is None or self._proxy.state != key:
            routes = None
            if self.transform is not None:
                routes = PipelineCache(self.transform, device, self.fidelity, self._declared_batch_size(), 0)
            if device.type == "cuda":
                machine.warn_of_few_connections()
            self._proxy = ProxyPlan(key, routes, device, machine.memory_for_batches(device))
        return self._proxy

    def _declared_batch_size(self) -> int:
        loader = cast("Any", self)
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        return min(size, _MOST)

    def _free_cache(self) -> None:
        if self._cache:
            self._cache.close()
        self._cache = None
