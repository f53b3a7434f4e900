"""Draw the parameters of a batch in the worker that loads it, and not in the process that iterates."""

from __future__ import annotations

import numpy as np

from torchdali.pipeline.plans import PlanCache
from torchdali.transforms.rng import Draws
from torchdali.workers.packed import Packed

__all__ = ["draw_in_worker"]


def draw_in_worker(plans: PlanCache, packed: Packed, draws: Draws) -> None:
    """Draw the parameters of a batch, and move its boxes, masks and key points. Put them into ``packed``.

    The process that iterates draws the same where this does not: for several images a sample, for videos, and for masks
    that are warped, whose index is larger than they are. It draws again after an error, and names the sample.

    Args:
        plans: The plans of the transforms.
        packed: The batch, with its images laid out.
        draws: The random numbers of the samples that the sampler chose.
    """
    if len(packed.groups) != 1 or len(draws) != packed.count:
        return
    group = packed.groups[0]
    if group.spec.kind == "video" or not np.array_equal(group.sample, np.arange(packed.count)):
        return
    key = group.spec, group.input_kind
    targets = packed.targets and packed.targets.targets.take(group.sample, group.size)
    try:
        plan = plans.get(key, plans.find_end([key], annotations=packed.annotation_kinds))
        inputs, _ = plan.draw(draws, group.size, targets)
    except Exception:  # noqa: BLE001 - the process that iterates draws again, and raises it in the batch's turn
        return
    if targets and targets.pixels and targets.pixels.has_warps:
        return
    packed.drawn = inputs
    if packed.targets:
        packed.targets.moved = targets
