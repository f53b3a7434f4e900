"""Rules of colours that depend on the whole image: autocontrast and equalize."""

from __future__ import annotations

import numpy as np
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rule import Node, Nodes, Ops, Unsupported
from torchdali.transforms.rules._host import call_torch
from torchdali.transforms.rules.color import check_unit_range, clamp_to_image, white_level
from torchdali.transforms.rules.photometric import RandomlyApplied
from torchdali.transforms.spec import Spec

EQUALIZE = {"cpu": "equalize by torch", "gpu": "equalize, reduce, arithmetic, cast"}
"""The operators of :func:`equalize`, in words."""


def autocontrast(ops: Ops, image: Node, spec: Spec) -> Node:
    """Stretch each channel to the whole range. A channel with a single value is not changed."""
    low, high = (
        ops.fn.cast(extreme(image, axes=[0, 1], keep_dims=True), dtype=ops.types.FLOAT)
        for extreme in (ops.fn.reductions.min, ops.fn.reductions.max)
    )
    flat = ops.fn.cast(high == low, dtype=ops.types.FLOAT)
    # Compute in torchvision's order, because the result is truncated.
    scale = (high - low) * np.float32(1 / white_level(spec)) + flat
    return clamp_to_image(ops, (image - low * (1.0 - flat)) / scale, spec)


def equalize(ops: Ops, image: Node, spec: Spec) -> Node:
    """Equalize each channel's histogram.

    Let C(v) be the number of pixels below v, m the number of pixels below the brightest, and s = m // 255. PIL
    and torchvision map v to ``min((C(v) + s // 2) // s, 255)``, and do not change the channel if s is 0. DALI's
    ``equalize`` of the inverted image, inverted, is ``round(C(v) * 255 / m)``. The two differ as s differs from m /
    255, which is half the range in a small image. But DALI's result tells C(v) to the nearest m / 255. On a CPU torch
    takes a third of the time.
    """
    if ops.device == "cpu":
        return call_torch(ops, lambda pixels, _: F.equalize(pixels), image, {})
    fn, math = ops.fn, ops.math
    if spec.dtype.is_floating_point:
        image = fn.cast(math.floor(image * np.float32(255.999)), dtype=ops.types.UINT8)
    brightest = fn.reductions.max(image, axes=[0, 1], keep_dims=True)
    below = fn.cast(image < brightest, dtype=ops.types.FLOAT)
    pixels = fn.reductions.sum(below, axes=[0, 1], keep_dims=True)
    step = math.floor(pixels * np.float32(1 / 255))  # the float32 nearest to 1/255 is greater than 1/255
    level = 255 - fn.equalize(fn.cast(255 - image, dtype=ops.types.UINT8))
    # Counts are integers. float32 may put one slightly below its integer, so 0.01 is added before the floor.
    count = level * (pixels * np.float32(1 / 255))
    few = fn.cast(step == 0.0, dtype=ops.types.FLOAT)
    spread = math.clamp((count + (math.floor(step * 0.5) + 0.01)) / (step + few), 0.0, 255.0)
    result = fn.cast(math.floor(spread * (1.0 - few) + image * few), dtype=ops.types.UINT8)
    return result * np.float32(1 / 255) if spec.dtype.is_floating_point else result


class RandomAutocontrast(RandomlyApplied):
    """Rule of RandomAutocontrast: with probability p each channel is stretched to the whole range."""

    handles = (v2.RandomAutocontrast, v1.RandomAutocontrast)
    functional = F.autocontrast
    apply_operators = "reduce, arithmetic, cast"

    def apply(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return autocontrast(ops, image, self.spec)


class RandomEqualize(RandomlyApplied):
    """Rule of RandomEqualize: with probability p each channel's histogram is equalized."""

    handles = (v2.RandomEqualize, v1.RandomEqualize)
    functional = F.equalize
    unsupported_when = "not uint8 or float32, v1's not uint8"

    def infer(self, spec: Spec) -> Spec:
        if spec.dtype.is_floating_point and isinstance(self.transform, v1.RandomEqualize):
            raise Unsupported("v1's RandomEqualize accepts uint8 only")
        check_unit_range(spec)
        self.apply_operators = EQUALIZE[spec.device]
        return super().infer(spec)

    def apply(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return equalize(ops, image, self.spec)
