"""Draw the parameters of a batch in the worker that loads it, and not in the process that iterates."""

from __future__ import annotations

import numpy as np

from torchdali.pipeline.plans import PlanCache, PlanKey
from torchdali.transforms.rng import Draws
from torchdali.workers.packed import Packed

__all__ = ["WorkerDrawer"]


class WorkerDrawer:
    """Draws the parameters of batches, and moves their boxes, masks and key points.

    It leaves to the process that iterates: several images a sample, images of several kinds, videos, and masks that are
    warped. The index of a warped mask is larger than the mask. After an error that process draws again, and names the
    sample.

    Args:
        plans: The plans of the transforms.
    """

    def __init__(self, plans: PlanCache) -> None:
        self._plans = plans
        self._warping = set[PlanKey]()
        """The kinds of image whose masks are warped."""

    def __call__(self, packed: Packed, draws: Draws) -> None:
        """Draw for a batch whose images are laid out. Put the results into it.

        Args:
            packed: The batch.
            draws: The random numbers of the samples that the sampler chose.
        """
        if len(packed.groups) != 1 or len(draws) != packed.count:
            return
        group, annotations = packed.groups[0], packed.targets
        key = group.spec, group.input_kind
        if group.spec.kind == "video" or not np.array_equal(group.sample, np.arange(packed.count)):
            return
        if key in self._warping and annotations and annotations.targets.pixels:
            return
        try:
            plan = self._plans.get(key, self._plans.find_end([key], annotations=packed.annotation_kinds))
            targets = annotations and annotations.targets.take(group.sample, group.size)
            inputs, _ = plan.draw(draws, group.size, targets)
        except Exception:  # noqa: BLE001 - the process that iterates draws again, and raises it in the batch's turn
            return
        if targets and targets.pixels and targets.pixels.has_warps:
            self._warping.add(key)
            return
        packed.drawn = inputs
        if annotations and targets:
            annotations.keep_moved(targets)
