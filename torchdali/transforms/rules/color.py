"""Rules of colours: grey images, and random brightness, contrast, saturation and hue.

The arithmetic is that of torchvision's tensor kernels, which truncate uint8. DALI's own ``hue`` and ``color_twist`` are
not used: they rotate colours in YIQ, which differs from torchvision's hue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Rule, Unsupported
from torchdali.transforms.rules._host import call_torch
from torchdali.transforms.spec import IntArray, Params, Sample, Spec

LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in grey, from torchvision."""

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
_NAMES = ("brightness", "contrast", "saturation", "hue")
_REFERENCES: tuple[Any, ...] = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def check_image(spec: Spec) -> None:
    """Raise Unsupported unless images are uint8 or float32 with one channel or three."""
    if spec.channels not in (1, 3) or spec.dtype not in (torch.uint8, torch.float32):
        raise Unsupported(f"no rule for {spec}")


def check_unit_range(spec: Spec) -> None:
    """Raise Unsupported if floats may lie outside of [0, 1]. torchvision's kernels treat them in many ways."""
    if spec.dtype.is_floating_point and not spec.unit:
        raise Unsupported("values may lie outside of [0, 1] at this place")


def white_level(spec: Spec) -> float:
    """Return the value of white."""
    return 1.0 if spec.dtype.is_floating_point else 255.0


def clamp_to_image(ops: Ops, values: Node, spec: Spec) -> Node:
    """Convert float32 values to an image: clamp, and for uint8 round towards zero, as torch casts."""
    if spec.dtype.is_floating_point:
        return ops.math.clamp(values, 0.0, 1.0)
    return ops.fn.cast(ops.math.floor(values), dtype=ops.types.UINT8)  # cast() clamps


def to_grey(ops: Ops, image: Node, spec: Spec) -> Node:
    """Return ``(H, W, 1)`` float32 grey, rounded down if the image is uint8."""
    if spec.channels == 1:
        return ops.fn.cast(image, dtype=ops.types.FLOAT)
    shade = ops.fn.coord_transform(image, M=list(LUMA), dtype=ops.types.FLOAT)
    return shade if spec.dtype.is_floating_point else ops.math.floor(shade)


def repeat_channel(ops: Ops, image: Node) -> Node:
    """Repeat one channel three times."""
    return ops.fn.cat(image, image, image, axis=2)


