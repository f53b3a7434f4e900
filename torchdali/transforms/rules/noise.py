"""Rule of GaussianNoise."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Node, Nodes, Ops, Rule, Unsupported
from torchdali.transforms.rules import _noise
from torchdali.transforms.spec import IntArray, Params, Sample, Spec


def truncate(ops: Ops, values: Node) -> Node:
    """Remove the fraction of float32 values, as torch casts to integers."""
    math = ops.math
    return math.floor(math.max(values, 0.0)) + math.ceil(math.min(values, 0.0))


def wrap_to_uint8(ops: Ops, values: Node) -> Node:
    """Cast integral float32 values to uint8 modulo 256, as torch casts."""
    return ops.fn.cast(ops.fn.cast(values, dtype=ops.types.INT32) & np.int32(255), dtype=ops.types.UINT8)


def reference_noise(sample: Sample, height: int, width: int, channels: int) -> torch.Tensor:
    """Return a sample's normal numbers, CHW."""
    return torch.from_numpy(_noise.reference_normal(sample, height, width, channels)).permute(2, 0, 1).contiguous()


class GaussianNoise(Rule):
    """Rule of GaussianNoise: normal noise of one mean and deviation is added to every value."""

    handles = (v2.GaussianNoise,)
    operators = "arithmetic, slice, cat"
    randomness = "a normal number for every value"
    unsupported_when = "not uint8 or float32; a PIL image, which torchvision refuses"
    feeds: ClassVar = _noise.INPUTS

    def infer(self, spec: Spec) -> Spec:
        transform = self.transform
        if spec.kind == "pil":
            raise Unsupported("GaussianNoise accepts tensors only")
        if spec.dtype not in (torch.uint8, torch.float32) or spec.channels not in (1, 3):
            raise Unsupported(f"no rule for {spec}")
        if transform.sigma < 0:
            raise Unsupported("sigma is negative")
        self.channels = spec.channels
        self.integer = spec.dtype == torch.uint8
        if self.integer:
            try:
                F.gaussian_noise(torch.empty(0, dtype=torch.uint8))
            except ValueError as error:  # before 0.24: https://github.com/pytorch/vision/pull/9169
                raise Unsupported(str(error)) from error
            if abs(transform.mean) + 6 * transform.sigma > 128:
                raise Unsupported("its noise leaves the range of int16, in which torchvision adds it")
        return replace(spec, unit=spec.unit and transform.clip)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params = _noise.draw_noise(draws, size)
        # torchvision draws noise for each frame of a video.
        return params if draws.frame is None else _noise.separate_frames(params, draws.frame)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        shape = image.shape(dtype=ops.types.INT32)
        numbers = _noise.random_normal(ops, params, shape[0], shape[1], self.channels)
        scale = 255 if self.integer else 1
        noise = numbers * np.float32(self.transform.sigma * scale) + np.float32(self.transform.mean * scale)
        noisy = image + (truncate(ops, noise) if self.integer else noise)
        if self.transform.clip:
            noisy = ops.math.clamp(noisy, 0.0, float(scale))
        return wrap_to_uint8(ops, noisy) if self.integer else noisy

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        channels, height, width = image.shape
        numbers = reference_noise(sample, height, width, channels)
        with mock.patch.object(torch, "randn_like", return_value=numbers):
            return F.gaussian_noise(image, self.transform.mean, self.transform.sigma, self.transform.clip)
