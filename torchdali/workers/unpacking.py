"""Put transformed images back into their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from torchdali.errors import TransformError
from torchdali.pipeline.batched import finish_views
from torchdali.pipeline.fallback import check_shapes, run_in_torch, stack_frames, to_batch, to_inputs
from torchdali.pipeline.feed import Batch
from torchdali.pipeline.plan import Plan
from torchdali.samples.transfer import Move
from torchdali.samples.tree import Placeholder, collate, convert, reorder_samples, tree_map
from torchdali.workers.packed import Packed, PackedImages

__all__ = ["check_stackable", "merge_images", "substitute_samples"]

Filled = dict[tuple[int, int], Any]

Finished = tuple[Plan, list[Any]]
"""The last plan of a run, and the images of each of its views."""


def merge_images(
    packed: Packed,
    runs: Sequence[Batch],
    batched: bool,
    collate_fn: Callable[[Any], Any] | None,
    chain: Sequence[Any],
    move: Move,
) -> Any:
    """Merge the transformed images, and boxes, masks and key points, into a batch.

    Args:
        packed: The batch from the worker.
        runs: The runs of its images in DALI, one for each group.
        batched: Whether it is a list of samples, and not one sample.
        collate_fn: The user's. None if the samples are already collated by one of DataLoader's own.
        chain: The transforms, for advice in messages.
        move: Copies tensors to the device of the images.
    """
    if packed.targets is not None:
        return _merge_samples(packed, runs, batched, collate_fn, chain, move)
    if collate_fn is None:
        columns = _stack_columns(packed, runs, batched, chain)
        return tree_map(packed.data, lambda leaf: columns[leaf.number] if isinstance(leaf, Placeholder) else leaf)
    samples = _fill(packed.data, _restore_images(packed, runs))
    return collate_fn(samples if batched else samples[0])


def _fill(samples: Sequence[Any], parts: Filled) -> list[Any]:
    """Return samples with parts in place of their placeholders."""

    def fill(leaf: Any, i: int) -> Any:
        return parts.get((i, leaf.number), leaf) if isinstance(leaf, Placeholder) else leaf

    return [tree_map(sample, partial(fill, i=i)) for i, sample in enumerate(samples)]


def _merge_samples(
    packed: Packed,
    runs: Sequence[Batch],
    batched: bool,
    collate_fn: Callable[[Any], Any] | None,
    chain: Sequence[Any],
    move: Move,
) -> Any:
    """Merge samples with boxes, masks or key points, which are collated last: they may differ in shape."""
    targets: Filled = {}
    for group, run in zip(packed.groups, runs, strict=True):
        assert packed.targets
        assert run.targets
        unpacked = packed.targets.unpack(run.targets, group.sample[run.rows], move)
        # The images of a sample have the same annotations. Those of the first one are taken.
        sample, is_first = group.sample.tolist(), ((group.slot == 0) & (group.frame == 0)).tolist()
        targets |= {(sample[row], number): leaf for (row, number), leaf in unpacked.items() if is_first[row]}
    if collate_fn is None and batched and not any(run.pool.plan.suffix for run in runs):
        samples = _fill(packed.data, targets)
        columns = _stack_columns(packed, runs, batched, chain)
        return tree_map(collate(samples), lambda leaf: columns[leaf.number] if isinstance(leaf, Placeholder) else leaf)
    samples = _fill(packed.data, {**_restore_images(packed, runs, with_suffix=False), **targets})
    _run_suffix(packed, runs, samples)
    collate_fn = collate_fn or (collate if batched else convert)
    return collate_fn(samples if batched else samples[0])


def _run_suffix(packed: Packed, runs: Sequence[Batch], samples: list[Any]) -> None:
    """Run the transforms without a rule on whole samples, in place."""
    for group, run in zip(packed.groups, runs, strict=True):
        plan = run.pool.plan
        rows = np.flatnonzero((group.slot == 0) & (group.frame == 0))
        if not plan.suffix or not len(rows):
            continue
        numbers = group.sample[rows].tolist()
        seeds = run.draws.select_position(plan.suffix_position).seeds()[rows]
        done = run_in_torch(
            plan, [samples[i] for i in numbers], seeds, lambda i, rows=rows, run=run: _name_sample(run, rows[i]), True
        )
        for i, sample in zip(numbers, done, strict=True):
            samples[i] = sample


def substitute_samples(packed: Packed, runs: Sequence[Batch], has_default_collate: bool) -> None:
    """Substitute the other parts of a sample whose images DALI has substituted."""
    group = packed.groups[0]
    order: list[int] = group.sample[runs[0].rows][group.firsts][: packed.count].tolist()
    if len(runs) == 1 and order != list(range(packed.count)):
        is_collated = has_default_collate and packed.targets is None
        packed.data = reorder_samples(packed.data, order) if is_collated else [packed.data[i] for i in order]


def _restore_images(
    packed: Packed, runs: Sequence[Batch], with_suffix: bool = True, finished: Sequence[Finished] = ()
) -> Filled:
    """Return each image after all transforms, of the type that torchvision returns, by sample and slot."""
    images: Filled = {}
    finished = finished or [_finish_views(run, group) for group, run in zip(packed.groups, runs, strict=True)]
    for group, run, (plan, views) in zip(packed.groups, runs, finished, strict=True):
        rows = run.rows[group.firsts]
        done = to_inputs(plan, views, lambda i, run=run, rows=rows: run.reader.pil_header(int(rows[i])))
        if with_suffix and plan.suffix:
            seeds = run.draws.select_position(plan.suffix_position).seeds()[group.firsts]
            done = run_in_torch(plan, done, seeds, partial(_name_image, run, group))
        for (sample, slot), image in zip(_list_positions(group), done, strict=True):
            images[sample, slot] = image
    return images


def _stack_columns(packed: Packed, runs: Sequence[Batch], batched: bool, chain: Sequence[Any]) -> dict[int, Any]:
    """Stack the images of all samples, for each slot."""
    for run in runs:
        if batched:
            check_stackable(run.pool.plan)
    slots = range(len(packed.key_paths))
    finished = [_finish_views(run, group) for group, run in zip(packed.groups, runs, strict=True)]
    if batched and len(runs) == 1 and not finished[0][0].suffix:
        # Images come slot by slot, so those of one slot are a view of DALI's output.
        group, (plan, views), count = packed.groups[0], finished[0], packed.count
        columns: dict[int, Any] = {}
        for slot in slots:
            parts = [view[slot * count : (slot + 1) * count] for view in views]
            for i, part in enumerate(parts):
                if not isinstance(part, torch.Tensor):
                    check_shapes(part, chain, lambda i, first=slot * count: _name_image(runs[0], group, first + i))
                    parts[i] = torch.stack(part)  # only images of other slots have other shapes
            typed = [to_batch(plan, part) for part in parts]
            columns[slot] = typed[0] if plan.container is None else typed
        return columns
    images = _restore_images(packed, runs, finished=finished)
    if not batched:
        return {slot: convert(images[0, slot]) for slot in slots}
    names = {
        position: _name_image(run, group, i)
        for group, run in zip(packed.groups, runs, strict=True)
        for i, position in enumerate(_list_positions(group))
    }
    for slot in slots:
        check_shapes([images[i, slot] for i in range(packed.count)], chain, lambda i, slot=slot: names[i, slot])
    return {slot: collate(tuple(images[i, slot] for i in range(packed.count))) for slot in slots}


def check_stackable(plan: Plan) -> None:
    """Raise TransformError if the images after the transforms are no tensors."""
    plan = plan.last
    if not plan.suffix and plan.spec.kind == "pil":
        raise TransformError(
            "the transforms end in PIL images or arrays, which cannot be stacked; add v2.ToImage() or "
            "v2.PILToTensor() to transform="
        )


def _finish_views(run: Batch, group: PackedImages) -> Finished:
    """Return the plan of the last part, and each view after the transforms on batches. Frames become videos."""
    plan, views = finish_views(
        run.pool,
        run.views,
        run.draws,
        partial(_name_sample, run),
        lambda row, reason: run.reader.error(int(run.rows[row]), reason),
    )
    is_video = group.spec.kind == "video"
    return plan, [stack_frames(images, group.firsts) for images in views] if is_video else views


def _name_sample(run: Batch, row: int) -> str:
    """Return the name of the sample whose image is in a row; it may be a substitute."""
    return run.reader.name(int(run.rows[row]))


def _name_image(run: Batch, group: PackedImages, number: int) -> str:
    """Return the name of the sample of an image or video, by its number in a group."""
    return _name_sample(run, int(group.firsts[number]))


def _list_positions(group: PackedImages) -> list[tuple[int, int]]:
    """List sample and slot of each image or video."""
    return list(zip(group.sample[group.firsts].tolist(), group.slot[group.firsts].tolist(), strict=True))
