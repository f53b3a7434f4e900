"""An epoch of a dataset that is asked for samples: DataLoader's own iterators, with DALI behind them.

The classes derive from torch's, so workers are started, fed, watched, reset and shut down by torch's code. They differ
in two places: workers pack images instead of collating them, and a batch that comes from them is run through DALI
before it is handed out.
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
from torch._utils import ExceptionWrapper
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
from torchdali.samples.on_error import ErrorPolicy
from torchdali.samples.transfer import Transfer, pin_memory
from torchdali.state.context import EpochContext, LoaderView
from torchdali.state.iterator import ResumableIterator
from torchdali.state.progress import Checkpoint
from torchdali.state.stream import is_stream
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import First
from torchdali.workers.dataset import AnnotatedDataset, StreamPacker, put_stream
from torchdali.workers.packed_reader import open_packed
from torchdali.workers.packing import Packed, Packer, stand_ins
from torchdali.workers.processes import Parallel
from torchdali.workers.sample_keys import SampleKeys
from torchdali.workers.shared_memory import Mapping, SharedBuffer
from torchdali.workers.startup import WorkerInit
from torchdali.workers.unpacking import merge_images, stand_in
from torchdali.workers.validation import PendingBatch, ProxyPlan, check_sizes, stacks

__all__ = ["ParallelProxyIterator", "SerialProxyIterator"]

_BATCH_STEP, _COLLATE_STEP = 2**16 - 1, 2**16 - 2
"""The positions that key the random numbers of ``batch_transform`` and ``collate_fn``: after every chain."""

_Share = tuple[int, int, dict[str, Any]]
"""What a batch was of streams: whose, how many samples, and what the stream said of itself after it."""


class _ProxyEpoch(ResumableIterator):
    """What both of torch's iterators are given. It comes before them in the order of inheritance.

    Args:
        context: What the epoch is given of the loader.
        proxy: What the loader made.

    Attributes:
        clock: Where the time goes.
    """

    _feed: Prefetcher | RetryingPrefetcher | None = None
    _received: deque[tuple[Any, Any]]

    def __init__(self, context: EpochContext, proxy: ProxyPlan) -> None:
        self._context, view = context, context.view
        self.clock = Clock(proxy.device)
        self.proxy = proxy
        self._user_collate = view.collate_fn
        self._stacks = stacks(view)
        self._transform_batch = context.batch_transform
        self._pins: bool = view.pin_memory and proxy.device.type == "cpu" and torch.cuda.is_available()
        self._transfer = Transfer(proxy.device)
        self._tolerance: ErrorPolicy = context.errors
        self._pending: deque[tuple[PendingBatch | Exception, int, _Share | None]] = deque()
        self._mappings: dict[tuple[int, int], Mapping] = {}
        with devices.on(proxy.device):  # torch's thread that pins memory takes the device
            super().__init__(self._show(view))
        if not self._num_workers:
            self._begin()

    def _show(self, view: LoaderView) -> LoaderView:
        """Return the loader as torch's iterator is to see it."""
        routes = self.proxy.routes
        images: bool = routes is not None
        first: First = routes.first if routes else "conversion"
        batches: bool = cast("Any", view)._auto_collation  # noqa: SLF001 - torch's
        packs = batches, self._stacks, images, first, self._tolerance.mode
        packer = Packer(view.collate_fn, *packs)
        # Without images the batch itself crosses to the device, and torch has a thread that pins it.
        pins = self.proxy.device.type == "cuda" and not images
        if not torch.accelerator.is_available():
            pins = view.pin_memory  # of which torch says then that it has no effect
        view, dataset = replace(view, pin_memory=pins, collate_fn=packer), view.dataset
        if is_stream(dataset):
            view, stream = put_stream(view, self._context.progress)
            return replace(view, collate_fn=StreamPacker(packer, stream))
        if isinstance(dataset, (IterDataPipe, MapDataPipe, IterableDataset)):
            return view
        if view.num_workers:
            view = replace(view, worker_init_fn=WorkerInit(view.worker_init_fn))
        return replace(view, dataset=AnnotatedDataset(dataset, self._tolerance.mode == "skip"))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self.clock = Clock(self.proxy.device)
        self._begin()
        super()._reset(loader, first_iter)

    def _begin(self) -> None:
        """Begins an epoch."""
        self._leave()
        self._key = self._context.next_key(int(self._base_seed))
        # The window is of batches, and kept by _fill.
        feed = Prefetcher(sys.maxsize, self._timeout, self.clock, self._window)
        self._feed = (
            RetryingPrefetcher(feed, partial(Prefetcher, 1, self._timeout), self._tolerance)
            if self._tolerance
            else feed
        )
        self._identities = SampleKeys(self._auto_collation, self._by_stream, self._num_workers > 0)
        self._received = deque()
        self._exhausted, self._delivered = False, 0
        self._share: _Share | None = None

    @property
    def _by_stream(self) -> bool:
        return self._dataset_kind == _DatasetKind.Iterable

    def _leave(self) -> None:
        self._pending.clear()
        if self._feed is not None:
            self.rewind()
            self._feed.close()
            self._feed = None

    def _next_index(self) -> Any:
        return self._identities.sent(self._task(), super()._next_index())

    def _task(self) -> int:
        """The number of the batch that the sampler is being asked for."""
        return 0

    def _index_counter(self) -> Callable[[Iterable[Any]], None]:
        return self._identities.fast_forward

    def _resume_stream(self, saved: Checkpoint) -> None:
        super()._resume_stream(saved)
        self._identities.go_on({worker: stream.samples for worker, stream in saved.streams.items()})

    def _turn(self) -> int:
        """Batches of the epoch whose samples came, or failed to."""
        return self._num_requested

    def _next_data(self) -> Any:
        try:
            data = self._deliver()
        except DeferredError:
            self._account()
            raise
        self._account()
        return data

    def _account(self) -> None:
        self.progress.num_yielded = self._delivered
        if self._share and self._by_stream:
            worker, count, state = self._share
            self.progress.advance_stream(worker, self._num_workers, count, state)
        self._share = None

    def _deliver(self) -> Any:
        self.clock.enter(starved=bool(self._num_workers) and not self._pending)
        self._fill()
        self._lookahead.count_yielded()
        if not self._pending:
            self.clock.end()
            self._leave()
            self.progress.finished = True
            raise StopIteration
        delivery, self._delivered, self._share = self._pending.popleft()
        if isinstance(delivery, Exception):
            raise DeferredError(delivery)
        with deferred_errors:
            return self._finished(delivery)

    @property
    def _window(self) -> int:
        """Batches in flight."""
        return self.proxy.window if self._num_workers and self.proxy.routes else 1

    def _fill(self) -> None:
        """Takes what the dataset has ready, as far as the window reaches; waits only where nothing is on its way."""
        while not self._exhausted and len(self._pending) < self._window:
            if self._pending and not self._arrived():
                break
            packed: Packed | None = None
            pending: PendingBatch | Exception
            try:
                packed = self._fetch()
                self.clock.lap("dataset")
                pending = self._admitted(packed)
                self.clock.lap("feed")
            except StopIteration as end:
                end.__traceback__ = None  # a dataset's, from a worker, would hold itself in a cycle, and this iterator
                self._exhausted = True
                break
            except DeferredError as deferred:
                # Raised in its turn, after the batches before it.
                pending = defer(deferred.error) if self._num_workers else deferred.error
                packed = packed or self._missed()
            share = (packed.worker, packed.count, packed.state) if packed else None
            self._pending.append((pending, self._turn(), share))

    def _fetch(self) -> Packed:
        """Return the next batch of samples."""
        return cast("Packed", super()._next_data())

    def _missed(self) -> Packed | None:
        """Counts the samples of a batch that was asked for and did not come; returns what stands in its place."""
        return None

    def _arrived(self) -> bool:
        """Whether the next batch can be taken without waiting."""
        return False

    def _admitted(self, packed: Packed) -> PendingBatch:
        """Starts to work on a batch."""
        with deferred_errors:
            return self._admit(packed)

    def _admit(self, packed: Packed) -> PendingBatch:
        known = self._identities.of(packed)
        if isinstance(packed.rest, ExceptionWrapper):  # a stream's
            packed.rest.reraise()
        delivery = PendingBatch(packed, Draws(self._key, known.index, known.occurrence))
        skips = self._tolerance.mode == "skip"

        def fault(sample: int, named: str, reason: str) -> SampleError:  # batches keep it, so it keeps no iterator
            if skips:  # what is in the place of a sample that was given up is another's
                sample = (stand_ins(packed.given_up, packed.count) or {}).get(sample, sample)
            return known.fault(sample, named, reason)

        for sample, (named, reason) in packed.reasons.items():
            raise fault(sample, named, reason)
        delivery.given_up = [known.fault(sample, *why) for sample, why in packed.given_up.items()]
        self.proxy.check_places(packed, fault)
        for group, pool in zip(packed.groups, self.proxy.pools(packed), strict=True):
            reader = open_packed(packed, group, fault)
            self.clock.input_kind, self.clock.steps = group.input_kind, pool.plan.steps
            rows = np.arange(len(group.sample))
            delivery.runs.append(Batch(reader, pool, rows, delivery.draws.select_rows(group.sample)))
        if any(run.pool.plan.random for run in delivery.runs):
            check_sizes(packed, fault)
        for run in delivery.runs:  # not before all is known to be well: what is pushed is popped, run by run
            assert self._feed is not None
            self._feed.push(run)
        return delivery

    def _finished(self, delivery: PendingBatch) -> Any:
        """The batch as the user gets it."""
        packed, proxy, draws = delivery.packed, self.proxy, delivery.draws
        data = packed.rest
        self._land(delivery)
        if packed.groups:
            assert proxy.routes is not None
            collate = None
            if not self._stacks:
                own = draws.select_position(_COLLATE_STEP)
                collate = partial(call_seeded, self._user_collate, draws=own, device=proxy.device)
            data = merge_images(packed, delivery.runs, self._auto_collation, collate, proxy.routes.chain)
            self.clock.lap("torch" if any(run.pool.plan.in_torch for run in delivery.runs) else "collate")
        data = self._transfer(data)
        if self._transform_batch is not None and packed.count:
            self.clock.lap("collate")
            data = call_on_batch(self._transform_batch, data, draws.select_position(_BATCH_STEP), proxy.device)
            self.clock.lap("batch_transform")
        data = pin_memory(data) if self._pins else data
        self.clock.leave(packed.count)
        return data

    def _too_many(self, delivery: PendingBatch) -> Exception | None:
        """Counts the samples of a batch that were given up, in its turn; what to raise where they are too many."""
        try:
            for error in delivery.given_up:
                self._tolerance.note(error)
        except SampleError as error:
            return error
        return None

    def _land(self, delivery: PendingBatch) -> None:
        """Takes all runs of a batch, so that the next one's come next, and raises what the first failing one raised."""
        assert self._feed is not None
        failure = self._too_many(delivery)
        for i in range(len(delivery.runs)):
            try:
                delivery.runs[i] = self._feed.pop()
            except EpochEndedError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure:
            try:
                raise failure
            finally:
                del failure
        if self._tolerance.mode == "skip" and delivery.runs:
            stand_in(delivery.packed, delivery.runs, self._stacks)

    def _drop(self) -> None:
        self._leave()

    def close(self) -> None:
        """Ends the epoch before its end, and the workers."""
        try:
            self._leave()
        finally:  # an interrupt here would leave workers of which nobody knows
            super().close()
        self._received.clear()
        self._mappings.clear()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            return  # torch has ended its workers by then
        try:
            self._leave()
        finally:
            self._end_workers()


