"""Colours: grey images, and random brightness, contrast, saturation and hue.

The arithmetic is that of torchvision's tensor kernels: on uint8 with truncation, on floats without. DALI's own ``hue``
and ``color_twist`` are not used: they turn colours in YIQ, which is another thing than torchvision's hue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.rng import Draws
from torchdali.spec import IntArray, Params, Sample, Spec
from torchdali.transforms._rule import Input, Node, Ops, Rule, Unsupported

__all__ = [
    "ColorJitter",
    "Grayscale",
    "blend",
    "bound",
    "check",
    "check_range",
    "grey",
    "settle",
    "three",
    "turn_hue",
    "weights",
]

LUMA = (0.2989, 0.587, 0.114)
"""torchvision's weights of red, green and blue in grey."""

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
_NAMES = ("brightness", "contrast", "saturation", "hue")
_REPLAY: tuple[Any, ...] = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def check(spec: Spec) -> None:
    """Raises Unsupported unless images are uint8 or float32 with one channel or three."""
    if spec.channels not in (1, 3) or spec.dtype not in (torch.uint8, torch.float32):
        raise Unsupported(f"no rule for {spec}")


def check_range(spec: Spec) -> None:
    """Raises Unsupported where floats may lie outside of [0, 1], which torchvision's kernels treat in many ways."""
    if spec.dtype.is_floating_point and not spec.unit:
        raise Unsupported("values may lie outside of [0, 1] at this place")


def bound(spec: Spec) -> float:
    """The value of white."""
    return 1.0 if spec.dtype.is_floating_point else 255.0


def settle(ops: Ops, values: Node, spec: Spec) -> Node:
    """float32 values as an image: clamped, and for uint8 cast as torch casts, towards zero."""
    values = ops.math.clamp(values, 0.0, bound(spec))
    return values if spec.dtype.is_floating_point else ops.fn.cast(ops.math.floor(values), dtype=ops.types.UINT8)


def grey(ops: Ops, image: Node, spec: Spec) -> Node:
    """``(H, W, 1)`` float32 grey, rounded down where the image is uint8."""
    if spec.channels == 1:
        return ops.fn.cast(image, dtype=ops.types.FLOAT)
    shade = ops.fn.coord_transform(image, M=list(LUMA), dtype=ops.types.FLOAT)
    return shade if spec.dtype.is_floating_point else ops.math.floor(shade)


def three(ops: Ops, image: Node) -> Node:
    """One channel as three."""
    return ops.fn.cat(image, image, image, axis=2)


