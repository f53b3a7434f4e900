"""The sources, plans and pipelines that a loader builds for its epochs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader

from torchdali.datasets.lifted import lift_rows, rows_state
from torchdali.errors import TransformError, UnsupportedDatasetError
from torchdali.loader.epoch import NativeIterator
from torchdali.loader.native_plan import NativePlan
from torchdali.loader.options import LoaderOptions
from torchdali.loader.stats import Probe
from torchdali.pipeline import graph
from torchdali.pipeline.annotations import check_annotations
from torchdali.pipeline.cache import Cache, build_cache, build_object_cache, check_has_files
from torchdali.pipeline.compile import compile_plan, fuse
from torchdali.pipeline.plans import PlanCache
from torchdali.pipeline.pool import PipelineCache, PipelinePool
from torchdali.pipeline.readers import FileReader, Reader, open_reader
from torchdali.pipeline.tuning import Threads, check_numbers, choose_prefetch_depth
from torchdali.runtime import devices, machine
from torchdali.samples.annotations import find_labels_getters
from torchdali.samples.on_error import ErrorPolicy
from torchdali.samples.tree import is_default_collate
from torchdali.sources import Source, describe_dataset_state, from_dataset
from torchdali.state.checkpoint import find_stateful
from torchdali.state.context import EpochContext, LoaderView
from torchdali.state.iterator import ResumableIterator
from torchdali.state.sharding import find_epoch_aware_samplers, find_sampler_rank
from torchdali.state.tracker import ProgressTracker
from torchdali.transforms import flatten, snapshot
from torchdali.transforms.spec import InputKind
from torchdali.workers.plain import ParallelPlainIterator, SerialPlainIterator
from torchdali.workers.proxy import ParallelProxyIterator, SerialProxyIterator
from torchdali.workers.unread import take_transforms
from torchdali.workers.validation import ProxyPlan, has_default_collate

__all__ = ["Session", "get_declared_batch_size", "make_context"]

_RESIDENT_BYTES = 2**30
"""Images in memory are copied to the GPU once if they take at most this many bytes."""

_LARGEST_BATCH = 2**31 - 1
"""DALI's batch size is a 32-bit integer."""


def get_declared_batch_size(loader: DataLoader[Any]) -> int:
    """Return the batch size from a loader's arguments; 1 if they do not tell it."""
    size: int = loader.batch_size or getattr(cast("Any", loader.batch_sampler), "batch_size", None) or 1
    return min(size, _LARGEST_BATCH)


def make_context(
    loader: DataLoader[Any], options: LoaderOptions, progress: ProgressTracker, errors: ErrorPolicy
) -> EpochContext:
    """Return the parts of a loader that the iterator of a new epoch needs."""
    # An iterator must not refer to its loader, which may refer to the iterator. Else only the garbage collector ends
    # the iterator, and that may run in a forked process.
    samplers, persists = find_epoch_aware_samplers(loader), bool(loader.persistent_workers)
    return EpochContext(
        view=LoaderView.from_loader(loader),
        progress=progress.require_progress(loader),
        is_resumed=progress.is_loaded,
        sampler=loader.sampler,
        stateful=find_stateful(loader),
        next_key=partial(
            progress.keys.next, samplers=samplers, persistent_workers=persists, rank=find_sampler_rank(loader)
        ),
        errors=errors,
        batch_transform=options.batch_transform,
    )


def _source_key(dataset: Any, options: LoaderOptions) -> object:
    """Return what differs once the source must be opened again."""
    rows = rows_state(dataset)
    return describe_dataset_state(dataset), rows, bool(rows) and snapshot(options.transform)


