"""Rules of colours that change pixel by pixel, with a probability.

Each function of nodes computes what torchvision's tensor kernel does, for uint8 and for float32. The rules choose the
numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Rule, Unsupported
from torchdali.transforms.rules.color import (
    check_image,
    check_unit_range,
    clamp_to_image,
    repeat_channel,
    to_grey,
    white_level,
)
from torchdali.transforms.spec import IntArray, Params, Sample, Spec


def invert(image: Node, white: Node, spec: Spec) -> Node:
    """Return ``white - image`` if ``white`` is the value of white, and the image if ``white`` is 0.

    ``white`` has the image's dtype.
    """
    if spec.dtype == torch.uint8:
        return image ^ white
    return image * (1.0 - white * 2.0) + white


def posterize_argument(bits: npt.ArrayLike, spec: Spec) -> npt.NDArray[Any]:
    """Return the argument of :func:`posterize` for a number of bits: a mask, or for floats the number of levels."""
    number: IntArray = np.asarray(bits, np.int64)
    if spec.dtype.is_floating_point:
        return np.asarray(2.0**number, np.float32)
    return np.asarray(256 - (256 >> np.minimum(number, 8)), np.uint8)


def posterize(ops: Ops, image: Node, by: Node, spec: Spec) -> Node:
    """Reduce the number of levels, see :func:`posterize_argument`. A mask of 255 does not change a uint8 image."""
    if spec.dtype == torch.uint8:
        return image & by
    return ops.math.clamp(ops.math.floor(image * by), 0.0, by - 1.0) / by


def solarize(ops: Ops, image: Node, threshold: Node, spec: Spec) -> Node:
    """Invert values at or above a float32 threshold. A threshold above white changes nothing."""
    above = image >= threshold
    if spec.dtype == torch.uint8:
        return image ^ ops.fn.cast(above * 255, dtype=ops.types.UINT8)
    inverted = ops.fn.cast(above, dtype=ops.types.FLOAT)
    # One of the two terms is 0, so there is no rounding that torchvision does not have.
    return inverted * (1.0 - image) + (1.0 - inverted) * image


def sharpen(ops: Ops, image: Node, rest: Node, spec: Spec) -> Node:
    """Return ``image + rest * (blurred - image)``. The outermost pixels are not changed.

    Args:
        ops: DALI's operators.
        image: HWC.
        rest: float32 on the CPU: 1 - torchvision's ``sharpness_factor``.
        spec: Type of the image.
    """
    fn = ops.fn
    # torchvision's kernel is 1/13, and 5/13 in the middle. DALI has no constants of the right batch size in conditional
    # branches, so the kernel is made of an input.
    side = rest * np.float32(0) + np.float32(1 / 13)
    kernel = fn.reshape(fn.stack(*[side] * 4, side * np.float32(-8), *[side] * 4), shape=[3, 3])
    change = fn.filter(image, kernel.gpu() if ops.device == "gpu" else kernel, dtype=ops.types.FLOAT)
    if spec.dtype == torch.uint8:
        # torchvision rounds the blurred image. Multiples of 1/13 are never half way between two integers.
        change = ops.math.floor(change + 0.5)
    for axis in (0, 1):
        # DALI rounds an anchor down: here to the first and to the last pixel. So an image of two pixels is not changed.
        change = fn.erase(
            change,
            anchor=[0.0, 0.999999],
            shape=[1.0, 1.0],
            axes=[axis],
            normalized_anchor=True,
            normalized_shape=False,
            fill_value=0.0,
        )
    return clamp_to_image(ops, image + change * rest, spec)


class RGB(Rule):
    """Rule of RGB: grey as three equal channels."""

    handles = (v2.RGB,)
    unsupported_when = "not uint8 or float32"

    def infer(self, spec: Spec) -> Spec:
        if spec.kind == "video":
            return spec  # torchvision has no kernel for videos and leaves them as they are
        check_image(spec)
        self.operators = "cat" if spec.channels == 1 else ""
        return replace(spec, channels=3)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return repeat_channel(ops, image) if self.operators else image

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.grayscale_to_rgb(image)


class Value(NamedTuple):
    """Number that is fed for each sample, and that the operators take as their argument.

    Attributes:
        dtype: Element type.
        applied: Value for samples to which the transform is applied.
        neutral: Value that changes nothing, exactly. If None, the batch is split instead.
    """

    dtype: type[np.generic]
    applied: float
    neutral: float | None = None


class RandomlyApplied(Rule):
    """Base class of rules that change each image with a probability."""

    apply_operators: str
    """Operators that ``apply`` emits, in words."""
    unsupported_when = "not uint8 or float32"
    value: Value | None = None
    functional: ClassVar[Callable[..., torch.Tensor]]
    """torchvision's functional."""
    arguments: tuple[str, ...] = ()
    """Attributes of the transform that it takes after the image."""

    def infer(self, spec: Spec) -> Spec:
        check_image(spec)
        self.spec = spec
        self.value = self.infer_value(spec)
        p = float(self.transform.p)
        self.randomness = f"apply with probability {p:g}"
        self.operators = f"split, {self.apply_operators}, merge" if self._needs_split else self.apply_operators
        if p <= 0 or not self.apply_operators:
            self.operators = ""
        return spec

    def infer_value(self, spec: Spec) -> Value | None:
        """Return the number that is fed, or None.

        Raises:
            Unsupported: The transform runs in torch.
        """
        return None

    @abstractmethod
    def apply(self, ops: Ops, image: Node, params: Nodes) -> Node:
        """Emit the operators for images to which the transform is applied."""

    def apply_reference(self, image: torch.Tensor) -> torch.Tensor:
        """Apply torchvision's functional."""
        return type(self).functional(image, *(getattr(self.transform, name) for name in self.arguments))

    @property
    def _needs_split(self) -> bool:
        return self.transform.p < 1 and (self.value is None or self.value.neutral is None)

    @property
    def inputs(self) -> dict[str, Input]:
        fed = {"value": Input(self.value.dtype)} if self.value else {}
        return {"apply": Input(np.bool_), **fed} if self._needs_split else fed

    def draw(self, draws: Draws, size: IntArray) -> Params:
        apply = draws.bernoulli(self.transform.p)
        if self.value is None:
            return {"apply": apply}
        _, applied, neutral = self.value
        return {"apply": apply, "value": np.where(apply, applied, applied if neutral is None else neutral)}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if not self._needs_split:
            return self.apply(ops, image, params)
        return ops.apply_where(
            params["apply"], partial(self.apply, ops), image, {k: params[k] for k in params if k == "value"}
        )

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return self.apply_reference(image) if sample["apply"] else image


