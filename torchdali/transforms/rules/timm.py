"""Rules of timm's transforms. timm need not be installed."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Composite, Unsupported
from torchdali.transforms.rules.conversion import PILToTensor, ToTensor
from torchdali.transforms.rules.crop import CenterCrop, Window, resolve_fill
from torchdali.transforms.rules.erasing import RandomErasing
from torchdali.transforms.rules.normalize import ToDtype
from torchdali.transforms.rules.resize import Resizing
from torchdali.transforms.rules.resized_crop import RandomResizedCrop
from torchdali.transforms.spec import IntArray, Sample, Spec


class RandomResizedCropAndInterpolation(RandomResizedCrop):
    """Rule of RandomResizedCropAndInterpolation. With ``interpolation="random"`` each sample draws a filter."""

    handles = ("timm.data.transforms.RandomResizedCropAndInterpolation",)

    def infer(self, spec: Spec) -> Spec:
        if len(self.transform.size) != 2:
            raise Unsupported("its size is not (height, width)")
        spec = super().infer(spec)
        self.randomness = RandomResizedCrop.randomness + (", filter" if len(self.resampling.modes) > 1 else "")
        return spec


class ResizeKeepRatio(Resizing):
    """Rule of ResizeKeepRatio: a size that covers the target, fits into it, or lies between.

    At random it is larger, smaller or stretched.
    """

    handles = ("timm.data.transforms.ResizeKeepRatio",)

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.scales: bool = transform.random_scale_prob > 0
        self.stretches: bool = transform.random_aspect_prob > 0

    def infer(self, spec: Spec) -> Spec:
        if len(self.transform.size) != 2:
            raise Unsupported("its size is not (height, width)")
        spec = super().infer(spec)
        drawn = {"scale": self.scales, "aspect ratio": self.stretches, "filter": len(self.resampling.modes) > 1}
        self.randomness = ", ".join(name for name, used in drawn.items() if used)
        return spec

    def sizes(self, draws: Draws, size: IntArray) -> IntArray:
        transform = self.transform
        ratio = size / np.array(transform.size, np.float64)
        ratio = ratio.max(axis=1) * transform.longest + ratio.min(axis=1) * (1.0 - transform.longest)
        u = draws.uniform(4)
        factor = np.ones(size.shape)
        if self.scales:
            low, high = transform.random_scale_range
            scale = low + (high - low) * u[:, 1]
            scale = 1.0 / np.sqrt(scale) if transform.random_scale_area else scale
            factor *= np.where(u[:, 0] < transform.random_scale_prob, scale, 1.0)[:, None]
        if self.stretches:
            low, high = (math.log(x) for x in transform.random_aspect_range)
            aspect = np.sqrt(np.exp(low + (high - low) * u[:, 3]))
            aspect = np.where(u[:, 2] < transform.random_aspect_prob, aspect, 1.0)
            factor = np.stack((factor[:, 0] / aspect, factor[:, 1] * aspect), axis=1)
        return np.rint(size * factor / ratio[:, None]).astype(np.int64)


def resolve_constant_fill(transform: Any, spec: Spec) -> list[float]:
    """Return the fill values of a timm transform that pads with torchvision's v1 ``pad``.

    Raises:
        Unsupported: The transform does not fill with a constant, or cannot fill images of this kind.
    """
    mode = getattr(transform, "padding_mode", "constant")
    if mode != "constant":
        raise Unsupported(f"no rule for padding_mode={mode!r}, whose border differs from sample to sample")
    if spec.kind != "pil" and not isinstance(transform.fill, (int, float)):
        raise Unsupported("torchvision's v1 pad fills tensors with one number only")
    return resolve_fill(transform, spec)


class CenterCropOrPad(CenterCrop):
    """Rule of CenterCropOrPad: torchvision's CenterCrop with a fill value."""

    handles = ("timm.data.transforms.CenterCropOrPad",)
    unsupported_when = "padding_mode other than constant"

    def infer(self, spec: Spec) -> Spec:
        self.fill = resolve_constant_fill(self.transform, spec)
        return super().infer(spec)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return Window.reference(self, image, sample)