def blend_weights(kind: npt.ArrayLike, factor: npt.NDArray[np.floating[Any]]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of :func:`blend` that change brightness, contrast or saturation by a factor.

    Args:
        kind: ``(N,)`` :data:`BRIGHTNESS`, :data:`CONTRAST` or :data:`SATURATION`. With any other value the blend
            does not change the image.
        factor: ``(N,)``.
    """
    which: IntArray = np.asarray(kind, np.int64)
    factor = np.where((which >= BRIGHTNESS) & (which <= SATURATION), factor.astype(np.float64), 1.0)
    # Compute in double precision and round once, as torch does.
    rest = 1.0 - factor
    each = {
        "keep": factor,
        "grey": np.where(which == SATURATION, rest, 0),
        "mean": np.where(which == CONTRAST, rest, 0),
    }
    return {name: values.astype(np.float32) for name, values in each.items()}


def blend(ops: Ops, image: Node, weight: Nodes, spec: Spec) -> Node:
    """Return ``image * keep + its grey * grey + its mean grey * mean``. Missing weights are 0."""
    shades: list[Node] = []
    if "grey" in weight or "mean" in weight:
        shade = to_grey(ops, image, spec)
        if "grey" in weight:
            shades.append(shade * weight["grey"])
        if "mean" in weight:
            shades.append(ops.fn.reductions.mean(shade, axes=[0, 1, 2], keep_dims=True) * weight["mean"])
    result = image * weight["keep"]
    return clamp_to_image(ops, result + sum(shades[1:], shades[0]) if shades else result, spec)


class Grayscale(Rule):
    """Rule of Grayscale: one channel of grey, or three equal ones."""

    handles = (v2.Grayscale, v1.Grayscale)
    unsupported_when = "not uint8 or float32"

    def infer(self, spec: Spec) -> Spec:
        self.spec = spec
        if spec.kind == "video" and isinstance(self.transform, v2.Grayscale):
            return spec  # torchvision has no kernel for videos and leaves them as they are
        check_image(spec)
        count: int = self.transform.num_output_channels
        if count not in (1, 3):
            raise Unsupported("num_output_channels is neither 1 nor 3")
        if spec.channels < count and spec.kind != "pil" and isinstance(self.transform, v1.Grayscale):
            raise Unsupported("v1's Grayscale leaves tensors of one channel as they are")
        self.operators = ", ".join(["coord_transform, floor, cast"] * (spec.channels == 3) + ["cat"] * (count == 3))
        return replace(spec, channels=count)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if not self.operators:
            return image
        if self.spec.channels == 3:
            image = to_grey(ops, image, self.spec)
            if not self.spec.dtype.is_floating_point:
                image = ops.fn.cast(image, dtype=ops.types.UINT8)
        return image if self.transform.num_output_channels == 1 else repeat_channel(ops, image)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.rgb_to_grayscale(image, self.transform.num_output_channels)


class ColorJitter(Rule):
    """Rule of ColorJitter: brightness, contrast, saturation and hue by random factors, in random order.

    Brightness, contrast and saturation are one operation with three weights, see :func:`blend`. So an order of them
    is an order of weights. Hue is another operation. All blends are emitted before it and once more after it. In each
    sample half of them change nothing. This takes less time than splitting the batch at every step. On a CPU torch
    does all of it, in a third of the time.
    """

    handles = (v2.ColorJitter, v1.ColorJitter)
    unsupported_when = "not uint8 or float32"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.ranges: dict[int, tuple[float, float]] = {
            i: tuple(getattr(transform, name)) for i, name in enumerate(_NAMES) if getattr(transform, name)
        }

    def infer(self, spec: Spec) -> Spec:
        check_image(spec)
        self.spec = spec
        if spec.channels == 1:
            # An image without colour keeps its saturation and hue.
            self.ranges = {i: ends for i, ends in self.ranges.items() if i in (BRIGHTNESS, CONTRAST)}
        if HUE in self.ranges:
            check_unit_range(spec)
        needed = {"coord_transform": {SATURATION, CONTRAST}, "reduce": {CONTRAST}, "arithmetic": set(range(4))}
        needed |= {"split": {HUE}, "merge": {HUE}}
        self.operators = ", ".join(name for name, by in needed.items() if by & set(self.ranges))
        self.is_on_host = spec.device == "cpu"
        if self.is_on_host:
            self.operators = "ColorJitter by torch"
        self.randomness = ", ".join(["order", *(f"{_NAMES[i]} factor" for i in self.ranges)])
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        if self.is_on_host:
            return {"order": Input(np.int64, 1), "factors": Input(np.float32, 1)}
        names = {f"{name}{i}": Input(np.float32) for i in range(self._stages) for name in self._weights}
        return {**names, "turn": Input(np.float32, 1)} if HUE in self.ranges else names

    @property
    def _num_blends(self) -> int:
        """Number of operations that are blends."""
        return len(self.ranges) - (HUE in self.ranges)

    @property
    def _stages(self) -> int:
        return self._num_blends * (2 if HUE in self.ranges else 1)

    @property
    def _weights(self) -> list[str]:
        """Names of the blend's weights that can differ from 0."""
        terms = {"keep": {BRIGHTNESS, CONTRAST, SATURATION}, "grey": {SATURATION}, "mean": {CONTRAST}}
        return [name for name, needed_by in terms.items() if needed_by & set(self.ranges)]

    def draw(self, draws: Draws, size: IntArray) -> Params:
        # Operations that are not jittered are left out. The order of the rest is still uniform.
        order = np.array(list(self.ranges), np.int64)[draws.permutation(len(self.ranges))]
        factors = np.zeros((len(draws), len(_NAMES)), np.float32)
        for i, (low, high) in self.ranges.items():
            factors[:, i] = draws.uniform_range(low, high)
        params: Params = {"order": order, "factors": factors, "turn": hue_offsets(factors[:, HUE])}
        is_hue = order == HUE
        before = np.argmax(is_hue, axis=1) if HUE in self.ranges else np.full(len(draws), len(self.ranges))
        blends = order[~is_hue].reshape(len(draws), self._num_blends)
        for stage in range(self._stages):
            which = blends[:, stage % self._num_blends]
            here = (stage % self._num_blends < before) == (stage < self._num_blends)
            factor = np.take_along_axis(factors, which[:, None], 1)[:, 0]
            each = blend_weights(np.where(here, which, HUE), factor)
            params |= {f"{name}{stage}": values for name, values in each.items()}
        return params

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.is_on_host:
            return call_torch(ops, self.reference, image, params)
        for stage in range(self._stages + 1):
            if stage == self._num_blends and HUE in self.ranges:
                image = shift_hue(ops, image, params["turn"], self.spec)
            if stage < self._stages:
                image = blend(ops, image, {name: params[f"{name}{stage}"] for name in self._weights}, self.spec)
        return image

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        for which in sample["order"].tolist():
            image = _REFERENCES[which](image, float(sample["factors"][which]))
        return image


def hue_offsets(hue: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    """Return the ``(N, 3)`` input of :func:`shift_hue` for ``(N,)`` shifts, in turns of the colour circle."""
    return ((np.array([5.0, 3.0, 1.0]) - 2.0) / 6.0 + hue.astype(np.float64)[:, None]).astype(np.float32)


def shift_hue(ops: Ops, image: Node, turn: Node, spec: Spec) -> Node:
    """Shift the hue of an RGB image.

    The hue is computed as in torchvision. Of several equal largest channels torchvision takes the first. Here it is
    any, because they have the same hue. The way back has a closed form, ``v - c * max(0, min(k, 4 - k, 1))``
    (https://en.wikipedia.org/wiki/HSL_and_HSV). There v is the largest value, and c its distance from the least. k is
    ``(n + 6 * h) mod 6``, with n = 5, 3, 1 for R, G, B. And ``min(k, 4 - k)`` is 2 minus the distance of k from 2 on a
    circle of 6.

    Args:
        ops: DALI's operators.
        image: HWC.
        turn: Result of :func:`hue_offsets`, for each sample.
        spec: Type of the image.
    """
    fn, math = ops.fn, ops.math
    ahead = np.float32(8 * white_level(spec))
    value = fn.reductions.max(image, axes=[2], keep_dims=True)
    spread = value - fn.reductions.min(image, axes=[2], keep_dims=True)
    # Six times the hue, times the spread, for each channel as if it were the largest.
    each = fn.coord_transform(image, M=[0.0, 1.0, -1.0, -1.0, 0.0, 1.0, 1.0, -1.0, 0.0])
    each = each + fn.coord_transform(spread, M=[0.0, 2.0, 4.0])
    largest = fn.reductions.max(each + (image == value) * ahead, axes=[2], keep_dims=True)
    least = np.float32(1e-30) if spec.dtype.is_floating_point else np.uint8(1)
    hue = (largest - ahead) / math.max(spread, least)
    place = fn.coord_transform(hue, M=[1 / 6, 1 / 6, 1 / 6], T=turn)
    away = math.abs(place - fn.cast(place, dtype=ops.types.INT8))  # distance from the nearest whole turn
    turned = value - spread * math.clamp(2.0 - away * 6.0, 0.0, 1.0)
    if spec.dtype.is_floating_point:
        return turned
    # torchvision multiplies [0, 1] by 256 - 1e-3 and truncates.
    return clamp_to_image(ops, turned * np.float32(255.999 / 255), spec)
