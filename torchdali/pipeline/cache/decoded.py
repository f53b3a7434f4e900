"""``cache="device"``: decoded images, on the device that transforms them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from torchdali.pipeline import graph
from torchdali.pipeline.cache.base import FileCache, choose_budget, scan_patience
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
_CHUNK = 128  # number of files that a thread checks in a row


class DecodedCache(FileCache):
    """The output images of a plan's prefix.

    Args:
        files: As for :class:`FileCache`.
        state: As for :class:`FileCache`.
        budget: As for :class:`FileCache`.
        prefix: The plan that decodes the images.
        transforms: The names of the prefix's transforms; empty if it has none.
        batch_size: The batch size that the loader declares.
        threads: Number of DALI's CPU threads; 0 for automatic.
        decode_bytes: As for :class:`PipelinePool`.
    """

    def __init__(
        self,
        files: FileReader,
        state: object,
        budget: int | None,
        prefix: Plan,
        transforms: str,
        batch_size: int,
        threads: int,
        decode_bytes: int | None = None,
    ) -> None:
        super().__init__(files, state, budget)
        count = len(files.source)
        prefix_threads = Threads(threads, prefix.device, prefix.input_kind)
        self.pool = PipelinePool(prefix, batch_size, prefix_threads, decode_bytes=decode_bytes)
        self._transforms = transforms
        self._store: Store | None = None
        self._offset = np.full(count, UNKNOWN, np.int64)
        self._size = np.zeros((count, 2), np.int32)
        self._stamp = np.zeros((count, 2), np.int64)

    def make_prefetcher(self, prefetch_depth: int, timeout: float, sampler: Any, clock: Clock) -> Prefetcher:
        with self._lock:
            if self._store is None:
                device = self.pool.plan.device
                budget = choose_budget(device) if self._budget_option is None else self._budget_option
                self._store = Store(device, budget, _length(sampler, len(self.files.source)))
        return DecodedPrefetcher(self, self._store, prefetch_depth, timeout, clock)

    def find(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the offsets of images, below 0 if not stored; their sizes; and the stamps of their files then."""
        with self._lock:
            return self._offset[rows], self._size[rows].astype(np.int64), self._stamp[rows]

    def drop(self, rows: IntArray) -> None:
        """Forget images whose files have changed."""
        self._offset[rows] = UNKNOWN
        self.files.forget(rows)

    def add(self, store: Store, rows: IntArray, images: Images, size: IntArray, stamps: IntArray) -> IntArray:
        """Store images while there is room. Skip those that another iterator has stored meanwhile.

        Args:
            store: The memory for the images.
            rows: ``(N,)`` rows of the images.
            images: The images, as bytes.
            size: ``(N, 2)`` heights and widths of the images.
            stamps: ``(N, 2)`` lengths and times of modification of their files.

        Returns:
            ``(N,)`` offsets of the images; below 0 for an image that is not stored.
        """
        with self._lock:
            absent = (self._offset[rows] == UNKNOWN) | (self._stamp[rows] != stamps).any(axis=1)
            new = np.flatnonzero(absent & stamps.any(axis=1))  # a black image has no file, and no stamp
            if len(new) < len(rows):
                images = [images[i] for i in new.tolist()]
            offsets = store.add(images, count_packed_words(size[new], self.channels))
            new = new[: len(offsets)]
            stored = rows[new]
            self._size[stored], self._stamp[stored], self._offset[stored] = size[new], stamps[new], offsets
            return np.where((self._stamp[rows] == stamps).all(axis=1), self._offset[rows], UNKNOWN)

    @property
    def channels(self) -> int:
        """Number of channels of every image."""
        return self.pool.plan.spec.channels

    def release_decoder(self) -> None:
        """Free the decoder's threads and memory after an epoch without decoding. It is built again when needed."""
        if self.pool.close_idle():
            graph.release_memory(self.pool.plan.device)

    def close(self) -> None:
        self.pool.close()
        with self._lock:
            if self._store:
                self._store.close()  # stays here, so that a running iterator makes no new store
            self._offset[:] = UNKNOWN
        if self.pool.plan.device.type == "cuda":
            torch.cuda.empty_cache()

    def describe(self) -> str:
        store = self._store
        count = int((self._offset != UNKNOWN).sum())
        what = f"decoded images, after {self._transforms}" if self._transforms else "whole decoded images"
        used, reserved, budget = (store.used, store.reserved, store.budget) if store else (0, 0, self._budget_option)
        device = self.pool.plan.device
        return f"{what}, on {device} ({self.pool.plan.trunk}): {self._describe_size(count, used, reserved, budget)}"