class Session:
    """The source, plans, pipelines and caches of a loader, and its live iterators.

    Each part is built when it is first needed. It is built again when its inputs have changed. A copy of a session has
    the source and nothing else.

    Args:
        dataset: The loader's dataset.
        options: The loader's options.

    Attributes:
        reader: Reads the samples of a native dataset; None for a worker-fed dataset.
        why_not_native: Why the dataset is worker-fed; empty for a native one.
        native_plan: The plan of a native dataset, if it is built.
        proxy_plan: The plan of a worker-fed dataset, if it is built.
        iterators: The live iterators.
        probe: The result of the latest probe, and the key of the plan that it measured.
    """

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.native_plan: NativePlan | None = None
        self.proxy_plan: ProxyPlan | None = None
        self.cache: Cache | None = None
        self.iterators: WeakSet[ResumableIterator] = WeakSet()
        self.probe: tuple[object, Probe | None] | None = None
        self._open_source(dataset, options)
        self._check_cache(options)
        if self.reader is not None and options.finder.images not in (None, ((0,),)):
            raise ValueError(
                f"images must be None or 0 for a native dataset, whose samples are (image, target), got "
                f"{options.images!r}; leave it out"
            )

    def __getstate__(self) -> dict[str, Any]:
        built = ("native_plan", "proxy_plan", "cache", "iterators", "probe")
        return {**vars(self), **dict.fromkeys(built)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.iterators = WeakSet()

    def _open_source(self, dataset: Any, options: LoaderOptions) -> None:
        self.reader: Reader | None = None
        self.why_not_native = ""
        try:
            source = from_dataset(lift_rows(dataset, options.transform) if options.finder.images is None else dataset)
            self.reader, self._source_key = open_reader(source), _source_key(dataset, options)
        except UnsupportedDatasetError as error:
            self._source_key, self.why_not_native = id(dataset), str(error)

    @property
    def source(self) -> Source | None:
        """The samples of a native dataset, whose ``__getitem__`` is not called; None for a worker-fed dataset."""
        return self.reader.source if self.reader else None

    def refresh_source(self, dataset: Any, options: LoaderOptions) -> None:
        """Read a native dataset again if it has changed.

        Raises:
            ValueError: The options ask for a cache that this dataset cannot have.
        """
        if self.reader is not None and _source_key(dataset, options) != self._source_key:
            self._open_source(dataset, options)
        self._check_cache(options)

    def _check_cache(self, options: LoaderOptions) -> None:
        check_has_files(options.cache, self.source, self.why_not_native)

    def build_native_plan(self, options: LoaderOptions, loader: DataLoader[Any]) -> NativePlan:
        """Return the plan for a native dataset. Build it if the dataset, the options or the device have changed."""
        device = graph.resolve(options.device)  # torch's current device may change after the loader is made
        key = (self.source, device, snapshot(options.transform), loader.num_workers, options.fidelity)
        cache = options.cache, options.cache_bytes, options.cache_dir
        key = (*key, *cache, options.prefetch_depth, options.decode_bytes)
        if not self.native_plan or self.native_plan.key != key:
            with devices.use(device):
                self.native_plan = self._build_native_plan(device, key, options, loader)
        return self.native_plan

    def _build_native_plan(
        self, device: torch.device, key: object, options: LoaderOptions, loader: DataLoader[Any]
    ) -> NativePlan:
        assert self.reader is not None
        reader, source = self.reader, self.reader.source.to_device(device, _RESIDENT_BYTES)
        if source is not reader.source:
            reader = open_reader(source)
        chain: tuple[Any, ...] = tuple(flatten(source.transform) + flatten(options.transform))
        arguments = list(chain), device, options.fidelity, source.spec, source.kind
        plan = compile_plan(*arguments, labels=source.label_spec)
        if source.annotations:
            joint: Any = chain if source.is_joint else flatten(options.transform)
            check_annotations(joint, source.annotations)
            if end := plan.end_with_annotations:
                plan = compile_plan(*arguments, until=end)
        if plan.adjust_orientation != reader.adjust_orientation and source.kind.is_encoded:
            reader = self.reader = open_reader(source, plan.adjust_orientation)
        if options.cache in ("host", "disk") and source.is_remote:
            folder = Path(options.cache_dir).expanduser() if options.cache_dir else None
            cache = self.cache = build_object_cache(options.cache, options.cache_bytes, folder, self.cache)
            reader = open_reader(source.with_cache(cache), plan.adjust_orientation)
        reader.move_to(device)
        if is_default_collate(loader.collate_fn, read=True) and not plan.last.suffix and plan.last.spec.kind == "pil":
            raise TransformError(
                "the transforms end in PIL images, which default_collate does not take; add v2.ToImage() or "
                "v2.PILToTensor() to them"
            )
        if device.type == "cuda":
            machine.warn_of_few_connections()
        check_numbers(num_workers=loader.num_workers, prefetch_factor=options.prefetch_depth)
        size, resident = get_declared_batch_size(loader), source.resident
        if options.cache and not source.is_remote:
            cache_options = options.cache, options.cache_bytes, self.cache
            self.cache, plan = build_cache(
                *cache_options, cast("FileReader", reader), plan, chain, size, loader.num_workers, options.decode_bytes
            )
            resident = plan.input_kind is InputKind.PACKED and device.type == "cuda"
        else:
            frames = len(plan.choose_frames(source.num_frames)) if source.num_frames else 0
            plan = replace(fuse(plan), headers_validated=reader.validate_headers(), num_frames=frames)
            if reader.gives_places:
                plan = replace(plan, input_kind=InputKind.PLACES)
            resident = resident or reader.is_resident
            if not options.cache:
                self._close_cache()
        threads = Threads(loader.num_workers, device, plan.input_kind)
        depth = options.prefetch_depth or choose_prefetch_depth(
            size * (plan.sample_bytes + reader.sample_bytes(plan)), machine.choose_memory_for_batches(device)
        )
        pool = PipelinePool(plan, size, threads, resident, options.decode_bytes)
        return NativePlan(key, reader, pool, chain, threads, depth, self.cache, find_labels_getters(chain))

    def build_proxy_plan(self, options: LoaderOptions, loader: DataLoader[Any]) -> ProxyPlan | None:
        """Return the plan for a worker-fed dataset; None if ``DataLoader`` does everything."""
        device = graph.resolve(options.device)
        joint = take_transforms(loader.dataset)[0]
        chain = [*flatten(joint), *flatten(options.transform)]
        has_chain = joint is not None or options.transform is not None
        is_plain = not has_chain and options.batch_transform is None
        if is_plain and device.type == "cpu" and options.on_error == "raise":
            return None
        key = device, has_chain, snapshot(chain), options.fidelity, has_default_collate(loader), options.decode_bytes
        if self.proxy_plan is None or self.proxy_plan.state != key:
            pipelines = None
            if has_chain:
                plans = PlanCache(chain, device, options.fidelity)
                pipelines = PipelineCache(plans, device, get_declared_batch_size(loader), 0, options.decode_bytes)
            if device.type == "cuda":
                machine.warn_of_few_connections()
            self.proxy_plan = ProxyPlan(
                key,
                pipelines,
                device,
                machine.choose_memory_for_batches(device),
                finder=options.finder,
                takes_transforms=joint is not None,
            )
        return self.proxy_plan

    def make_iterator(
        self, options: LoaderOptions, loader: DataLoader[Any], context: EpochContext
    ) -> ResumableIterator:
        """Return the iterator of a worker-fed epoch."""
        plan = self.build_proxy_plan(options, loader)
        if plan is None:
            iterator = ParallelPlainIterator(context) if loader.num_workers else SerialPlainIterator(context)
        else:
            iterator = (ParallelProxyIterator if loader.num_workers else SerialProxyIterator)(context, plan)
        self.iterators.add(iterator)
        return iterator

    def make_native_iterator(
        self, options: LoaderOptions, loader: DataLoader[Any], context: EpochContext, progress: ProgressTracker
    ) -> ResumableIterator:
        """Return the iterator of a native epoch."""
        base_seed = progress.base_seed if loader.persistent_workers and not progress.is_loaded else None
        iterator = NativeIterator(context, self.build_native_plan(options, loader), base_seed)
        progress.base_seed = iterator.base_seed
        self.iterators.add(iterator)
        return iterator.start()

    def rewind(self) -> None:
        """Rewind the loader's generators, from which abandoned iterators drew ahead."""
        for iterator in list(self.iterators):
            iterator.rewind()

    def close(self) -> None:
        """End all epochs, and free pipelines, sources and caches. Each is built again when it is needed."""
        for iterator in list(self.iterators):
            iterator.close()
        device = next((plan.device for plan in (self.native_plan, self.proxy_plan) if plan), None)
        if self.native_plan:
            self.native_plan.pool.close()
            self.native_plan.reader.close()  # another than the loader's, if there is a cache of objects
        if self.proxy_plan and self.proxy_plan.pipelines:
            self.proxy_plan.pipelines.close()
        if self.reader:
            self.reader.close()
        self._close_cache()
        self.native_plan = self.proxy_plan = None
        graph.release_memory(device)

    def _close_cache(self) -> None:
        if self.cache:
            self.cache.close()
        self.cache = None