class RandomGrayscale(RandomlyApplied):
    """Rule of RandomGrayscale: grey with probability p, in as many channels as the image has."""

    handles = (v2.RandomGrayscale, v1.RandomGrayscale)
    apply_operators = "coord_transform, floor, cast, cat"

    def infer(self, spec: Spec) -> Spec:
        spec = super().infer(spec)
        # torchvision has no kernel for videos and leaves them as they are.
        self.is_kept = spec.channels == 1 or (spec.kind == "video" and isinstance(self.transform, v2.RandomGrayscale))
        if self.is_kept:
            self.operators = ""
        return spec

    def apply(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.is_kept:
            return image
        shade = to_grey(ops, image, self.spec)
        return repeat_channel(
            ops, shade if self.spec.dtype.is_floating_point else ops.fn.cast(shade, dtype=ops.types.UINT8)
        )

    def apply_reference(self, image: torch.Tensor) -> torch.Tensor:
        return F.rgb_to_grayscale(image, image.shape[-3])


class RandomInvert(RandomlyApplied):
    """Rule of RandomInvert: white minus the image with probability p."""

    handles = (v2.RandomInvert, v1.RandomInvert)
    apply_operators = "arithmetic"
    functional = F.invert

    def infer_value(self, spec: Spec) -> Value:
        return Value(np.float32 if spec.dtype.is_floating_point else np.uint8, white_level(spec), 0)

    def apply(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return invert(image, params["value"], self.spec)


class RandomPosterize(RandomlyApplied):
    """Rule of RandomPosterize: fewer bits with probability p."""

    handles = (v2.RandomPosterize, v1.RandomPosterize)
    apply_operators = "arithmetic"
    functional = F.posterize
    arguments = ("bits",)
    unsupported_when = "not uint8 or float32, v1's not uint8; bits that torchvision refuses"

    def infer_value(self, spec: Spec) -> Value:
        bits: Any = self.transform.bits
        if not isinstance(bits, int) or not 0 <= bits <= 8:
            raise Unsupported(f"torchvision's posterize accepts 0 to 8 bits, not {bits}")
        if spec.kind == "pil" and bits == 0:
            raise Unsupported("PIL refuses 0 bits")
        if spec.dtype.is_floating_point:
            if isinstance(self.transform, v1.RandomPosterize):
                raise Unsupported("v1's RandomPosterize accepts uint8 only")
            check_unit_range(spec)
            return Value(np.float32, posterize_argument(bits, spec).item())
        return Value(np.uint8, posterize_argument(bits, spec).item(), 255)

    def apply(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return posterize(ops, image, params["value"], self.spec)


class RandomSolarize(RandomlyApplied):
    """Rule of RandomSolarize: with probability p, values at or above a threshold are inverted."""

    handles = (v2.RandomSolarize, v1.RandomSolarize)
    apply_operators = "arithmetic, cast"
    functional = F.solarize
    arguments = ("threshold",)
    unsupported_when = "not uint8 or float32; a threshold below black or above white"

    def infer_value(self, spec: Spec) -> Value:
        if self.transform.threshold > white_level(spec):
            raise Unsupported(f"torchvision's solarize accepts thresholds up to {white_level(spec):g} here")
        if self.transform.threshold < 0:
            raise Unsupported("torch takes a negative threshold modulo 256 for uint8")
        return Value(np.float32, self.transform.threshold, np.inf)

    def apply(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return solarize(ops, image, params["value"], self.spec)


class RandomAdjustSharpness(RandomlyApplied):
    """Rule of RandomAdjustSharpness: sharper or softer with probability p."""

    handles = (v2.RandomAdjustSharpness, v1.RandomAdjustSharpness)
    apply_operators = "filter, erase, arithmetic, cast"
    functional = F.adjust_sharpness
    arguments = ("sharpness_factor",)
    unsupported_when = "not uint8 or float32; a negative factor, which torchvision refuses"

    def infer_value(self, spec: Spec) -> Value:
        if self.transform.sharpness_factor < 0:
            raise Unsupported("torchvision refuses negative factors")
        return Value(np.float32, 1.0 - self.transform.sharpness_factor)

    def apply(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return sharpen(ops, image, params["value"], self.spec)
