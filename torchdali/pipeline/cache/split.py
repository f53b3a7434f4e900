"""The split of a plan into two plans, so that images can be cached in between.

The first plan, the *prefix*, decodes files. It runs the transforms that draw no random numbers and make images smaller.
The second plan, the *remainder*, runs all other transforms. :class:`Pack` turns an image into bytes at the end of the
prefix, and :class:`Unpack` turns the bytes into an image again. So images of any size are rows of one array. DALI takes
one array at once, and the host's time does not depend on the number of images.
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
"""The length of a packed image, in bytes, is a multiple of this number."""


class Pack(Rule):
    """Turn an image into its bytes, padded to :data:`ALIGNMENT`."""

    operators = "reshape, pad"

    def infer(self, spec: Spec) -> Spec:
        return spec

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        # Without `shape` DALI pads every image to the longest of the batch. A shape of 1 leaves only the alignment.
        return ops.fn.pad(ops.fn.reshape(image, shape=[-1]), axes=[0], shape=[1], align=[ALIGNMENT])


class Unpack(Rule):
    """Turn the first bytes of a row into an image.

    Args:
        channels: Number of channels of the image.
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
    """Split a plan after the last ``Resize`` or ``CenterCrop`` that precedes all random transforms.

    If there is none, split the plan after the decoder. The rules of the remainder keep their positions in the whole
    chain, which key the random numbers. So the remainder draws the same numbers as the plan.

    Args:
        plan: The plan, compiled and not fused.
        chain: The transforms that the plan was compiled from.
        source: The type of the images that enter the chain.

    Returns:
        The prefix, which outputs bytes; the remainder, which takes these bytes; and the transforms of the prefix. Both
        plans are fused.
    """
    end = 0
    for i, rule in enumerate(plan.rules):
        if rule.randomness:
            break
        if type(rule) in (Resize, CenterCrop):
            end = i + 1
    spec = compile_plan(list(chain[:end]), plan.device, plan.fidelity, source, plan.input_kind).spec
    while spec.dtype != torch.uint8:  # floats take four times the memory and hold the same information
        end -= 1
        spec = compile_plan(list(chain[:end]), plan.device, plan.fidelity, source, plan.input_kind).spec
    prefix = replace(
        plan,
        steps=plan.steps[:end],
        rules=(*plan.rules[:end], Pack(None)),
        views=(View((), spec),),
        container=None,
        tail=(),
        spec=spec,
        suffix=(),
        cut=None,
    )
    prefix = fuse(prefix)
    # Bytes have no axes to transpose.
    prefix = replace(prefix, views=(replace(prefix.views[0], channels_first=True),))
    remainder = replace(plan, rules=(Unpack(spec.channels), *plan.rules[end:]), input_kind=InputKind.PACKED)
    return prefix, fuse(remainder), tuple(chain[:end])
