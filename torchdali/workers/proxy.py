"""Iterators of worker-fed epochs: torch's own iterators, with DALI behind them.

The classes derive from torch's, so torch's code starts, feeds, watches, resets and ends the workers. Two things differ.
Workers pack images instead of collating them, and DALI transforms each batch before the iterator yields it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import (
    _DatasetKind,  # pyright: ignore[reportPrivateUsage]
    _MultiProcessingDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
    _SingleProcessDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from torchdali.errors import SampleError
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.fallback import call_on_batch, call_seeded
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.pipeline.retry import RetryingPrefetcher
from torchdali.runtime import devices
from torchdali.runtime.exceptions import DeferredError, EpochEndedError, defer, deferred_errors
from torchdali.samples.annotations import find_labels_getters
from torchdali.samples.on_error import ErrorPolicy
from torchdali.samples.transfer import Transfer, pin_memory
from torchdali.state.context import EpochContext, LoaderView
from torchdali.state.iterator import ResumableIterator, StreamStep
from torchdali.state.progress import Checkpoint
from torchdali.state.stream import is_stream
from torchdali.transforms.rng import Draws
from torchdali.workers.dataset import AnnotatedDataset
from torchdali.workers.drawing import WorkerDrawer
from torchdali.workers.packed import Packed
from torchdali.workers.packed_reader import open_packed
from torchdali.workers.packing import Keyed, Packer, map_substitutes
from torchdali.workers.processes import Parallel
from torchdali.workers.queues import make_context
from torchdali.workers.sample_keys import SampleKeys
from torchdali.workers.shared_memory import MappedFile, SharedBuffer
from torchdali.workers.streams import StreamBatch, put_stream
from torchdali.workers.unpacking import merge_images, substitute_samples
from torchdali.workers.validation import PendingBatch, ProxyPlan, check_sizes, has_default_collate

__all__ = ["ParallelProxyIterator", "SerialProxyIterator"]

_BATCH_STEP, _COLLATE_STEP = 2**16 - 1, 2**16 - 2
"""Positions for the random numbers of ``batch_transform`` and ``collate_fn``. No chain of transforms is that long."""


class _ProxyEpoch(ResumableIterator):
    """The common part of both iterators. It comes before torch's classes in the order of inheritance.

    Args:
        context: The parts of the loader that the epoch uses.
        proxy: The pipelines of the loader.

    Attributes:
        clock: Measures where the time goes.
    """

    _prefetcher: Prefetcher | RetryingPrefetcher | None = None
    _received: deque[tuple[Any, Any]]

    def __init__(self, context: EpochContext, proxy: ProxyPlan) -> None:
        self._context, view = context, context.view
        self.clock = Clock(proxy.device)
        self.proxy = proxy
        self._user_collate = view.collate_fn
        self._has_default_collate = has_default_collate(view)
        self._transform_batch = context.batch_transform
        self._pins_memory: bool = view.pin_memory and proxy.device.type == "cpu" and torch.cuda.is_available()
        self._transfer = Transfer(proxy.device)
        self._error_policy: ErrorPolicy = context.errors
        self._pending: deque[tuple[PendingBatch | Exception, StreamStep | None]] = deque()
        self._mapped_files: dict[tuple[int, int], MappedFile] = {}
        self._draws_in_workers = proxy.pipelines is not None and _can_draw_in_workers(view)
        with devices.use(proxy.device):  # torch starts its pin_memory thread on the current device
            super().__init__(self._make_view(view))
        if not self._num_workers:
            self._begin_epoch()

    def _make_view(self, view: LoaderView) -> LoaderView:
        """Return the view of the loader that torch's iterator reads."""
        pipelines = self.proxy.pipelines
        plans, images = pipelines and pipelines.plans, pipelines is not None
        packer = Packer(
            view.collate_fn,
            cast("Any", view)._auto_collation,  # noqa: SLF001 - torch's
            self._has_default_collate,
            images,
            plans.first if plans else "conversion",
            self._error_policy.mode,
            self.proxy.finder,
            needs_pil_metadata=plans is not None and plans.needs_pil_metadata,
            in_worker=view.num_workers > 0,
            adjust_orientation=plans is not None and plans.adjust_orientation,
            labels_getters=find_labels_getters(plans.chain) if plans else (),
            draw=WorkerDrawer(plans) if plans and self._draws_in_workers else None,
        )
        # Without images the whole batch is copied to the device, so torch's thread may pin it.
        pins_memory = self.proxy.device.type == "cuda" and not images
        if not torch.accelerator.is_available():
            pins_memory = view.pin_memory  # torch warns that it has no effect
        view, dataset = replace(view, pin_memory=pins_memory, collate_fn=packer), view.dataset
        if is_stream(dataset):
            return put_stream(view, self._context.progress)
        if not _is_mapped(dataset):
            return view
        policy = self._error_policy.mode == "skip", images, self.proxy.takes_transforms
        return replace(view, dataset=AnnotatedDataset(dataset, *policy))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self.clock = Clock(self.proxy.device)
        self._begin_epoch()
        super()._reset(loader, first_iter)

    def _begin_epoch(self) -> None:
        """Begin an epoch."""
        self._close_prefetcher()
        self._key = self._context.next_key(int(self._base_seed))
        # _fetch_ready limits the number of batches in flight, so the prefetcher need not limit the runs.
        prefetcher = Prefetcher(sys.maxsize, self._timeout, self.clock, self._prefetch_depth)
        self._prefetcher = (
            RetryingPrefetcher(prefetcher, partial(Prefetcher, 1, self._timeout), self._error_policy)
            if self._error_policy
            else prefetcher
        )
        self._sample_keys = SampleKeys(self._auto_collation, self._is_stream, self._num_workers > 0)
        self._received = deque()
        self._exhausted = False

    @property
    def _is_stream(self) -> bool:
        return self._dataset_kind == _DatasetKind.Iterable

    def _close_prefetcher(self) -> None:
        self._pending.clear()
        if self._prefetcher is not None:
            self.rewind()
            self._prefetcher.close()
            self._prefetcher = None

    def _next_index(self) -> Any:
        index, keys = self._sample_keys.remember(self._task_number(), super()._next_index())
        if not self._draws_in_workers:
            return index
        return Keyed(index, Draws(self._key, keys.index, keys.occurrence))

    def _task_number(self) -> int:
        """Return the number of the batch whose indices are requested now."""
        return 0

    def _index_counter(self) -> Callable[[Iterable[Any]], None]:
        return self._sample_keys.fast_forward

    def _resume_stream(self, saved: Checkpoint) -> None:
        super()._resume_stream(saved)
        self._sample_keys.resume_streams({worker: stream.samples for worker, stream in saved.streams.items()})

    def _next_data(self) -> Any:
        self.clock.enter(starved=bool(self._num_workers) and not self._pending)
        self._fetch_ready()
        self._lookahead.count_yielded()
        if not self._pending:
            self.clock.end()
            self._close_prefetcher()
            raise StopIteration
        pending, self._stream_step = self._pending.popleft()
        if isinstance(pending, Exception):
            raise DeferredError(pending)
        with deferred_errors:
            return self._finish(pending)

    @property
    def _prefetch_depth(self) -> int:
        """The number of batches in flight."""
        return self.proxy.prefetch_depth if self._num_workers and self.proxy.pipelines else 1

    def _fetch_ready(self) -> None:
        """Submit the batches that have come from the dataset, up to the prefetch depth.

        Wait for the dataset only if no batch is in flight.
        """
        while not self._exhausted and len(self._pending) < self._prefetch_depth:
            if self._pending and not self._has_arrived():
                break
            pending: PendingBatch | Exception
            is_missing = True
            try:
                packed = self._fetch()
                is_missing = False
                self.clock.lap("dataset")
                with deferred_errors:
                    pending = self._submit(packed)
                self.clock.lap("feed")
            except StopIteration as end:
                # torch's ExceptionWrapper.reraise() holds a worker's exception in a cycle with this iterator.
                end.__traceback__ = None
                self._exhausted = True
                break
            except DeferredError as deferred:
                pending = defer(deferred.error) if self._num_workers else deferred.error  # raised when it is due
                if is_missing:
                    self._count_missing()
            self._pending.append((pending, self._stream_step))
            self._stream_step = None

    def _fetch(self) -> Packed:
        """Return the next batch of samples."""
        return cast("Packed", super()._next_data())

    def _count_missing(self) -> None:
        """Count the samples of a batch that failed before it came."""
        worker, count, _ = self._stream_step or (0, 0, {})
        self._sample_keys.make_batch_keys(Packed(None, count, worker=worker, task=self._fetched_task()))

    def _fetched_task(self) -> int:
        """Return the number of the batch that came last."""
        return 0

    def _has_arrived(self) -> bool:
        """Return True if the next batch can be fetched without waiting."""
        return False

    def _submit(self, packed: Packed) -> PendingBatch:
        keys = self._sample_keys.make_batch_keys(packed)
        pending = PendingBatch(packed, Draws(self._key, keys.index, keys.occurrence))
        is_skipping = self._error_policy.mode == "skip"

        # Batches hold this function. It must not refer to self: the iterator would be part of a cycle.
        def make_error(sample: int, name: str, reason: str) -> SampleError:
            if is_skipping:  # a substitute is at the position of a failed sample
                sample = (map_substitutes(packed.replaced, packed.count) or {}).get(sample, sample)
            return keys.make_error(sample, name, reason)

        for sample, (name, reason) in packed.refused.items():
            raise make_error(sample, name, reason)
        pending.failed = [keys.make_error(sample, *why) for sample, why in packed.replaced.items()]
        self.proxy.check_key_paths(packed, make_error)
        for group, pool in self.proxy.assign_pools(packed):
            reader = open_packed(packed, group, make_error, pool.plan.adjust_orientation)
            self.clock.input_kind, self.clock.steps = group.input_kind, pool.plan.steps
            pending.runs.append(Batch(reader, pool, np.arange(len(group.size)), group.select_draws(pending.draws)))
        check_sizes(packed, [run.pool.plan for run in pending.runs], make_error)
        # Only now, after all checks: each run that was put must be got again.
        for run in pending.runs:
            assert self._prefetcher is not None
            self._prefetcher.put(run)
        return pending

    def _finish(self, pending: PendingBatch) -> Any:
        """Return the batch as the user gets it."""
        packed, proxy, draws = pending.packed, self.proxy, pending.draws
        data = packed.data
        self._finish_runs(pending)
        if packed.groups:
            assert proxy.pipelines is not None
            collate = None
            if not self._has_default_collate:
                collate_draws = draws.select_position(_COLLATE_STEP)
                collate = partial(call_seeded, self._user_collate, draws=collate_draws, device=proxy.device)
            chain, move = proxy.pipelines.plans.chain, self._transfer.move_together
            data = merge_images(packed, pending.runs, self._auto_collation, collate, chain, move)
            self.clock.lap("torch" if any(run.pool.plan.needs_torch for run in pending.runs) else "collate")
        data = self._transfer(data)
        if self._transform_batch is not None and packed.count:
            self.clock.lap("collate")
            data = call_on_batch(self._transform_batch, data, draws.select_position(_BATCH_STEP), proxy.device)
            self.clock.lap("batch_transform")
        data = pin_memory(data) if self._pins_memory else data
        self.clock.leave(packed.count)
        return data

    def _count_failed(self, pending: PendingBatch) -> Exception | None:
        """Count the failed samples of a batch that is due. Return the error to raise if there are too many."""
        try:
            for error in pending.failed:
                self._error_policy.record(error)
        except SampleError as error:
            return error
        return None

    def _finish_runs(self, pending: PendingBatch) -> None:
        """Get all runs of a batch, even after a failure: the next batch's runs follow. Raise the first error."""
        assert self._prefetcher is not None
        failure = self._count_failed(pending)
        for i in range(len(pending.runs)):
            try:
                pending.runs[i] = self._prefetcher.get()
            except EpochEndedError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure:
            try:
                raise failure
            finally:
                del failure  # its traceback would hold this frame in a cycle
        if self._error_policy.mode == "skip" and pending.runs:
            substitute_samples(pending.packed, pending.runs, self._has_default_collate)

    def _drop(self) -> None:
        self._close_prefetcher()

    def close(self) -> None:
        """End the epoch early, and the workers."""
        try:
            self._close_prefetcher()
        finally:  # even after a KeyboardInterrupt, or the workers would outlive the iterator
            super().close()
        self._received.clear()
        self._mapped_files.clear()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            return  # torch's exit handler has ended the workers
        try:
            self._close_prefetcher()
        finally:
            self._end_workers()


