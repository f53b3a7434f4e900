"""Checks of a batch from the dataset before DALI gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchdali.errors import SampleError
from torchdali.pipeline.feed import Batch
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.pool import PipelineCache, PipelinePool
from torchdali.pipeline.tuning import choose_prefetch_depth
from torchdali.runtime.warning import warn_user
from torchdali.samples.finder import RULE, ImageFinder
from torchdali.samples.guard import unguard_collate
from torchdali.samples.tree import convert, format_key_paths, is_default_collate
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray
from torchdali.workers.packed import Packed, PackedImages
from torchdali.workers.packed_targets import PackedTargets
from torchdali.workers.packing import ErrorFactory

__all__ = ["PendingBatch", "ProxyPlan", "check_sizes", "has_default_collate"]

_MAX_STRUCTURES = 100
"""Number of structures that are remembered. Samples with lists of any length may all differ in structure."""


@dataclass
class ProxyPlan:
    """The pipelines of a worker-fed loader, kept until its transform or device changes.

    Attributes:
        state: Differs when anything did change.
        pipelines: The pipelines. None without transforms.
        device: Where batches are made.
        memory: Bytes that batches in flight may take.
        prefetch_depth: Batches in flight if there are workers. Reduced to what fits when the size of a batch is known.
        key_paths: The key paths of the images for each structure of samples that batches had so far, up to a number.
        finder: Finds the images of a sample.
        annotations: The boxes, masks and key points of a sample, in words, if there were any.
        takes_transforms: Whether the dataset's own transforms are among those of the pipelines, and not called there.
        has_images: Whether there was an image.
        has_warned: Whether the user was warned that no sample has an image.
    """

    state: object
    pipelines: PipelineCache | None
    device: torch.device
    memory: int
    prefetch_depth: int = 6
    key_paths: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict[tuple[str, ...], tuple[str, ...]])
    finder: ImageFinder = field(default_factory=ImageFinder)
    annotations: str = ""
    takes_transforms: bool = False
    has_images: bool = False
    has_warned: bool = False

    def assign_pools(self, packed: Packed) -> list[tuple[PackedImages, PipelinePool]]:
        """Return each group of a batch's images with its pipelines.

        Frames of videos that the transforms do not take are left out of the groups.
        """
        if not packed.groups:
            return []
        assert self.pipelines is not None
        together = _have_common_samples([group.sample for group in packed.groups])
        keys = [(group.spec, group.input_kind) for group in packed.groups]
        until = self.pipelines.plans.find_end(keys, together, packed.annotation_kinds)
        pools = [self.pipelines.pool((*key, False), until) for key in keys]
        size = 0
        for i, pool in enumerate(pools):
            group = packed.groups[i] = packed.groups[i].choose_frames(pool.plan.choose_frames)
            size += int(group.length.sum()) + len(group.sample) * pool.plan.sample_bytes
        if packed.targets is not None:
            self.annotations = packed.targets.outline
            size += packed.targets.mask_bytes
        self.prefetch_depth = min(self.prefetch_depth, choose_prefetch_depth(size, self.memory, self.memory))
        return list(zip(packed.groups, pools, strict=True))

    def check_key_paths(self, packed: Packed, make_error: ErrorFactory) -> None:
        """Raise SampleError if no image was found in samples that are structured like earlier ones with images.

        Batches may differ in structure, keys and number of images, as in ``DataLoader``.
        """
        if self.pipelines is None or not packed.count:
            return
        if packed.groups:
            self.has_images = True
            if packed.key_paths and len(self.key_paths) < _MAX_STRUCTURES:
                self.key_paths[packed.structure] = packed.key_paths
        elif key_paths := self.key_paths.get(packed.structure):
            places = format_key_paths(key_paths)
            raise make_error(
                0,
                places,
                f"no image was found in it, in the batches before they were at {places}; it is {packed.outline}",
            )
        elif not self.has_images and not self.has_warned:
            self.has_warned = True
            warn_user(
                f"transform= has nothing to do: no image was found in a sample, which is {packed.outline}. Taken for "
                f"images are {RULE}. For a string that is a path, return pathlib.Path(...) or name its key in images="
            )


def _have_common_samples(groups: Sequence[IntArray]) -> bool:
    """Return whether a sample has images of several groups."""
    if len(groups) < 2:
        return False
    samples = [np.unique(group) for group in groups]
    return len(np.unique(np.concatenate(samples))) < sum(map(len, samples))


@dataclass
class PendingBatch:
    """A batch from the dataset, while DALI runs it.

    Attributes:
        packed: What came.
        draws: The random numbers of its samples.
        runs: Its images in DALI, a run for each kind.
        failed: The samples that others stand in for, or black images.
    """

    packed: Packed
    draws: Draws
    runs: list[Batch] = field(default_factory=list[Batch])
    failed: list[SampleError] = field(default_factory=list[SampleError])


def has_default_collate(loader: Any) -> bool:
    """Return True if ``collate_fn`` is the one that DataLoader would choose. It needs no images to work."""
    if is_default_collate(loader.collate_fn):
        return True
    is_batched: bool = loader._auto_collation  # noqa: SLF001 - torch's
    return not is_batched and unguard_collate(loader.collate_fn) is convert


def check_sizes(packed: Packed, plans: Sequence[Plan], make_error: ErrorFactory) -> None:
    """Raise an error if images of one sample that share random parameters, or its annotations, differ in size.

    Args:
        packed: The batch.
        plans: The plan of each group of its images.
        make_error: Makes the error that blames a sample.
    """
    has_several = any(group.slot.any() for group in packed.groups)
    if has_several and any(plan.is_random for plan in plans):
        _check_image_sizes(packed, make_error)
    if packed.targets:
        _check_canvas_sizes(packed, packed.targets, plans, make_error)


def _check_image_sizes(packed: Packed, make_error: ErrorFactory) -> None:
    sample, slot, size = (
        np.concatenate([getattr(group, name) for group in packed.groups]) for name in ("sample", "slot", "size")
    )
    first = np.zeros((packed.count, 2), np.int64)
    first[sample[::-1]] = size[::-1]
    differing = np.flatnonzero((first[sample] != size).any(1))
    if len(differing):
        row = int(differing[0])
        expected, other = first[sample[row]].tolist(), size[row].tolist()
        raise make_error(
            int(sample[row]),
            packed.key_paths[int(slot[row])] if packed.key_paths else "its images",
            f"its images differ in size, {expected[0]}x{expected[1]} and {other[0]}x{other[1]}, and a random transform "
            "draws once for all images of a sample; bring them to one size in the dataset",
        )


def _check_canvas_sizes(
    packed: Packed, targets: PackedTargets, plans: Sequence[Plan], make_error: ErrorFactory
) -> None:
    """Raise an error if the boxes, masks or key points of a sample are for an image of another size."""
    for group, plan in zip(packed.groups, plans, strict=True):
        if plan.moves and (mismatch := targets.find_mismatch(group.sample, group.size)):
            row, reason = mismatch
            name = packed.key_paths[int(group.slot[row])] if packed.key_paths else "its annotations"
            raise make_error(int(group.sample[row]), name, reason)
