"""The iterator of a native dataset: DALI reads the samples that the sampler names."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree  # pyright: ignore[reportPrivateUsage]

from torchdali.loader.collector import TargetCollector
from torchdali.loader.native_plan import NativePlan
from torchdali.pipeline.batched import finish_views
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.engine import Views
from torchdali.pipeline.fallback import (
    call_on_batch,
    call_seeded,
    check_shapes,
    fork_generators,
    run_in_torch,
    stack_frames,
    to_batch,
    to_inputs,
    to_samples,
)
from torchdali.pipeline.feed import Batch, Prefetcher
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.retry import RetryingPrefetcher
from torchdali.runtime import devices
from torchdali.runtime.exceptions import DeferredError, EpochEndedError, add_note, defer, deferred_errors
from torchdali.samples.transfer import Transfer, pin_memory
from torchdali.samples.tree import Placeholder, collate, is_default_collate, tree_map
from torchdali.sources import Labels
from torchdali.state.context import EpochContext
from torchdali.state.generators import count_batches
from torchdali.state.iterator import ResumableIterator
from torchdali.transforms.occurrences import DenseOccurrences
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray

__all__ = ["NativeIterator"]

_map_tensors = cast("Callable[..., Any]", pytree.tree_map_only)


class NativeIterator(ResumableIterator):
    """The batches of one epoch.

    torch's base class makes the sampler's iterator and draws the base seed. So both happen in the order and from the
    generators of the installed ``DataLoader``.

    Args:
        context: The parts of the loader that the epoch sees.
        native: The plan, and what runs it.
        base_seed: The base seed of the persistent workers that ``DataLoader`` would have; None to draw one.

    Attributes:
        clock: The times of this epoch.
    """

    _prefetcher: Prefetcher | RetryingPrefetcher | None = None

    def __init__(self, context: EpochContext, native: NativePlan, base_seed: int | None = None) -> None:
        self._context, view = context, context.view
        self.clock = Clock(native.device)
        self.clock.input_kind, self.clock.steps = native.plan.input_kind, native.plan.steps
        # Persistent workers would draw no second base seed from the loader's generator.
        super().__init__(view if base_seed is None else replace(view, generator=torch.Generator()))
        if base_seed is not None:
            self._base_seed = self.progress.base_seed = base_seed
            self.progress.drew_base_seed = False
        elif view.num_workers:
            # DataLoader's iterator with workers makes a second iterator of the sampler.
            self._reset(view, first_iter=True)
        self._collate = view.collate_fn
        self._transform_batch = context.batch_transform
        self._native, self._transfer = native, Transfer(native.device)
        self._ahead = max(native.prefetch_depth + 2, (view.prefetch_factor or 2) * view.num_workers)
        self._end: Exception | None = None

    @property
    def base_seed(self) -> int:
        """The number from which ``DataLoader`` seeds its workers."""
        return int(self._base_seed)

    def _index_counter(self) -> Callable[[Iterable[Any]], None]:
        return self._occurrences.fast_forward

    def start(self) -> NativeIterator:
        """Begin the epoch. The sampler is asked now if workers would get their first indices now."""
        context = self._context
        self._key = context.next_key(self.base_seed)
        saved, count = self.progress.checkpoint, count_batches(self._index_sampler)
        self.clock.num_batches = count and count - (saved.num_yielded if saved else 0)
        self._occurrences = DenseOccurrences(len(self._native.source))
        self._prefetcher = self._native.open(self._timeout, context.sampler, self.clock, context.errors)
        if self._num_workers:
            self._pull(self._prefetcher)
        return self

    def _pull(self, prefetcher: Prefetcher | RetryingPrefetcher) -> None:
        """Take indices from the sampler: as far ahead as ``DataLoader``, or further, and in the same thread."""
        while self._end is None and len(prefetcher) < self._ahead:
            try:
                self.clock.lap("feed")
                index: Any = self._next_index()
                self.clock.lap("sampler")
                prefetcher.put(self._batch(index if self._auto_collation else [index]))
            except StopIteration:
                self._end = StopIteration()  # without a traceback, which would hold this iterator in a cycle
            except EpochEndedError:
                raise
            except Exception as error:  # noqa: BLE001
                self._end = defer(error)  # raised in its turn, after the batches before it

    def _batch(self, indices: Iterable[int]) -> Batch:
        """Return the batch of some indices. An error in them is raised when the batch is due."""
        try:
            return self._make_batch(indices)
        except Exception as error:  # noqa: BLE001 - raised in the batch's turn
            empty = np.empty(0, np.int64)
            batch = Batch(self._native.reader, self._native.pool, empty, Draws(self._key, empty, empty))
            batch.error = defer(error)
            return batch

    def _make_batch(self, indices: Iterable[int]) -> Batch:
        native = self._native
        count = len(native.source)
        try:
            index = np.fromiter(map(operator.index, indices), np.int64)
        except TypeError as error:
            invalid = [index for index in indices if not hasattr(index, "__index__")]
            if not invalid:
                raise
            advice = (
                "; give what makes lists of indices as batch_sampler=" if isinstance(invalid[0], (list, tuple)) else ""
            )
            kind = type(invalid[0]).__name__
            raise TypeError(f"the sampler gave {invalid[0]!r:.80} ({kind}), which is no index{advice}") from error
        is_outside = (index < -count) | (index >= count)
        if is_outside.any():
            raise IndexError(f"the sampler gave index {int(index[is_outside][0])} for a dataset of {count} samples")
        index = np.where(index < 0, index + count, index)
        draws = Draws(self._key, index, self._occurrences.count(index))
        collect = TargetCollector(native) if native.source.annotations else None
        return Batch(native.reader, native.pool, index, draws, collect=collect)

    def _next_data(self) -> Any:
        prefetcher = self._prefetcher
        assert prefetcher is not None
        self.clock.enter()
        self._pull(prefetcher)
        self._lookahead.count_yielded()
        if not len(prefetcher):
            self._raise_end(prefetcher)
        with deferred_errors:
            return self._pop(prefetcher)

    def _pop(self, prefetcher: Prefetcher | RetryingPrefetcher) -> Any:
        batch = prefetcher.get()
        self.clock.lap("feed")
        data = self._finish(batch)
        data = pin_memory(data) if self._pin_memory and self._native.device.type == "cpu" else data
        self.clock.leave(len(batch.rows))
        return data

    def _raise_end(self, prefetcher: Prefetcher | RetryingPrefetcher) -> NoReturn:
        """Raise what the sampler raised. Only StopIteration ends the epoch; after others it is asked again."""
        end = self._end
        assert end is not None
        try:
            if isinstance(end, StopIteration):
                prefetcher.close()
                self.clock.end()
                self._end = StopIteration()  # raised, the traceback of the other one holds this iterator in a cycle
                raise end
            self._end = None
            raise DeferredError(end)
        finally:
            del end

    def _finish(self, batch: Batch) -> Any:
        native, reader, images = self._native, self._native.reader, self._native.plan.num_images
        plan, views = finish_views(
            native.pool,
            batch.views,
            native.plan.expand_frames(batch.draws, batch.size)[0],
            lambda row: reader.name(batch.rows[row // images]),
            lambda row, reason: reader.error(int(batch.rows[row // images]), reason),
        )
        if native.plan.num_frames:
            firsts = np.arange(len(batch.rows)) * images
            views = [stack_frames(frames, firsts) for frames in views]
        if native.plan.needs_torch:
            self.clock.lap("torch")
        data = self._collate_batch(batch, plan, views)
        if self._transform_batch is None or not len(batch.rows):
            return data
        self.clock.lap("collate")
        draws = batch.draws.select_position(plan.suffix_position + 1)
        data = call_on_batch(self._transform_batch, data, draws, native.device)
        self.clock.lap("batch_transform")
        return data

    def _collate_batch(self, batch: Batch, plan: Plan, views: Views) -> Any:
        stack = is_default_collate(self._collate, read=True)
        source = self._native.source
        if isinstance(batch.collect, TargetCollector):
            return self._collate_annotated(batch, plan, views, batch.collect, stack)
        labels = source.labels(batch.rows)
        if stack and not plan.suffix and (labels is not None or not source.is_pair) and len(batch.rows):
            stacked = self._stack(batch, plan, views)
            if labels is None or (isinstance(labels, np.ndarray) and not source.is_pair):
                return self._collate_around(batch, plan, stacked)
            if isinstance(labels, np.ndarray):
                return [stacked, self._to_tensor(labels)]
            columns = {name: self._to_tensor(column) for name, column in labels.items()}
            return source.make_sample(int(batch.rows[0]), stacked, columns)
        images, targets = self._samples(batch, plan, views, labels)
        if stack and plan.container is None:
            self._check_shapes(batch, images)
        rows = batch.rows.tolist()
        samples = [source.make_sample(*parts) for parts in zip(rows, images, targets, strict=True)]
        data = self._collate_samples(batch, plan, samples, stack)
        return _map_tensors(torch.Tensor, partial(to_device, device=self._native.device), data)

    def _collate_samples(self, batch: Batch, plan: Plan, samples: list[Any], stack: bool) -> Any:
        data = samples if self._auto_collation else samples[0]
        if stack or not len(batch.rows):
            return self._collate(data)
        draws = batch.draws.select_position(plan.suffix_position + 2)
        return call_seeded(self._collate, data, draws=draws, device=self._native.device)

    def _stack(self, batch: Batch, plan: Plan, views: Views) -> Any:
        """Return the images of a batch as ``default_collate`` would: stacked, or so for each view."""
        typed = [to_batch(plan, images) for images in views]
        for images in typed:
            self._check_shapes(batch, images)
        return typed[0] if plan.container is None else typed

    def _collate_annotated(self, batch: Batch, plan: Plan, views: Views, collect: TargetCollector, stack: bool) -> Any:
        """Return a batch of samples whose boxes, masks and key points moved with the images."""
        reader = self._native.reader
        samples = collect.finish(batch, self._transfer.move_together)
        if stack and not plan.suffix and len(samples) and self._auto_collation:
            images = self._stack(batch, plan, views)
            data = tree_map(collate(samples), lambda leaf: images if isinstance(leaf, Placeholder) else leaf)
            return self._transfer(data)
        images = to_inputs(plan, views, lambda row: reader.pil_header(batch.rows[row]))
        samples = [
            tree_map(sample, lambda leaf, image=image: image if isinstance(leaf, Placeholder) else leaf)
            for sample, image in zip(samples, images, strict=True)
        ]
        if plan.suffix:
            seeds = batch.draws.select_position(plan.suffix_position).seeds()
            samples = run_in_torch(plan, samples, seeds, lambda row: reader.name(batch.rows[row]), unpack=True)
        self.clock.lap("torch" if plan.suffix else "collate")
        return self._transfer(self._collate_samples(batch, plan, samples, stack))

    def _samples(self, batch: Batch, plan: Plan, views: Views, labels: Labels | None) -> tuple[list[Any], list[Any]]:
        """Return images after the transforms that torch runs, and targets as the dataset gives them."""
        reader = self._native.reader
        seeds = batch.draws.select_position(plan.suffix_position).seeds()
        images = to_samples(
            plan,
            views,
            seeds,
            lambda row: reader.name(batch.rows[row]),
            lambda row: reader.pil_header(batch.rows[row]),
        )
        self.clock.lap("torch" if plan.suffix else "collate")
        if labels is None:
            return images, self._targets(batch, seeds)
        if isinstance(labels, np.ndarray):
            return images, labels.tolist()
        columns = [column.tolist() for column in labels.values()]
        return images, [dict(zip(labels, values, strict=True)) for values in zip(*columns, strict=True)]

    def _to_tensor(self, labels: IntArray) -> torch.Tensor:
        return to_device(torch.from_numpy(labels), self._native.device)

    def _collate_around(self, batch: Batch, plan: Plan, images: Any) -> Any:
        """Return a batch of samples that are no pairs: collate their other parts, and put in the batch of images."""
        seeds = batch.draws.select_position(plan.suffix_position).seeds()
        rows, targets = batch.rows.tolist(), self._targets(batch, seeds)
        source = self._native.source
        samples = [source.make_sample(row, Placeholder(0), target) for row, target in zip(rows, targets, strict=True)]
        data = _map_tensors(torch.Tensor, partial(to_device, device=self._native.device), collate(samples))
        return tree_map(data, lambda leaf: images if isinstance(leaf, Placeholder) else leaf)

    def _targets(self, batch: Batch, seeds: IntArray) -> list[Any]:
        """Return targets as the dataset gives them. What draws random numbers for them is seeded for each sample."""
        reader = batch.reader
        targets: list[Any] = []
        with fork_generators(self._native.device) as seed:
            for index, number in zip(batch.rows.tolist(), seeds.tolist(), strict=True):
                seed(number)
                try:
                    targets.append(reader.target(index))
                except Exception as error:
                    add_note(error, f"while the target was made of {reader.name(index)}")
                    raise
        return targets

    def _check_shapes(self, batch: Batch, images: Sequence[Any] | torch.Tensor) -> None:
        if not isinstance(images, torch.Tensor):
            are_sounds = self._native.source.spec.kind == "waveform"
            check_shapes(images, self._native.chain, lambda row: self._native.reader.name(batch.rows[row]), are_sounds)

    def close(self) -> None:
        """End the epoch early."""
        super().close()
        self._drop()

    def _drop(self) -> None:
        if self._prefetcher is not None:
            self.rewind()
            self._prefetcher.end()

    _shutdown_workers = close

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._prefetcher is not None and not ending():
            self.rewind()
            self._prefetcher.close()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor to the device, on the current stream."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor
    with devices.use(device):
        return tensor.pin_memory().to(device, non_blocking=True)
