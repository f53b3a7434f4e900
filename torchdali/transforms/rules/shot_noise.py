"""Rule of ShotNoise: Poisson's distribution in arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchdali.transforms.augment.noise import ShotNoise
from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Unsupported
from torchdali.transforms.rules import _noise
from torchdali.transforms.rules._host import call_torch
from torchdali.transforms.rules.augment import Augmentation
from torchdali.transforms.spec import IntArray, Params, Sample, Spec

_FEW = 5.0
"""Mean up to which each count is compared. Above it a series in the normal number has an error of 6e-4 or less."""

_MOST = 20
"""Largest count with such a mean. A larger one has a probability of 8e-8."""

_LEAST_FACTOR = 1e-12
"""Factor in place of 0, which adds noise of no more than a millionth."""


class ShotNoiseRule(Augmentation):
    """Rule of ShotNoise. The graph, or torch, computes the numbers of all values."""

    handles = (ShotNoise,)
    unsupported_when = "not uint8 or float32; more than 4 channels"

    def infer(self, spec: Spec) -> Spec:
        if spec.channels > 4:
            raise Unsupported(f"no rule for {spec}")
        spec = super().infer(spec).with_fill([np.inf])
        self.is_on_host = spec.device == "cpu"
        self.operators = "shot noise by torch" if self.is_on_host else "arithmetic, slice, cat"
        self.randomness = ", ".join(filter(None, (self.randomness, "two numbers for every value")))
        self.floating, self.channels = spec.dtype.is_floating_point, spec.channels
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        fed = {**super().inputs, **_noise.INPUTS, "other_start": _noise.INPUTS["noise_start"]}
        return {name: x for name, x in fed.items() if name != "noise_ramp"} if self.is_on_host else fed

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params = {**super().draw(draws, size), **_noise.draw_noise(draws, size)}
        params["factor"] = np.maximum(params["factor"], np.float32(_LEAST_FACTOR))
        params["other_start"] = draws.words(1)[:, 0]
        return params if draws.frame is None else _noise.separate_frames(params, draws.frame)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.is_on_host:
            return call_torch(ops, self.reference, image, params)
        fn, types, math = ops.fn, ops.types, ops.math
        sides = image.shape(dtype=types.INT32)
        factor = params["factor"]
        other = {**params, "noise_start": params["other_start"]}
        uniform = _noise.to_uniform(_noise.random_words(ops, other, sides[0], sides[1], self.channels))
        normal = _noise.random_normal(ops, params, sides[0], sides[1], self.channels)
        values = fn.cast(image, dtype=types.FLOAT)

        def to_float(flags: Node) -> Node:
            return fn.cast(flags, dtype=types.FLOAT)

        counts = count_photons(math, to_float, math.max(values, 0.0) / factor, uniform, normal)
        result = counts * factor
        if self.floating:
            return result
        return fn.cast(math.clamp(math.floor(result + np.float32(0.5)), 0.0, 255.0), dtype=types.UINT8)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        channels, height, width = image.shape
        other = {**sample, "noise_start": sample["other_start"]}
        words = _noise.reference_words(other, height, width, channels)
        uniform = _to_chw(_noise.to_uniform(words))
        normal = _to_chw(_noise.reference_normal(sample, height, width, channels))

        def count(means: torch.Tensor) -> torch.Tensor:
            return count_photons(_Torch, torch.Tensor.float, means, uniform, normal)

        return self.transform.apply(image, {"factor": float(sample["factor"]), "count": count})


def _to_chw(values: Any) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).permute(2, 0, 1).contiguous()


class _Torch:
    """torch's functions under the names of ``nvidia.dali.math``."""

    exp, sqrt, floor = torch.exp, torch.sqrt, torch.floor

    @staticmethod
    def max(values: torch.Tensor, least: float) -> torch.Tensor:
        return values.clamp(min=least)

    @staticmethod
    def min(values: torch.Tensor, most: float) -> torch.Tensor:
        return values.clamp(max=most)


def count_photons(math: Any, to_float: Any, means: Any, uniform: Any, normal: Any) -> Any:
    """Return counts that follow Poisson's distribution. The arguments are float32 nodes, or tensors.

    Up to a mean of 5, a count is the number of values of the distribution function that are not above ``uniform``.
    Above it, the function's inverse is a series in the normal number: Giles, "Algorithm 955: approximation of the
    inverse Poisson cumulative distribution function", https://doi.org/10.1145/2699466.

    Args:
        math: ``nvidia.dali.math``, or what has its functions.
        to_float: Converts booleans to float32.
        means: 0 or more.
        uniform: In [0, 1).
        normal: Standard normal numbers.
    """
    one = np.float32(1)
    few = math.min(means, _FEW)
    target = uniform * math.exp(few)
    term = few * np.float32(0) + one
    total, counted = term, means * np.float32(0)
    for i in range(1, _MOST + 1):
        counted = counted + to_float(target >= total)
        term = term * few * np.float32(1 / i)
        total = total + term
    many = math.max(means, _FEW)
    root, square = math.sqrt(many), normal * normal
    series = many + root * normal + square * np.float32(1 / 6) + np.float32(1 / 3)
    series = series - normal * (square * np.float32(1 / 72) + np.float32(1 / 36)) / root
    series = series + (square * (square * np.float32(1 / 270) + np.float32(7 / 810)) - np.float32(8 / 405)) / many
    inverse = math.max(math.floor(series), 0.0)
    is_few = to_float(means < np.float32(_FEW))
    return counted * is_few + inverse * (one - is_few)
