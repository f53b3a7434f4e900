"""A plan cut in two, so that images can be kept in between.

The first part, the *head*, decodes files and does what draws nothing and makes images smaller for good; the second,
the *rest*, does everything else. One rule at the seam makes bytes of an image, and another an image of the bytes:
images of any size then are rows of one array, which is fed at once and costs the host the same for 10 images and 1,000.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from torchdali.pipeline.compile import compile_plan, fuse
from torchdali.pipeline.plan import Plan, View
from torchdali.transforms import Input, Node, Ops, Rule
from torchdali.transforms.rng import Draws
from torchdali.transforms.rules.crop import CenterCrop
from torchdali.transforms.rules.resize import Resize
from torchdali.transforms.spec import InputKind, IntArray, Params, Spec

__all__ = ["ALIGNMENT", "split_plan"]

ALIGNMENT = 16
"""An image's bytes are a multiple of this many."""


class Pack(Rule):
    """The bytes of an image, and a few more."""

    operators = "reshape, pad"

    def infer(self, spec: Spec) -> Spec:
        return spec

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        # A minimum of 1 leaves the rounding up alone: images of a batch are not padded to the longest.
        return ops.fn.pad(ops.fn.reshape(image, shape=[-1]), axes=[0], shape=[1], align=[ALIGNMENT])


class Unpack(Rule):
    """An image of the bytes in front of a row.

    Args:
        channels: Of the image.
    """

    operators = "slice, reshape"

    def __init__(self, channels: int) -> None:
        super().__init__(None)
        self._channels = channels

    def infer(self, spec: Spec) -> Spec:
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        return {"length": Input(np.int32, 1), "shape": Input(np.int32, 1)}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        shape = np.empty((len(size), 3), np.int32)
        shape[:, :2], shape[:, 2] = size, self._channels
        return {"length": shape.prod(axis=1, keepdims=True, dtype=np.int32), "shape": shape}

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        image = ops.fn.slice(image, start=[0], shape=params["length"], axes=[0])
        return ops.fn.reshape(image, shape=params["shape"], layout="HWC")


def split_plan(plan: Plan, chain: Sequence[Any], source: Spec) -> tuple[Plan, Plan, tuple[Any, ...]]:
    """Cuts a plan behind the last ``Resize`` or ``CenterCrop`` before anything is drawn; else behind the decoder.

    Random numbers are keyed by the place in the whole chain, which the rest keeps, so it draws what the plan draws.

    Args:
        plan: Compiled and not fused.
        chain: The transforms that it was compiled from.
        source: The images that come into the chain.

    Returns:
        The head, whose outputs are bytes; the rest, to which they are fed; both fused; and the head's transforms.
    """
    place = 0
    for i, rule in enumerate(plan.rules):
        if rule.randomness:
            break
        if type(rule) in (Resize, CenterCrop):
            place = i + 1
    spec = compile_plan(list(chain[:place]), plan.device, plan.fidelity, source, plan.input_kind).spec
    while spec.dtype != torch.uint8:  # four times the memory for the same
        place -= 1
        spec = compile_plan(list(chain[:place]), plan.device, plan.fidelity, source, plan.input_kind).spec
    head = replace(
        plan,
        steps=plan.steps[:place],
        rules=(*plan.rules[:place], Pack(None)),
        views=(View((), spec),),
        container=None,
        tail=(),
        spec=spec,
        suffix=(),
    )
    head = fuse(head)
    # There are no axes to be transposed.
    head = replace(head, views=(replace(head.views[0], channels_first=True),))
    rest = replace(plan, rules=(Unpack(spec.channels), *plan.rules[place:]), input_kind=InputKind.PACKED)
    return head, fuse(rest), tuple(chain[:place])