def weights(kind: npt.ArrayLike, factor: npt.NDArray[np.floating[Any]]) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of :func:`blend` for samples whose brightness, contrast or saturation changes by a factor.

    Args:
        kind: ``(N,)`` :data:`BRIGHTNESS`, :data:`CONTRAST` or :data:`SATURATION`; where it is anything else, the
            blend leaves the image as it is.
        factor: ``(N,)``.
    """
    which: IntArray = np.asarray(kind, np.int64)
    factor = np.where((which >= BRIGHTNESS) & (which <= SATURATION), factor.astype(np.float64), 1.0)
    # As torch computes it: in double precision, rounded once.
    rest = 1.0 - factor
    each = {
        "keep": factor,
        "grey": np.where(which == SATURATION, rest, 0),
        "mean": np.where(which == CONTRAST, rest, 0),
    }
    return {name: values.astype(np.float32) for name, values in each.items()}


def blend(ops: Ops, image: Node, weight: Mapping[str, Node], spec: Spec) -> Node:
    """``image * keep + its grey * grey + its mean grey * mean``, with those of the three weights that there are."""
    result = image * weight["keep"]
    if "grey" in weight or "mean" in weight:
        shade = grey(ops, image, spec)
        if "grey" in weight:
            result = result + shade * weight["grey"]
        if "mean" in weight:
            mean = ops.fn.reductions.mean(shade, axes=[0, 1, 2], keep_dims=True)
            result = result + mean * weight["mean"]
    return settle(ops, result, spec)


class Grayscale(Rule):
    """Grey, in one channel or three equal ones."""

    handles = (v2.Grayscale, v1.Grayscale)
    limits = "not uint8 or float32"

    def infer(self, spec: Spec) -> Spec:
        check(spec)
        count: int = self.transform.num_output_channels
        if count not in (1, 3):
            raise Unsupported("num_output_channels is neither 1 nor 3")
        if spec.channels < count and spec.kind != "pil" and isinstance(self.transform, v1.Grayscale):
            raise Unsupported("v1's Grayscale leaves tensors of one channel as they are")
        self.spec = spec
        self.operators = ", ".join(["coord_transform, floor, cast"] * (spec.channels == 3) + ["cat"] * (count == 3))
        return replace(spec, channels=count)

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        if self.spec.channels == 3:
            image = grey(ops, image, self.spec)
            if not self.spec.dtype.is_floating_point:
                image = ops.fn.cast(image, dtype=ops.types.UINT8)
        return image if self.transform.num_output_channels == 1 else three(ops, image)

    def replay(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.rgb_to_grayscale(image, self.transform.num_output_channels)


class ColorJitter(Rule):
    """Brightness, contrast, saturation and hue, each by a random factor, in an order of its own for each sample.

    Every place in the order is one blend of the image with its grey (saturation), its mean grey (contrast) and
    black (brightness), see :func:`blend`; for the samples whose hue comes at this place it changes nothing, and
    their hue is turned after it.
    """

    handles = (v2.ColorJitter, v1.ColorJitter)
    limits = "not uint8 or float32"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.ranges: dict[int, tuple[float, float]] = {
            i: tuple(getattr(transform, name)) for i, name in enumerate(_NAMES) if getattr(transform, name)
        }

    def infer(self, spec: Spec) -> Spec:
        check(spec)
        self.spec = spec
        if spec.channels == 1:
            # What has no colour keeps its saturation and hue.
            self.ranges = {i: one for i, one in self.ranges.items() if i in (BRIGHTNESS, CONTRAST)}
        if HUE in self.ranges:
            check_range(spec)
        needed = {"coord_transform": {SATURATION, CONTRAST}, "reduce": {CONTRAST}, "arithmetic": set(range(4))}
        needed |= {"split": {HUE}, "merge": {HUE}}
        self.operators = ", ".join(name for name, by in needed.items() if by & set(self.ranges))
        self.randomness = ", ".join(["order", *(f"{_NAMES[i]} factor" for i in self.ranges)])
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        places = range(len(self.ranges))
        names = {f"{name}{i}": Input(np.float32) for i in places for name in self._weights}
        if HUE in self.ranges:
            names |= {f"turn{i}": Input(np.bool_) for i in places} | {"hue": Input(np.float32)}
        return names

    @property
    def _weights(self) -> list[str]:
        """The terms of the blend that can differ from nothing."""
        terms = {"keep": {BRIGHTNESS, CONTRAST, SATURATION}, "grey": {SATURATION}, "mean": {CONTRAST}}
        return [name for name, needed_by in terms.items() if needed_by & set(self.ranges)]

    def draw(self, draws: Draws, size: IntArray) -> Params:
        # Leaving out what is not jittered keeps a uniform order of the rest uniform.
        order = np.array(list(self.ranges), np.int64)[draws.permutation(len(self.ranges))]
        factors = np.zeros((len(draws), len(_NAMES)), np.float32)
        for i, (low, high) in self.ranges.items():
            factors[:, i] = draws.between(low, high)
        params: Params = {"order": order, "factors": factors, "hue": factors[:, HUE]}
        for place in range(len(self.ranges)):
            which = order[:, place]
            factor = np.take_along_axis(factors, which[:, None], 1)[:, 0]
            params |= {f"{name}{place}": values for name, values in weights(which, factor).items()}
            params[f"turn{place}"] = which == HUE
        return params

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        for place in range(len(self.ranges)):
            weight = {name: params[f"{name}{place}"] for name in self._weights}
            if weight:
                image = blend(ops, image, weight, self.spec)
            if HUE in self.ranges:
                turn = {"hue": params["hue"]}
                image = ops.when(
                    params[f"turn{place}"], lambda x, p: turn_hue(ops, x, p["hue"], self.spec), image, turn
                )
        return image

    def replay(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        for which in sample["order"].tolist():
            image = _REPLAY[which](image, float(sample["factors"][which]))
        return image


def turn_hue(ops: Ops, image: Node, turn: Node, spec: Spec) -> Node:
    """Adds ``turn`` (in turns of the colour circle) to the hue of an RGB image.

    RGB to HSV as torchvision does it; back by the closed form ``v - v * s * max(0, min(k, 4 - k, 1))`` with
    ``k = (n + 6 * h) mod 6`` and n = 5, 3, 1 for red, green, blue (https://en.wikipedia.org/wiki/HSL_and_HSV).
    """
    fn, math = ops.fn, ops.math
    floating = spec.dtype.is_floating_point
    unit = image if floating else image * np.float32(1 / 255)
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
    if floating:
        return turned
    # torchvision maps [0, 1] to 0..255 by the factor 256 - 1e-3 and truncation.
    return fn.cast(math.floor(turned * np.float32(255.999)), dtype=ops.types.UINT8)
