"""Rules of AutoAugment, RandAugment, TrivialAugmentWide and AugMix: they choose each sample's operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms import autoaugment as v1
from torchvision.transforms import v2

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Unsupported
from torchdali.transforms.rules._policy import FAMILIES, MIXED, NUMBER, OPERATIONS, USUAL, WIDE, Floats, Policy
from torchdali.transforms.spec import IntArray, Params, Sample, Spec


class RandAugment(Policy):
    """Rule of RandAugment: several operations at one magnitude."""

    handles = (v2.RandAugment, v1.RandAugment)
    space = USUAL

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.bins: int = transform.num_magnitude_bins
        self.slots = [OPERATIONS[:-1]] * transform.num_ops
        self.randomness = "for each place an operation and its sign" if self.slots else ""

    def infer(self, spec: Spec) -> Spec:
        if not 0 <= self.transform.magnitude < self.bins:
            raise Unsupported(f"a magnitude of {self.transform.magnitude} of {self.bins}")
        return super().infer(spec)

    def choose(self, draws: Draws) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
        uniform = draws.uniform(2 * len(self.slots))
        operation = np.floor(uniform[:, ::2] * (len(OPERATIONS) - 1)).astype(np.int64)
        return operation, np.full_like(operation, self.transform.magnitude), uniform[:, 1::2] < 0.5


class TrivialAugmentWide(Policy):
    """Rule of TrivialAugmentWide: one operation at a random magnitude."""

    handles = (v2.TrivialAugmentWide, v1.TrivialAugmentWide)
    randomness = "operation, magnitude, sign"
    space = WIDE
    slots = (OPERATIONS[:-1],)

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.bins: int = transform.num_magnitude_bins

    def choose(self, draws: Draws) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
        uniform = draws.uniform(3)
        operation, which = (
            np.floor(uniform[:, i : i + 1] * count).astype(np.int64)
            for i, count in enumerate((len(OPERATIONS) - 1, self.bins))
        )
        return operation, which, uniform[:, 2:] < 0.5


class AutoAugment(Policy):
    """Rule of AutoAugment: one of 25 pairs of operations at fixed magnitudes, each with its own probability."""

    handles = (v2.AutoAugment, v1.AutoAugment)
    randomness = "which pair, apply the first, apply the second, signs"
    space = USUAL
    bins = 10

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        attribute = "policies" if type(transform) is v1.AutoAugment else "_policies"
        pairs: list[tuple[tuple[str, float, int | None], ...]] = getattr(transform, attribute)
        self.slots = [[name for name, _, _ in column] for column in zip(*pairs, strict=True)]
        self.operation = np.array([[NUMBER[name] for name, _, _ in pair] for pair in pairs])
        self.chance = np.array([[chance for _, chance, _ in pair] for pair in pairs])
        self.which = np.array([[number or 0 for _, _, number in pair] for pair in pairs])

    def choose(self, draws: Draws) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
        uniform = draws.uniform(5)
        pair = np.floor(uniform[:, 4] * len(self.operation)).astype(np.int64)
        operation = np.where(uniform[:, :2] < self.chance[pair], self.operation[pair], NUMBER["Identity"])
        return operation, self.which[pair], uniform[:, 2:4] < 0.5


def log_gammas(draws: Draws, alpha: float, count: int) -> Floats:
    """Return ``(N, count)`` logarithms of numbers that are Gamma(alpha, 1) distributed.

    Gamma(1) is exponential: ``-log(u)``. For greater alpha the method is that of Marsaglia and Tsang, "A simple method
    for generating gamma variables", ACM Transactions on Mathematical Software 26 (2000). With ``d = a - 1/3``, x normal
    and ``v = (1 + x / sqrt(9 d))**3``, it accepts ``d v`` where ``log u < x**2 / 2 + d - d v + d log v``. For a >= 1
    this accepts more than 95 of 100 attempts. There are eight attempts, so about one number in 10**10 is not quite from
    this distribution. For alpha < 1 the result is ``Gamma(alpha + 1) * u**(1 / alpha)``.
    """
    attempts = 8
    half = 2.0**-33  # half the distance of two numbers of uniform(), so that no logarithm is that of 0
    if alpha == 1:
        return np.log(-np.log(draws.uniform(count) + half))
    a = alpha if alpha >= 1 else alpha + 1
    first, second, accept = (
        np.moveaxis(draws.uniform(3 * count * attempts).reshape(-1, 3, count, attempts), 1, 0) + half
    )
    d = a - 1 / 3
    x = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    v = np.maximum(1 + x / np.sqrt(9 * d), 1e-300) ** 3
    log_v = 3 * np.log(np.maximum(1 + x / np.sqrt(9 * d), 1e-300))
    accepted = np.log(accept) < x**2 / 2 + d - d * v + d * log_v
    chosen = np.take_along_axis(log_v, accepted.argmax(axis=2)[:, :, None], 2)[:, :, 0] + np.log(d)
    return chosen if alpha >= 1 else chosen + np.log(draws.uniform(count) + half) / alpha


def dirichlet(draws: Draws, alpha: float, count: int) -> npt.NDArray[np.float32]:
    """Return ``(N, count)`` symmetric Dirichlet weights, which sum to 1: gammas divided by their sum."""
    logarithm = log_gammas(draws, alpha, count)
    share = np.exp(logarithm - logarithm.max(axis=1, keepdims=True))
    return (share / share.sum(axis=1, keepdims=True)).astype(np.float32)


class AugMix(Policy):
    """Rule of AugMix: a blend of the image and of several chains of operations on it."""

    handles = (v2.AugMix, v1.AugMix)
    randomness = "weights of the image and the chains; for each chain its length, and operations, magnitudes and signs"
    space = MIXED
    bins = 10

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.width: int = transform.mixture_width
        self.depth: int = transform.chain_depth if transform.chain_depth > 0 else 3
        self.choices = OPERATIONS[1:-1]
        if not transform.all_ops:
            self.choices = tuple(x for x in self.choices if x not in (*FAMILIES["blend"].members, "Sharpness"))
        self.slots = [self.choices] * (self.width * self.depth)

    def infer(self, spec: Spec) -> Spec:
        severity: Any = self.transform.severity
        if self.width < 1 or self.transform.alpha <= 0 or not isinstance(severity, int):
            raise Unsupported(f"mixture_width={self.width}, alpha={self.transform.alpha}, severity={severity}")
        # torchvision converts a PIL image to a tensor first, so v2 looks up the fill for tensors.
        is_v2 = isinstance(self.transform, v2.AugMix)
        out = super().infer(replace(spec, kind="tensor") if is_v2 and spec.kind == "pil" else spec)
        return replace(out, kind=spec.kind)

    @property
    def inputs(self) -> dict[str, Input]:
        return {**super().inputs, **{f"weight{i}": Input(np.float32) for i in range(self.width + 1)}}

    def choose(self, draws: Draws) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
        count = len(self.slots)
        numbers = np.array([NUMBER[name] for name in self.choices])
        uniform = draws.uniform(3 * count + self.width)
        operation = numbers[np.floor(uniform[:, :count] * len(numbers)).astype(np.int64)]
        which = np.floor(uniform[:, count : 2 * count] * self.transform.severity).astype(np.int64)
        negative = uniform[:, 2 * count : 3 * count] < 0.5
        if self.transform.chain_depth <= 0:
            depth = 1 + np.floor(uniform[:, 3 * count :] * 3).astype(np.int64)
            within = (np.arange(self.depth) < depth[:, :, None]).reshape(len(draws), count)
            operation = np.where(within, operation, NUMBER["Identity"])
        return operation, which, negative

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params = super().draw(draws, size)
        both = dirichlet(draws, self.transform.alpha, 2)
        chains = dirichlet(draws, self.transform.alpha, self.width) * both[:, 1:]
        return {**params, "weight0": both[:, 0], **{f"weight{i + 1}": chains[:, i] for i in range(self.width)}}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        mix = image * params["weight0"]
        for chain in range(self.width):
            changed = image
            for number in range(chain * self.depth, (chain + 1) * self.depth):
                changed = self.lower_slot(ops, changed, number, params)
            mix = mix + changed * params[f"weight{chain + 1}"]
        if self.spec.dtype.is_floating_point:
            return mix
        return ops.fn.cast(ops.math.floor(mix), dtype=ops.types.UINT8)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        # Compute in torch's order and dtype, because the result is truncated.
        mix = torch.tensor(sample["weight0"]) * image
        for chain in range(self.width):
            changed = image
            for number in range(chain * self.depth, (chain + 1) * self.depth):
                changed = self.reference_slot(changed, number, sample)
            mix = mix + torch.tensor(sample[f"weight{chain + 1}"]) * changed
        return mix.to(image.dtype)