class SerialProxyIterator(_ProxyEpoch, _SingleProcessDataLoaderIter, ResumableIterator):
    """Asks the dataset for samples in this process, when a batch is asked for."""

    def _fetch(self) -> Packed:
        with deferred_errors:
            return super()._fetch()

    def _missed(self) -> Packed | None:
        asked, state = self._stream.take_progress() if self._stream else (0, {})
        packed = Packed(None, asked, state=state)
        self._identities.of(packed)
        return packed


class ParallelProxyIterator(_ProxyEpoch, Parallel, _MultiProcessingDataLoaderIter, ResumableIterator):
    """Asks the dataset for samples in worker processes, ahead of time."""

    def _task(self) -> int:
        return self._send_idx

    def _missed(self) -> Packed | None:
        self._identities.of(Packed(None, 0, task=self._rcvd_idx - 1))
        return None  # a stream's share comes with its exception

    def _turn(self) -> int:
        return self._num_resumed + self._rcvd_idx

    def _get_data(self) -> Any:
        return self._received.popleft() if self._received else self._receive()

    def _receive(self) -> tuple[Any, Any]:
        task, data = cast("tuple[Any, Any]", super()._get_data())
        if isinstance(data, Packed):
            data.task = task
            if isinstance(data.block, SharedBuffer):  # it comes back, and is not to be mapped again then
                self._mappings[data.block.mapping.key] = data.block.mapping
        return task, data

    def _arrived(self) -> bool:
        while not self._data_queue.empty():
            self._received.append(self._receive())
        if not self._in_order:
            return bool(self._received)
        known = self._task_info.get(self._rcvd_idx, ())
        return len(known) == 2 or any(task == self._rcvd_idx for task, _ in self._received)