def _is_mapped(dataset: Any) -> bool:
    """Return whether a dataset is asked for samples by their indices, by torch's fetcher."""
    return not is_stream(dataset) and not isinstance(dataset, (IterDataPipe, MapDataPipe, IterableDataset))


def _can_draw_in_workers(view: LoaderView) -> bool:
    """Return whether workers can draw. Forked ones have the transforms, which others may not be able to unpickle."""
    is_batched = cast("Any", view)._auto_collation  # noqa: SLF001 - torch's
    is_forked = view.num_workers > 0 and make_context(view).get_start_method() == "fork"
    return is_forked and is_batched and _is_mapped(view.dataset)


class SerialProxyIterator(_ProxyEpoch, _SingleProcessDataLoaderIter, ResumableIterator):
    """Loads samples in this process, when a batch is requested."""

    def _fetch(self) -> Packed:
        try:
            with deferred_errors:
                return super()._fetch()
        finally:
            self._take_stream_step()


class ParallelProxyIterator(_ProxyEpoch, Parallel, _MultiProcessingDataLoaderIter, ResumableIterator):
    """Loads samples in worker processes, ahead of time."""

    def _task_number(self) -> int:
        return self._send_idx

    def _fetched_task(self) -> int:
        return self._rcvd_idx - 1

    def _get_data(self) -> Any:
        return self._received.popleft() if self._received else self._receive()

    def _receive(self) -> tuple[Any, Any]:
        task, data = cast("tuple[Any, Any]", super()._get_data())
        packed = data.data if isinstance(data, StreamBatch) else data
        if isinstance(packed, Packed):
            packed.task = task
            if isinstance(packed.block, SharedBuffer):  # the worker reuses it, so keep the mapping
                self._mapped_files[packed.block.mapped_file.key] = packed.block.mapped_file
        return task, data

    def _has_arrived(self) -> bool:
        while not self._data_queue.empty():
            self._received.append(self._receive())
        if not self._in_order:
            return bool(self._received)
        task_info = self._task_info.get(self._rcvd_idx, ())
        return len(task_info) == 2 or any(task == self._rcvd_idx for task, _ in self._received)