class RandomCropOrPad(Window):
    """Rule of RandomCropOrPad: a window of fixed size at a random position.

    It lies in the image, or around it if the image is smaller.
    """

    handles = ("timm.data.transforms.RandomCropOrPad",)
    unsupported_when = "padding_mode other than constant"
    randomness = "top, left"

    def infer(self, spec: Spec) -> Spec:
        self.fill = resolve_constant_fill(self.transform, spec)
        height, width = self.transform.size
        return replace(spec, size=(int(height), int(width)))

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        shape = np.broadcast_to(np.array(self.transform.size, np.int64), size.shape)
        spare = size - shape
        start = np.floor(draws.uniform(2) * (np.abs(spare) + 1)).astype(np.int64)
        return np.where(spare < 0, -start, start), shape


class RandomPad(Window):
    """Rule of RandomPad: a border, split at random, if the image is smaller than the target."""

    handles = ("timm.data.transforms.RandomPad",)
    randomness = "left, top"

    def infer(self, spec: Spec) -> Spec:
        self.fill = resolve_constant_fill(self.transform, spec)
        return replace(spec, size=None)

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        missing = np.maximum(np.array(self.transform.input_size, np.int64)[:2] - size, 0)
        start = np.floor(draws.uniform(2) * (missing + 1)).astype(np.int64)
        return -start, size + missing


class TrimBorder(Window):
    """Rule of TrimBorder: the image without a border of fixed width."""

    handles = ("timm.data.transforms.TrimBorder",)
    stays_inside = True

    def infer(self, spec: Spec) -> Spec:
        self.border = int(self.transform.border_size)
        if self.border < 0:
            raise Unsupported("its border is negative")
        if spec.size is None:
            return spec
        height, width = (side - 2 * self.border for side in spec.size)
        return replace(spec, size=(height, width))

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        return np.full_like(size, self.border), size - 2 * self.border


class MaybeToTensor(ToTensor):
    """Rule of MaybeToTensor: PIL image to float32 in [0, 1]. A tensor is not changed."""

    handles = ("timm.data.transforms.MaybeToTensor",)

    def infer(self, spec: Spec) -> Spec:
        converts = spec.kind == "pil"
        self.operators = ToTensor.operators if converts else ""
        return super().infer(spec) if converts else spec


class MaybePILToTensor(PILToTensor):
    """Rule of MaybePILToTensor: PIL image to uint8 tensor. A tensor is not changed."""

    handles = ("timm.data.transforms.MaybePILToTensor",)


class TimmToTensor(ToDtype):
    """Rule of timm's ToTensor: PIL image to a tensor of another dtype, with the same values."""

    handles = ("timm.data.transforms.ToTensor",)

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.scale = False

    def infer(self, spec: Spec) -> Spec:
        if spec.kind != "pil":
            raise Unsupported("timm's ToTensor accepts PIL images only")
        return super().infer(replace(spec, kind="tensor"))

    def infer_batch(self, spec: Spec) -> Spec | None:
        return None


class TimmRandomErasing(Composite):
    """Rule of timm's RandomErasing: with one box it is torchvision's, under other names."""

    handles = ("timm.data.random_erasing.RandomErasing",)
    unsupported_when = 'a PIL image, which it refuses; not uint8 or float32; more than one box; mode="rand"'

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        low, high = transform.log_aspect_ratio
        equivalent = SimpleNamespace(
            p=transform.probability,
            scale=(transform.min_area, transform.max_area),
            ratio=(math.exp(low), math.exp(high)),
            value="random" if transform.per_pixel else 0,
        )
        self.parts = [RandomErasing(equivalent)]

    def infer(self, spec: Spec) -> Spec:
        transform = self.transform
        if spec.kind == "pil":
            raise Unsupported("timm's RandomErasing accepts tensors only")
        if (transform.min_count, transform.max_count) != (1, 1):
            raise Unsupported("no rule for several boxes")
        if transform.rand_color:
            raise Unsupported("no rule for boxes of one random colour")
        if transform.per_pixel and not spec.dtype.is_floating_point:
            raise Unsupported("normal numbers need floating point")
        spec = super().infer(spec)
        self.operators, self.randomness = self.parts[0].operators, self.parts[0].randomness
        return spec
