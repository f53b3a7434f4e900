"""``cache="device"``: decoded images, kept where they are transformed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from torchdali.pipeline import graph
from torchdali.pipeline.cache.base import Cache, half_of_free, patience
from torchdali.pipeline.cache.split import ALIGNMENT
from torchdali.pipeline.cache.store import WORD, Store
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.dlpack import Images
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import FileReader, Reader, Scan
from torchdali.pipeline.tuning import Threads
from torchdali.runtime.exceptions import defer
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray

__all__ = ["DecodedCache"]

UNKNOWN = -1
_LOOKS = 128  # files that a thread looks at in a row


class DecodedCache(Cache):
    """Images as the head of a plan leaves them.

    Args:
        files: As for :class:`Cache`.
        state: As for :class:`Cache`.
        budget: As for :class:`Cache`.
        head: Decodes them.
        after: The head's transforms, in words; empty where there is none.
        batch_size: The batch size that the loader declares.
        threads: Number of DALI's CPU threads; 0 lets it be chosen.
    """

    def __init__(
        self,
        files: FileReader,
        state: object,
        budget: int | None,
        head: Plan,
        after: str,
        batch_size: int,
        threads: int,
    ) -> None:
        super().__init__(files, state, budget)
        count = len(files.source)
        self.pool = PipelinePool(head, batch_size, Threads(threads, head.device, head.input_kind))
        self._after = after
        self._store: Store | None = None
        self._place = np.full(count, UNKNOWN, np.int64)
        self._size = np.zeros((count, 2), np.int32)
        self._stamp = np.zeros((count, 2), np.int64)

    def feed(self, prefetch_depth: int, timeout: float, sampler: Any, clock: Clock) -> Prefetcher:
        with self._lock:
            if self._store is None:
                device = self.pool.plan.device
                budget = half_of_free(device) if self._budget_option is None else self._budget_option
                self._store = Store(device, budget, _length(sampler, len(self.files.source)))
        return DecodedPrefetcher(self, self._store, prefetch_depth, timeout, clock)

    def find(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Where images are kept, below 0 where they are not; their sizes, and the stamps of their files then."""
        with self._lock:
            return self._place[rows], self._size[rows].astype(np.int64), self._stamp[rows]

    def drop(self, rows: IntArray) -> None:
        """Forgets images whose files are others now."""
        self._place[rows] = UNKNOWN
        self.files.forget(rows)

    def keep(self, store: Store, rows: IntArray, images: Images, size: IntArray, stamps: IntArray) -> IntArray:
        """Keeps as many images as have room, and have not come from another iterator meanwhile.

        Returns:
            ``(N,)`` their places; below 0 where there was none left.
        """
        with self._lock:
            other = (self._place[rows] == UNKNOWN) | (self._stamp[rows] != stamps).any(axis=1)
            new = np.flatnonzero(other & stamps.any(axis=1))  # a black image is that of no file, and not looked for
            if len(new) < len(rows):
                images = [images[i] for i in new.tolist()]
            places = store.add(images, packed_words(size[new], self.channels))
            new = new[: len(places)]
            kept = rows[new]
            self._size[kept], self._stamp[kept], self._place[kept] = size[new], stamps[new], places
            return np.where((self._stamp[rows] == stamps).all(axis=1), self._place[rows], UNKNOWN)

    @property
    def channels(self) -> int:
        """Of every image."""
        return self.pool.plan.spec.channels

    def rest(self) -> None:
        """Gives the decoder's threads and memory back after an epoch that did without; it is built anew if need be."""
        if self.pool.close_idle():
            graph.release_memory(self.pool.plan.device)

    def close(self) -> None:
        self.pool.close()
        with self._lock:
            if self._store:
                self._store.close()  # and kept, so that an iterator under way makes no other
            self._place[:] = UNKNOWN
        if self.pool.plan.device.type == "cuda":
            torch.cuda.empty_cache()

    def describe(self) -> str:
        store = self._store
        kept = int((self._place != UNKNOWN).sum())
        what = f"decoded images, after {self._after}" if self._after else "whole decoded images"
        used, held, budget = (store.used, store.held, store.budget) if store else (0, 0, self._budget_option)
        where = self.pool.plan.device
        return f"{what}, on {where} ({self.pool.plan.trunk}): {self._describe_size(kept, used, held, budget)}"


