"""An epoch of a dataset that is asked for samples: DataLoader's own iterators, with DALI behind them.

The classes derive from torch's, so workers are started, fed, watched, reset and shut down by torch's code. They differ
in two places: workers pack images instead of collating them, and a batch that comes from them is run through DALI
before it is handed out.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import _utils as data_utils  # pyright: ignore[reportPrivateUsage]
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
    _DatasetKind,  # pyright: ignore[reportPrivateUsage]
    _MultiProcessingDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
    _SingleProcessDataLoaderIter,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from torchdali import devices
from torchdali.admission import Fault, Proxy, check_sizes, key_of, stacks
from torchdali.blocks import Mapping, ReceivedBlock
from torchdali.clock import Clock
from torchdali.engine import died
from torchdali.epoch import CLOSED, EpochKeys
from torchdali.errors import SampleError
from torchdali.feed import Batch, Feed
from torchdali.occurrences import Occurrences
from torchdali.packing import Packed, Packer
from torchdali.readahead import ReadAhead
from torchdali.received import source_of
from torchdali.rejoin import rejoined
from torchdali.rng import Draws
from torchdali.samples import call_on_batch
from torchdali.spec import IntArray
from torchdali.tracing import Traced, WorkerStart, put_by
from torchdali.transfer import Transfer

__all__ = ["ParallelProxyEpoch", "SerialProxyEpoch"]

_pin_memory = cast("Callable[[Any], Any]", data_utils.pin_memory.pin_memory)
_forget_pids = cast("Callable[[int], None]", vars(data_utils.signal_handling)["_remove_worker_pids"])

_ANEW = "this epoch cannot go on, a new one can be started"
_INTERRUPTED = f"the loader was interrupted; {_ANEW}"
_FORKED = "an iterator cannot be used in a forked process; iterate over the loader anew there"
_STREAM = 2**40
"""Samples that one worker's stream may have."""
_BATCH_STEP = 2**16 - 1
"""The position that keys the random numbers of ``batch_transform``: after every chain."""


@dataclass
class _Delivery:
    """A batch that came from the dataset.

    Attributes:
        packed: What came.
        index: ``(N,)`` what its samples' random numbers are keyed by.
        occurrence: ``(N,)`` how often each was drawn before in this epoch.
        runs: Its images in DALI, a run for each kind.
    """

    packed: Packed
    index: IntArray
    occurrence: IntArray
    runs: list[Batch] = field(default_factory=list[Batch])


