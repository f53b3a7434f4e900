"""Colours: grey images, and random brightness, contrast, saturation and hue.

The arithmetic is that of torchvision's uint8 tensor kernels, truncation included. DALI's own ``hue`` and
``color_twist`` are not used: they turn colours in YIQ, which is another thing than torchvision's hue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.rng import Draws
from torchdali.spec import IntArray, Params, Sample, Spec
from torchdali.transforms._rule import Input, Node, Ops, Rule, Unsupported

LUMA = (0.2989, 0.587, 0.114)
"""torchvision's weights of red, green and blue in grey."""


def grey(ops: Ops, image: Node) -> Node:
    """``(H, W, 1)`` float32 grey of an RGB image, rounded down where the image is uint8."""
    return ops.math.floor(ops.fn.coord_transform(image, M=list(LUMA), dtype=ops.types.FLOAT))


def truncated(ops: Ops, values: Node) -> Node:
    """float32 to uint8 as torch casts after clamping: towards zero."""
    return ops.fn.cast(ops.math.floor(ops.math.clamp(values, 0.0, 255.0)), dtype=ops.types.UINT8)


class Grayscale(Rule):
    """Grey, in one channel or three equal ones."""

    handles = (v2.Grayscale, v1.Grayscale)
    operators = "coord_transform, floor, cast"

    def infer(self, spec: Spec) -> Spec:
        if spec.channels != 3 or spec.dtype != torch.uint8:
            raise Unsupported(f"no rule for {spec}")
        if self.transform.num_output_channels not in (1, 3):
            raise Unsupported("num_output_channels is neither 1 nor 3")
        return replace(spec, channels=self.transform.num_output_channels)

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        one = truncated(ops, grey(ops, image))
        return one if self.transform.num_output_channels == 1 else ops.fn.cat(one, one, one, axis=2)

    def replay(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.rgb_to_grayscale(image, self.transform.num_output_channels)


_NAMES = ("brightness", "contrast", "saturation", "hue")
_REPLAY: tuple[Any, ...] = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
_HUE = 3


class ColorJitter(Rule):
    """Brightness, contrast, saturation and hue, each by a random factor, in an order of its own for each sample.

    Every place in the order is one blend of the image with its grey (saturation), its mean grey (contrast) and
    black (brightness), ``x * f + grey * s + mean * c``; for the samples whose hue comes at this place f is 1
    and s and c are 0, which changes nothing, and their hue is turned after it.
    """

    handles = (v2.ColorJitter, v1.ColorJitter)

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.ranges: dict[int, tuple[float, float]] = {
            i: tuple(getattr(transform, name)) for i, name in enumerate(_NAMES) if getattr(transform, name)
        }

    def infer(self, spec: Spec) -> Spec:
        if spec.channels != 3 or spec.dtype != torch.uint8:
            raise Unsupported(f"no rule for {spec}")
        self.operators = "coord_transform, reduce, arithmetic" + (", split, merge" if _HUE in self.ranges else "")
        self.randomness = ", ".join(["order", *(f"{_NAMES[i]} factor" for i in self.ranges)])
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        places = range(len(self.ranges))
        names = {f"{name}{i}": Input(np.float32) for i in places for name in self._weights}
        if _HUE in self.ranges:
            names |= {f"turn{i}": Input(np.bool_) for i in places} | {"hue": Input(np.float32)}
        return names

    @property
    def _weights(self) -> list[str]:
        """The terms of the blend that can differ from nothing."""
        terms = {"keep": {0, 1, 2}, "grey": {2}, "mean": {1}}
        return [name for name, needed_by in terms.items() if needed_by & set(self.ranges)]

    def draw(self, draws: Draws, size: IntArray) -> Params:
        # Leaving out what is not jittered keeps a uniform order of the rest uniform.
        order = np.array(list(self.ranges), np.int64)[draws.permutation(len(self.ranges))]
        factors = np.zeros((len(draws), len(_NAMES)), np.float32)
        for i, (low, high) in self.ranges.items():
            factors[:, i] = draws.between(low, high)
        params: Params = {}
        for place in range(len(self.ranges)):
            which = order[:, place]
            factor = np.where(which == _HUE, 1.0, np.take_along_axis(factors, which[:, None], 1)[:, 0])
            rest = 1.0 - factor.astype(np.float32).astype(np.float64)
            params[f"keep{place}"] = factor.astype(np.float32)
            params[f"grey{place}"] = np.where(which == 2, rest, 0).astype(np.float32)
            params[f"mean{place}"] = np.where(which == 1, rest, 0).astype(np.float32)
            if _HUE in self.ranges:
                params[f"turn{place}"] = which == _HUE
        if _HUE in self.ranges:
            params["hue"] = factors[:, _HUE]
        return {**params, "order": order, "factors": factors}

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        for place in range(len(self.ranges)):
            weight = {name: params[f"{name}{place}"] for name in self._weights}
            if weight:
                image = self._blend(ops, image, weight)
            if _HUE in self.ranges:
                turn = {"hue": params["hue"]}
                image = ops.when(params[f"turn{place}"], lambda x, p: turn_hue(ops, x, p["hue"]), image, turn)
        return image

    def _blend(self, ops: Ops, image: Node, weight: Mapping[str, Node]) -> Node:
        blend = image * weight["keep"]
        if "grey" in weight or "mean" in weight:
            shade = grey(ops, image)
            if "grey" in weight:
                blend = blend + shade * weight["grey"]
            if "mean" in weight:
                mean = ops.fn.reductions.mean(shade, axes=[0, 1, 2], keep_dims=True)
                blend = blend + mean * weight["mean"]
        return truncated(ops, blend)

    def replay(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        for which in sample["order"].tolist():
            image = _REPLAY[which](image, float(sample["factors"][which]))
        return image


def turn_hue(ops: Ops, image: Node, turn: Node) -> Node:
    """Adds ``turn`` (in turns of the colour circle) to the hue of a uint8 RGB image.

    RGB to HSV as torchvision does it; back by the closed form ``v - v * s * max(0, min(k, 4 - k, 1))`` with
    ``k = (n + 6 * h) mod 6`` and n = 5, 3, 1 for red, green, blue (https://en.wikipedia.org/wiki/HSL_and_HSV).
    """
    fn, math = ops.fn, ops.math
    unit = image * np.float32(1 / 255)
    red, green, blue = (fn.slice(unit, start=[c], shape=[1], axes=[2]) for c in range(3))
    value = math.max(math.max(red, green), blue)
    spread = value - math.min(math.min(red, green), blue)
    flat = fn.cast(spread == 0.0, dtype=ops.types.FLOAT)
    saturation = spread / (value + flat)
    at_red = fn.cast(value == red, dtype=ops.types.FLOAT)
    at_green = fn.cast(value == green, dtype=ops.types.FLOAT) * (1.0 - at_red)
    at_blue = 1.0 - at_red - at_green
    offset = at_red * (green - blue) + at_green * (blue - red) + at_blue * (red - green)
    hue = (offset / (spread + flat) + 2.0 * at_green + 4.0 * at_blue) * np.float32(1 / 6) + turn
    hue = (hue - math.floor(hue)) * 6.0
    k = fn.coord_transform(hue, M=[1.0, 1.0, 1.0], T=[5.0, 3.0, 1.0])
    k = k - math.floor(k * np.float32(1 / 6)) * 6.0
    turned = value - value * saturation * math.clamp(math.min(k, 4.0 - k), 0.0, 1.0)
    # torchvision maps [0, 1] to 0..255 by the factor 256 - 1e-3 and truncation.
    return fn.cast(math.floor(turned * np.float32(255.999)), dtype=ops.types.UINT8)