def _length(sampler: Any, default: int) -> int:
    """Return the number of samples of an epoch; ``default`` if the sampler does not know."""
    try:
        return min(len(sampler), default)
    except (AttributeError, NotImplementedError, TypeError):
        return default


def count_packed_words(size: IntArray, channels: int) -> IntArray:
    """Return the ``(N,)`` lengths, in words, of packed images of ``(N, 2)`` heights and widths."""
    return -(-size[:, 0] * size[:, 1] * channels // ALIGNMENT) * (ALIGNMENT // WORD)


class DecodedPrefetcher(Prefetcher):
    """A prefetcher that looks images up in the cache. A second prefetcher decodes the missing ones.

    Args:
        cache: The cache.
        store: The memory of the cache.
        prefetch_depth: Number of batches in flight.
        timeout: Seconds that a batch may take; 0 means no limit.
        clock: The clock of the epoch.
    """

    def __init__(self, cache: DecodedCache, store: Store, prefetch_depth: int, timeout: float, clock: Clock) -> None:
        super().__init__(prefetch_depth, timeout, clock)
        self.cache, self.store = cache, store
        self._decoder = DecodingPrefetcher(prefetch_depth, timeout)
        self.patience = scan_patience(timeout)
        self._lookups: deque[DecodedBatch] = deque()
        self._decoding: deque[DecodedBatch] = deque()
        self._looked_up = self._decoded = False

    def put(self, batch: Batch) -> None:
        batch.reader = DecodedBatch(self, cast("FileReader", batch.reader), batch.rows)
        super().put(batch)

    def get(self) -> Batch:
        # With that many runs behind it, the oldest is probably done.
        while len(self._decoding) > self._prefetch_depth:
            self._store_decoded()
        return super().get()

    def close(self) -> None:
        super().close()
        self._lookups.clear()
        self._decoding.clear()
        self._decoder.close()
        if self._looked_up and not self._decoded:
            self.cache.release_decoder()

    def enqueue(self, images: DecodedBatch) -> None:
        """Queue a batch whose lookup has begun. Its missing images are decoded after those of earlier batches."""
        self._lookups.append(images)

    def wait_for(self, images: DecodedBatch) -> None:
        """Wait until a batch is ready, and all batches before it."""
        while images in self._lookups:
            self._schedule_decoding()
        while not images.ready:
            self._store_decoded()

    def _schedule_ready(self) -> None:
        while self._lookups and self._lookups[0].file_check.is_done():
            self._schedule_decoding()
        super()._schedule_ready()

    def _schedule_decoding(self) -> None:
        """Schedule the decoding of the next batch's missing images."""
        images = self._lookups[0]
        images.file_check.wait(self._timeout or None)
        self._lookups.popleft()
        missing = images.find_missing()
        self._looked_up = True
        if not len(missing):
            images.ready = True
            return
        no_draws = Draws(np.zeros(2, np.uint32), missing, np.zeros_like(missing))
        self._decoded = True
        self._decoding.append(images)
        self._decoder.put(DecodingBatch(images.files, self.cache.pool, missing, no_draws))

    def _store_decoded(self) -> None:
        """Store the images of the oldest scheduled decoding. An error is raised in its batch's turn."""
        images = self._decoding.popleft()
        self._clock.lap("feed")
        try:
            decoded = self._decoder.get()
            self._clock.lap("DALI")
            images.add_decoded(cast("DecodingBatch", decoded))
        except Exception as error:  # noqa: BLE001 - raised in the batch's turn
            images.failure = defer(error)
        images.ready = True


@dataclass
class DecodingBatch(Batch):
    """The files of a batch that the cache decodes.

    Attributes:
        stamps: ``(N, 2)`` lengths and times of modification of the files when their headers were read.
    """

    stamps: IntArray = field(default_factory=lambda: np.empty((0, 2), np.int64))


class DecodingPrefetcher(Prefetcher):
    """Decodes the images that are not in the cache."""

    def _prepare(self, batch: Batch) -> None:
        super()._prepare(batch)
        cast("DecodingBatch", batch).stamps = cast("FileReader", batch.reader).table.stamps(batch.rows)


class DecodedBatch(Reader):
    """The images of one batch, as bytes.

    Args:
        prefetcher: The prefetcher of the epoch. It decodes the images that are not in the cache.
        files: The loader's files when the epoch began.
        rows: ``(N,)`` rows of the batch.

    Attributes:
        files: See above.
        file_check: The check for files that have changed since their images were stored.
        ready: Whether all images are available, or :attr:`failure` is set.
        failure: The error to raise in the batch's turn.
    """

    file_check: Scan
    ready = False
    failure: Exception | None = None

    def __init__(self, prefetcher: DecodedPrefetcher, files: FileReader, rows: IntArray) -> None:
        super().__init__(files.source)
        self._prefetcher, self._cache, self.files = prefetcher, prefetcher.cache, files
        self._rows = rows
        self._unstored: list[torch.Tensor] = []

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Start the lookup of the batch. A second call starts it again."""
        self.ready, self._unstored = False, []
        self._offset, self._size, stamps = self._cache.find(self._rows)
        stored = np.flatnonzero(self._offset >= 0)
        self._changed: list[int] = []
        check = partial(_check_files, self._file_names(stored), stamps[stored].tolist(), stored, self._changed)
        self.file_check = Scan(range(len(stored)), check, pool, _CHUNK, self._prefetcher.patience)
        self._prefetcher.enqueue(self)
        return _PendingImages(self)

    def _file_names(self, positions: IntArray) -> list[bytes]:
        paths = self.files.paths(self._rows[positions])
        names: Any = paths.view(f"S{paths.shape[1]}")
        return names[:, 0].tolist()  # numpy strips the padding

    def find_missing(self) -> IntArray:
        """Return the ``(M,)`` rows of the images to decode. Forget the images whose files have changed."""
        if self._changed:
            self._offset[self._changed] = UNKNOWN
            self._cache.drop(self._rows[self._changed])
        missing = self._rows[self._offset < 0]
        return np.unique(missing) if len(missing) else missing

    def add_decoded(self, decoded: DecodingBatch) -> None:
        """Take the images that were missing.

        Raises:
            SampleError: An image does not have the size that its file's header gave.
        """
        images: Images = decoded.views[0]
        size = decoded.size
        for rule, params in zip(decoded.pool.plan.rules, decoded.params, strict=True):
            size = rule.output_size(size, params)
        words = count_packed_words(size, self._cache.channels)
        lengths = np.array([len(image) // WORD for image in images], np.int64)
        if (lengths != words).any():
            row = int(decoded.rows[np.flatnonzero(lengths != words)[0]])
            raise self.error(row, "it was changed while it was read")
        offsets = self._cache.add(self._prefetcher.store, decoded.rows, images, size, decoded.stamps)
        unstored = np.flatnonzero(offsets < 0)
        offsets[unstored] = -1 - np.arange(len(unstored))
        self._unstored = [images[i] for i in unstored.tolist()]
        missing = np.flatnonzero(self._offset < 0)
        index = np.searchsorted(decoded.rows, self._rows[missing])
        self._offset[missing], self._size[missing] = offsets[index], size[index]

    def wait(self) -> None:
        """Wait until the images are ready. Raise the error if there is one."""
        self._prefetcher.wait_for(self)
        failure, self.failure = self.failure, None
        if failure:
            raise failure

    def sizes(self, rows: IntArray) -> IntArray:
        return self._size[self._find_positions(rows)]

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return the images as ``(N, L)`` bytes."""
        index = self._find_positions(rows)
        words = count_packed_words(self._size[index], self._cache.channels)
        batch = self._prefetcher.store.gather(self._offset[index], words, self._unstored)
        return batch if batch.is_cuda else batch.numpy()

    def _find_positions(self, rows: IntArray) -> Any:
        """Return an index that selects these rows from the batch's arrays."""
        if rows is self._rows:  # the usual case
            return slice(None)
        order = np.argsort(self._rows)
        return order[np.searchsorted(self._rows, rows, sorter=order)]


def _check_files(
    paths: list[bytes], stamps: list[list[int]], positions: IntArray, changed: list[int], indices: Sequence[int]
) -> None:
    """Check files for changes. Append the positions in the batch of changed files to ``changed``."""
    stat = os.stat
    for i in indices:
        size, modified = stamps[i]
        try:
            status = stat(paths[i])
            same = status.st_size == size and status.st_mtime_ns == modified
        except OSError:  # the decoder will report it
            same = False
        if not same:
            changed.append(int(positions[i]))


class _PendingImages(Scan):
    """A batch whose images are looked up and, if they are missing, decoded."""

    def __init__(self, images: DecodedBatch) -> None:
        self._images = images

    def is_done(self) -> bool:
        return self._images.ready

    def wait(self, timeout: float | None = None) -> None:
        self._images.wait()