class _ProxyEpoch(_BaseDataLoaderIter):
    """What both of torch's iterators are given. It comes before them in the order of inheritance.

    Args:
        loader: The loader.
        proxy: What the loader made.
        keys: Counts the epochs.

    Attributes:
        clock: Where the time goes.
    """

    _feed: Feed | None = None
    _received: deque[tuple[Any, Any]]
    _sent: dict[int, Any]

    def __init__(self, loader: Any, proxy: Proxy, keys: EpochKeys) -> None:
        self._process = os.getpid()
        self.clock = Clock(proxy.device)
        self.proxy = proxy
        self._keys = keys
        self._user_collate: Callable[[Any], Any] = loader.collate_fn
        self._stacks = stacks(loader.collate_fn)
        self._transform_batch: Callable[..., Any] | None = loader.batch_transform
        self._pins: bool = loader.pin_memory and proxy.device.type == "cpu" and torch.cuda.is_available()
        self._transfer = Transfer(proxy.device)
        self._pending: deque[_Delivery | Exception] = deque()
        self._mappings: dict[tuple[int, int], Mapping] = {}
        with devices.on(proxy.device):  # which torch's thread that pins memory takes
            super().__init__(self._twin(loader))
        if not self._num_workers:
            self._begin(loader)

    def _twin(self, loader: Any) -> Any:
        """The loader as torch's iterator is to see it."""
        twin = copy.copy(loader)
        routes = self.proxy.routes
        images, converts = routes is not None, routes is None or routes.converts
        twin.collate_fn = Packer(loader.collate_fn, loader._auto_collation, self._stacks, images, converts)  # noqa: SLF001
        # Without images the batch itself crosses to the device, and torch has a thread that pins it.
        twin.pin_memory = self.proxy.device.type == "cuda" and not images
        if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)) or loader._dataset_kind != _DatasetKind.Map:  # noqa: SLF001
            return twin
        vars(twin)["dataset"] = Traced(loader.dataset)  # DataLoader refuses a change of its dataset; this is a copy
        if loader.num_workers:
            twin.worker_init_fn = WorkerStart(loader.worker_init_fn)
        return twin

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter and (self._over or self._process != os.getpid()):
            # Persistent workers may have ended, what they sent may have been read in part, or they are not ours.
            self._end_workers()
            type(self).__init__(self, loader, self.proxy, self._keys)
            return
        if not first_iter:
            self.clock = Clock(self.proxy.device)
        self._begin(loader)
        self._over = _INTERRUPTED  # until all workers are at the new epoch
        super()._reset(loader, first_iter)
        self._received.clear()
        self._over = ""

    def _begin(self, loader: Any) -> None:
        """Begins an epoch."""
        self._leave()
        self._key = self._keys.next(int(self._base_seed), loader)
        # The window is of batches, and kept by _fill.
        self._feed = Feed(sys.maxsize, self._timeout, self.clock)
        self._read_ahead = ReadAhead(loader)
        self._occurrences = Occurrences()
        self._streamed: dict[int, int] = {}
        self._sent = {}
        self._received = deque()
        self._over, self._ended = "", False

    def _leave(self) -> None:
        self._pending.clear()
        if self._feed is not None:
            self._read_ahead.leave()
            self._feed.close()
            self._feed = None

    def _next_index(self) -> Any:
        index = self._read_ahead.ask(super()._next_index)
        if isinstance(index, Iterator):  # the fetcher uses it up
            index = list(cast("Iterator[Any]", index))
        self._sent[self._task()] = index
        return index

    def _task(self) -> int:
        """The number of the batch that the sampler is being asked for."""
        return 0

    def _next_data(self) -> Any:
        if self._process != os.getpid():
            raise RuntimeError(_FORKED)
        if self._over:
            raise RuntimeError(self._over)
        self._over = _INTERRUPTED  # until the end: nobody knows what was lost where a KeyboardInterrupt comes between
        try:
            data = self._deliver()
        except Exception as error:
            if not died(error):
                self._over = ""
            raise
        self._over = ""
        return data

    def _deliver(self) -> Any:
        self.clock.enter(starved=bool(self._num_workers) and not self._pending)
        self._fill()
        self._read_ahead.take()
        if not self._pending:
            self.clock.end()
            self._leave()
            raise StopIteration
        delivery = self._pending.popleft()
        try:
            if isinstance(delivery, Exception):
                raise delivery
            return self._finished(delivery)
        finally:
            del delivery  # raised, its traceback would hold this iterator in a cycle

    def _fill(self) -> None:
        """Takes what the dataset has ready, as far as the window reaches; waits only where nothing is on its way."""
        window = self.proxy.window if self._num_workers and self.proxy.routes else 1
        while not self._ended and len(self._pending) < window and (not self._pending or self._arrived()):
            try:
                packed = cast("Packed", super()._next_data())
                self.clock.lap("dataset")
                self._pending.append(self._admitted(packed))
                self.clock.lap("feed")
            except StopIteration as end:
                end.__traceback__ = None  # a dataset's, from a worker, would hold itself in a cycle, and this iterator
                self._ended = True
            except Exception as error:
                if died(error):
                    raise
                # Raised in its turn, after the batches before it.
                self._pending.append(put_by(error) if self._num_workers else error)

    def _arrived(self) -> bool:
        """Whether the next batch can be taken without waiting."""
        return False

    def _admitted(self, packed: Packed) -> _Delivery:
        """Starts to work on a batch."""
        indices = self._indices(packed)
        delivery = _Delivery(packed, *self._identify(packed, indices))
        fault = self._blaming(delivery, indices)
        for sample, (named, reason) in packed.reasons.items():
            raise fault(sample, named, reason)
        self.proxy.check_places(packed, fault)
        for group in packed.groups:
            assert self.proxy.routes is not None
            pool = self.proxy.routes.pool((group.spec, group.entry, False))
            source = source_of(packed, group, fault)
            self.clock.entry, self.clock.steps = group.entry, pool.plan.steps
            draws = Draws(self._key, delivery.index[group.sample], delivery.occurrence[group.sample])
            delivery.runs.append(Batch(source, pool, np.arange(len(group.sample)), draws))
        if any(run.pool.plan.random for run in delivery.runs):
            check_sizes(packed, fault)
        for run in delivery.runs:  # not before all is known to be well: what is pushed is popped, run by run
            assert self._feed is not None
            self._feed.push(run)
        return delivery

    def _indices(self, packed: Packed) -> Sequence[Any]:
        """What the samples of a batch are known by: the sampler's indices, where there is one for each of them."""
        sent = self._sent.pop(packed.task, None)
        if not self._auto_collation:
            return [sent]
        indices: list[Any] = list(cast("Iterable[Any]", sent)) if isinstance(sent, Iterable) else []
        return indices if len(indices) == packed.count else [(sent, i) for i in range(packed.count)]

    def _identify(self, packed: Packed, indices: Sequence[Any]) -> tuple[IntArray, IntArray]:
        """What keys the random numbers of a batch's samples: index and occurrence, or the place in a stream."""
        if self._dataset_kind == _DatasetKind.Iterable:
            first = self._streamed.get(packed.worker, 0)
            self._streamed[packed.worker] = first + packed.count
            places = np.arange(first, first + packed.count, dtype=np.int64)
            return packed.worker * _STREAM + places, np.zeros_like(places)
        keys = np.array([key_of(index) for index in indices], np.int64)
        return keys, self._occurrences.count(keys.tolist())

    def _blaming(self, delivery: _Delivery, indices: Sequence[Any]) -> Fault:
        iterable = self._dataset_kind == _DatasetKind.Iterable
        places: Sequence[Any] = (delivery.index % _STREAM).tolist() if iterable else indices
        whose = f", worker {delivery.packed.worker}" if iterable and self._num_workers else ""
        return lambda sample, named, reason: SampleError(places[sample], named + whose, reason)

    def _finished(self, delivery: _Delivery) -> Any:
        """The batch as the user gets it."""
        packed, proxy = delivery.packed, self.proxy
        data = packed.rest
        if packed.groups:
            self._land(delivery)
            collate = None if self._stacks else self._user_collate
            assert proxy.routes is not None
            data = rejoined(packed, delivery.runs, self._auto_collation, collate, proxy.routes.chain)
            self.clock.lap("torch" if any(run.pool.plan.in_torch for run in delivery.runs) else "collate")
        data = self._transfer(data)
        if self._transform_batch is not None and packed.count:
            draws = Draws(self._key, delivery.index, delivery.occurrence, _BATCH_STEP)
            self.clock.lap("collate")
            data = call_on_batch(self._transform_batch, data, int(draws.seeds()[0]), proxy.device)
            self.clock.lap("batch_transform")
        data = _pin_memory(data) if self._pins else data
        self.clock.leave(packed.count)
        return data

    def _land(self, delivery: _Delivery) -> None:
        """Takes all runs of a batch, so that the next one's come next, and raises what the first failing one raised."""
        assert self._feed is not None
        failure: Exception | None = None
        for _ in delivery.runs:
            try:
                self._feed.pop()
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure:
            try:
                raise failure
            finally:
                del failure

    def close(self) -> None:
        """Ends the epoch before its end, and the workers."""
        self._leave()
        self._end_workers()
        self._over = CLOSED

    def _end_workers(self) -> None:
        """Ends the workers; those that a forked process inherited are its parent's, and only forgotten."""
        if self._process == os.getpid():
            end = getattr(super(), "__del__", None)
            if end and hasattr(self, "_workers"):
                end()
        elif getattr(self, "_worker_pids_set", False):
            _forget_pids(id(self))
            self._worker_pids_set = False

    def __del__(self) -> None:
        self._leave()
        self._end_workers()


