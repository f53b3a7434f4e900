"""The plans of a chain of transforms, one for each kind of image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchdali.pipeline.annotations import check_annotations
from torchdali.pipeline.compile import compile_plan, find_first, fuse, has_exif_transpose
from torchdali.pipeline.plan import Plan
from torchdali.transforms import flatten
from torchdali.transforms.spec import Fidelity, First, InputKind, Spec

__all__ = ["PlanCache", "PlanKey"]

PlanKey = tuple[Spec, InputKind]
"""The type of images, and how they are fed."""


class PlanCache:
    """A transform, compiled for each kind of image when that kind first comes. It needs neither DALI nor the device.

    Args:
        transform: A torchvision transform or a chain of them.
        device: Where DALI will run.
        fidelity: "exact" or "fast".

    Attributes:
        chain: The transforms, in order.
    """

    def __init__(self, transform: Any, device: torch.device, fidelity: Fidelity) -> None:
        self._transform, self._device = transform, device
        self._fidelity: Fidelity = fidelity
        self.chain: tuple[Any, ...] = tuple(flatten(transform))
        self._plans: dict[tuple[PlanKey, int | None], Plan] = {}
        self._checked: set[frozenset[type]] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plans out. A copy compiles its own."""
        return {**self.__dict__, "_plans": {}}

    @property
    def first(self) -> First:
        """The kind of the first transform, as :func:`find_first` returns it."""
        return find_first(self.chain)

    @property
    def adjust_orientation(self) -> bool:
        """Whether images are turned by their EXIF orientation, as :func:`has_exif_transpose` returns it."""
        return has_exif_transpose(self.chain)

    @property
    def needs_pil_metadata(self) -> bool:
        """Whether torch's transforms or ``collate_fn`` get PIL images, so that their metadata must be kept."""
        return self.get((Spec(), InputKind.PIXELS)).needs_pil_metadata

    def get(self, key: PlanKey, until: int | None = None) -> Plan:
        """Return the plan for one kind of image; ``until`` as for :func:`compile_plan`."""
        plan = self._plans.get((key, until))
        if plan is None:
            plan = fuse(compile_plan(self._transform, self._device, self._fidelity, *key, until))
            self._plans[key, until] = plan
        return plan

    def get_for_samples(self, key: PlanKey, have_annotations: bool) -> Plan:
        """Return the plan for one kind of image, in samples with or without boxes, masks or key points."""
        plan = self.get(key)
        return self.get(key, plan.end_with_annotations) if have_annotations else plan

    def find_end(
        self, keys: Sequence[PlanKey], together: bool = False, annotations: frozenset[type] = frozenset()
    ) -> int | None:
        """Return the position, from 1, where torch must take over from DALI for all images of a batch, or None.

        Args:
            keys: The kinds of its images.
            together: Whether some samples have images of several kinds. torchvision draws once for all images of a
                sample.
            annotations: Types of the boxes, masks and key points that some samples have.

        Raises:
            TransformError: A transform does not take such annotations.
        """
        plans = [self.get(key) for key in keys]
        ends = [_find_common_end(plans)] if together else []
        if annotations:
            if annotations not in self._checked:
                check_annotations(self.chain, annotations)
                self._checked.add(annotations)
            ends += [plan.end_with_annotations for plan in plans]
        return min((end for end in ends if end), default=None)


def _find_common_end(plans: Sequence[Plan]) -> int | None:
    """Return where torch must take over in all plans so that all draw alike; None if they do already.

    DALI and torch draw in different ways, so two crops of one sample's images would differ. The position is counted
    from 1.
    """
    begins = [step.position for plan in plans for step in plan.steps if step.library == "torch"]
    drawn = [step.position for plan in plans for step in plan.steps if step.library == "DALI" and step.randomness]
    return min(begins) if begins and drawn and max(drawn) >= min(begins) else None