def _length(sampler: Any, default: int) -> int:
    """Samples of an epoch, where the sampler knows."""
    try:
        return min(len(sampler), default)
    except (AttributeError, NotImplementedError, TypeError):
        return default


def packed_words(size: IntArray, channels: int) -> IntArray:
    """``(N,)`` words of images of ``(N, 2)`` heights and widths, as the head puts them out."""
    return -(-size[:, 0] * size[:, 1] * channels // ALIGNMENT) * (ALIGNMENT // WORD)


class DecodedPrefetcher(Prefetcher):
    """A feed in front of which images are looked up, and those that are missing decoded, in a feed of their own.

    Args:
        cache: What is kept.
        store: Where.
        prefetch_depth: Batches in flight.
        timeout: Seconds that a batch may take; 0 for ever.
        clock: The epoch's.
    """

    def __init__(self, cache: DecodedCache, store: Store, prefetch_depth: int, timeout: float, clock: Clock) -> None:
        super().__init__(prefetch_depth, timeout, clock)
        self.cache, self.store = cache, store
        self._decoding = DecodingPrefetcher(prefetch_depth, timeout)
        self.patience = patience(timeout)
        self._asked: deque[DecodedBatch] = deque()
        self._awaited: deque[DecodedBatch] = deque()
        self._looked_up = self._decoded = False

    def put(self, batch: Batch) -> None:
        batch.reader = DecodedBatch(self, cast("FileReader", batch.reader), batch.rows)
        super().put(batch)

    def get(self) -> Batch:
        # With that many runs behind it, the oldest is likely to be done.
        while len(self._awaited) > self._prefetch_depth:
            self._take()
        return super().get()

    def close(self) -> None:
        super().close()
        self._asked.clear()
        self._awaited.clear()
        self._decoding.close()
        if self._looked_up and not self._decoded and self._process == os.getpid():
            self.cache.rest()

    def ask(self, images: DecodedBatch) -> None:
        """Takes a batch whose images are looked up by now, and brings what is missing, batch after batch."""
        self._asked.append(images)

    def bring(self, images: DecodedBatch) -> None:
        """Waits until a batch is there, and those before it."""
        while images in self._asked:
            self._decode()
        while not images.there:
            self._take()

    def _schedule_ready(self) -> None:
        while self._asked and self._asked[0].checked.done():
            self._decode()
        super()._schedule_ready()

    def _decode(self) -> None:
        """Sends what the next batch misses to be decoded."""
        images = self._asked[0]
        images.checked.wait(self._timeout or None)
        self._asked.popleft()
        missing = images.missing()
        self._looked_up = True
        if not len(missing):
            images.there = True
            return
        nothing_is_drawn = Draws(np.zeros(2, np.uint32), missing, np.zeros_like(missing))
        self._decoded = True
        self._awaited.append(images)
        self._decoding.put(DecodingBatch(images.files, self.cache.pool, missing, nothing_is_drawn))

    def _take(self) -> None:
        """Stores the oldest batch that was sent to be decoded. What is wrong with it is kept for its turn."""
        images = self._awaited.popleft()
        self._clock.lap("feed")
        try:
            decoded = self._decoding.get()
            self._clock.lap("DALI")
            images.take(cast("DecodingBatch", decoded))
        except Exception as error:  # noqa: BLE001 - raised in the batch's turn
            images.fault = defer(error)
        images.there = True


@dataclass
class DecodingBatch(Batch):
    """Files that are being decoded for the cache.

    Attributes:
        stamps: ``(N, 2)`` lengths and times of modification of the files when their headers were read.
    """

    stamps: IntArray = field(default_factory=lambda: np.empty((0, 2), np.int64))


class DecodingPrefetcher(Prefetcher):
    """Decodes the files that are not kept."""

    def _prepare(self, batch: Batch) -> None:
        super()._prepare(batch)
        cast("DecodingBatch", batch).stamps = cast("FileReader", batch.reader).table.stamps(batch.rows)


class DecodedBatch(Reader):
    """The images of one batch, as bytes.

    Args:
        feed: What brings those that are not kept.
        files: Those of the loader when the epoch began.
        rows: ``(N,)`` the batch.

    Attributes:
        files: As above.
        checked: Looks whether files changed since their images were kept.
        there: Whether all images are there, or it is known why they are not.
        fault: Why.
    """

    checked: Scan
    there = False
    fault: Exception | None = None

    def __init__(self, feed: DecodedPrefetcher, files: FileReader, rows: IntArray) -> None:
        super().__init__(files.source)
        self._feed, self._cache, self.files = feed, feed.cache, files
        self._rows = rows
        self._others: list[torch.Tensor] = []

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Looks the batch up; if it is called again, anew."""
        self.there, self._others = False, []
        self._place, self._size, stamps = self._cache.find(self._rows)
        kept = np.flatnonzero(self._place >= 0)
        self._lost: list[int] = []
        look = partial(_look, self._file_names(kept), stamps[kept].tolist(), kept, self._lost)
        self.checked = Scan(range(len(kept)), look, pool, _LOOKS, self._feed.patience)
        self._feed.ask(self)
        return _PendingImages(self)

    def _file_names(self, places: IntArray) -> list[bytes]:
        paths = self.files.paths(self._rows[places])
        names: Any = paths.view(f"S{paths.shape[1]}")
        return names[:, 0].tolist()  # without the padding

    def missing(self) -> IntArray:
        """``(M,)`` rows of the images that are not kept, or not any more."""
        if self._lost:
            self._place[self._lost] = UNKNOWN
            self._cache.drop(self._rows[self._lost])
        missing = self._rows[self._place < 0]
        return np.unique(missing) if len(missing) else missing

    def take(self, decoded: DecodingBatch) -> None:
        """Takes what was missing.

        Raises:
            SampleError: An image is not of the size that its file's header says.
        """
        images: Images = decoded.views[0]
        size = decoded.size
        for rule, params in zip(decoded.pool.plan.rules, decoded.params, strict=True):
            size = rule.output_size(size, params)
        words = packed_words(size, self._cache.channels)
        lengths = np.array([len(image) // WORD for image in images], np.int64)
        if (lengths != words).any():
            row = int(decoded.rows[np.flatnonzero(lengths != words)[0]])
            raise self.error(row, "it was changed while it was read")
        places = self._cache.keep(self._feed.store, decoded.rows, images, size, decoded.stamps)
        passing = np.flatnonzero(places < 0)
        places[passing] = -1 - np.arange(len(passing))
        self._others = [images[i] for i in passing.tolist()]
        missing = np.flatnonzero(self._place < 0)
        found = np.searchsorted(decoded.rows, self._rows[missing])
        self._place[missing], self._size[missing] = places[found], size[found]

    def bring(self) -> None:
        """Waits until :attr:`there`, and raises what is to be raised."""
        self._feed.bring(self)
        fault, self.fault = self.fault, None
        if fault:
            raise fault

    def sizes(self, rows: IntArray) -> IntArray:
        return self._size[self._numbers(rows)]

    def read_inputs(self, rows: IntArray, by_pil: IntArray, resources: ExitStack) -> Any:
        """``(N, L)`` bytes."""
        numbers = self._numbers(rows)
        words = packed_words(self._size[numbers], self._cache.channels)
        batch = self._feed.store.gather(self._place[numbers], words, self._others)
        return batch if batch.is_cuda else batch.numpy()

    def _numbers(self, rows: IntArray) -> Any:
        """Where some rows of the batch are in it, which mostly is all of it."""
        if rows is self._rows:
            return slice(None)
        order = np.argsort(self._rows)
        return order[np.searchsorted(self._rows, rows, sorter=order)]


def _look(
    paths: list[bytes], stamps: list[list[int]], places: IntArray, lost: list[int], numbers: Sequence[int]
) -> None:
    """Looks at files, and puts the places in the batch of images whose file is another one now among the lost ones."""
    look = os.stat
    for number in numbers:
        size, modified = stamps[number]
        try:
            now = look(paths[number])
            same = now.st_size == size and now.st_mtime_ns == modified
        except OSError:  # the decoder will say so
            same = False
        if not same:
            lost.append(int(places[number]))


class _PendingImages(Scan):
    """A batch whose images are looked up, and decoded where they are missing."""

    def __init__(self, images: DecodedBatch) -> None:
        self._images = images

    def done(self) -> bool:
        return self._images.there

    def wait(self, timeout: float | None = None) -> None:
        self._images.bring()