class SerialProxyEpoch(_ProxyEpoch, _SingleProcessDataLoaderIter):
    """Asks the dataset for samples in this process, when a batch is asked for."""


class ParallelProxyEpoch(_ProxyEpoch, _MultiProcessingDataLoaderIter):
    """Asks the dataset for samples in worker processes, ahead of time."""

    def _task(self) -> int:
        return self._send_idx

    def _get_data(self) -> Any:
        return self._received.popleft() if self._received else self._receive()

    def _receive(self) -> tuple[Any, Any]:
        try:
            task, data = cast("tuple[Any, Any]", super()._get_data())
        except Exception as error:
            self._name_the_dead(error)
            raise
        if isinstance(data, Packed):
            data.task = task
            if isinstance(data.block, ReceivedBlock):  # it comes back, and is not to be mapped again then
                self._mappings[data.block.mapping.key] = data.block.mapping
        return task, data

    def _name_the_dead(self, error: Exception) -> None:
        """Raises what torch's handler of signals would have, had it not come in the midst of something."""
        workers = cast("list[Any]", self._workers)
        if isinstance(error, (OSError, EOFError)):  # from a connection to one that is just ending
            connection.wait([worker.sentinel for worker in workers if worker.exitcode is None], timeout=1)
        for worker in workers:
            if code := worker.exitcode:
                how = f"is killed by signal: {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}") from error

    def _arrived(self) -> bool:
        while not self._data_queue.empty():
            self._received.append(self._receive())
        if not self._in_order:
            return bool(self._received)
        known = cast("dict[int, tuple[Any, ...]]", self._task_info).get(self._rcvd_idx, ())
        return len(known) == 2 or any(task == self._rcvd_idx for task, _ in self._received)
