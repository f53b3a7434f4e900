"""Rules of resizing to a random size, and of a random canvas around the image."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torchvision.transforms import v2

from torchdali.transforms.rng import Draws, Words
from torchdali.transforms.rule import Unsupported
from torchdali.transforms.rules.conversion import resolve_mask_fill
from torchdali.transforms.rules.crop import Window, resolve_fill
from torchdali.transforms.rules.resize import Resizing, compute_resized_size
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets

Floats = npt.NDArray[np.float32]


class RandomResize(Resizing):
    """Rule of RandomResize: the shorter side gets a random length from ``min_size`` to ``max_size`` - 1."""

    handles = (v2.RandomResize,)
    randomness = "length of the shorter side"

    def infer(self, spec: Spec) -> Spec:
        low, high = self.transform.min_size, self.transform.max_size
        if not isinstance(low, int) or not isinstance(high, int) or low >= high:
            raise Unsupported(f"no whole number is at least min_size={low} and below max_size={high}")
        return super().infer(spec)

    def sizes(self, draws: Draws, size: IntArray) -> IntArray:
        low, high = self.transform.min_size, self.transform.max_size
        return compute_resized_size(
            size, [low + np.floor(draws.uniform(1)[:, 0] * (high - low)).astype(np.int64)], None
        )


class RandomShortestSize(Resizing):
    """Rule of RandomShortestSize: the shorter side gets one of several lengths.

    It gets less if the longer side would exceed ``max_size``.
    """

    handles = (v2.RandomShortestSize,)
    randomness = "length of the shorter side"

    def infer(self, spec: Spec) -> Spec:
        if not self.transform.min_size:
            raise Unsupported("there is no min_size to choose")
        return super().infer(spec)

    def sizes(self, draws: Draws, size: IntArray) -> IntArray:
        lengths = np.array(self.transform.min_size, np.float64)
        length = lengths[draws.choice(np.full(len(lengths), 1 / len(lengths)))]
        ratio = length / size.min(axis=1)
        if self.transform.max_size is not None:
            ratio = np.minimum(ratio, self.transform.max_size / size.max(axis=1))
        return (size * ratio[:, None]).astype(np.int64)


class ScaleJitter(Resizing):
    """Rule of ScaleJitter: a random multiple of the scale at which the image just fits into ``target_size``."""

    handles = (v2.ScaleJitter,)
    randomness = "scale"

    def sizes(self, draws: Draws, size: IntArray) -> IntArray:
        target: Any = self.transform.target_size
        low, high = self.transform.scale_range
        # torchvision divides the second number of target_size by the height, and the first one by the width.
        fit = np.minimum(target[1] / size[:, 0], target[0] / size[:, 1])
        ratio = fit.astype(np.float32) * interpolate(low, high, to_fractions(draws.words(1)[:, 0]))
        return scale_size(size, ratio[:, None])


class RandomZoomOut(Window):
    """Rule of RandomZoomOut: with probability p the image is put at a random position on a larger canvas.

    The canvas's sides are a random multiple of the image's.
    """

    handles = (v2.RandomZoomOut,)
    unsupported_when = "a number of fill values that does not fit"

    def infer(self, spec: Spec) -> Spec:
        self.fill = resolve_fill(self.transform, spec)
        self.randomness = f"apply with probability {self.transform.p:g}; size of the canvas; top, left"
        return replace(spec.with_fill(self.fill), size=None)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        low, high = self.transform.side_range
        drawn = to_fractions(draws.words(4))
        apply = drawn[:, :1] < np.float32(self.transform.p)
        canvas = scale_size(size, interpolate(low, high, drawn[:, 1:2]))
        start = scale_size(canvas - size, drawn[:, 2:])
        start, shape = np.where(apply, -start, 0), np.where(apply, canvas, size)
        return {"start": start.astype(np.int32), "shape": shape.astype(np.int32), "apply": apply[:, 0]}

    def move(self, targets: Targets, params: Params) -> None:
        before = -params["start"].astype(np.int64)
        after = params["shape"] - before - targets.size
        targets.pad(before, after, self.find_mask_fill(targets), on=params.get("apply"))

    def find_mask_fill(self, targets: Targets) -> float:
        """Return the value of the canvas of masks."""
        return resolve_mask_fill(self.transform, targets)

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        (top, left), (height, width) = (-sample["start"]).tolist(), sample["shape"].tolist()
        padding = [left, top, width - left - size[1], height - top - size[0]]
        return {"padding": padding} if sample.get("apply", True) else None


def to_fractions(words: Words) -> Floats:
    """Return numbers as ``torch.rand`` does: float32 with 24 random bits."""
    return (words >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


def interpolate(low: float, high: float, fraction: Floats) -> Floats:
    """Return ``low + fraction * (high - low)``, computed in float32 as in torch."""
    return (fraction * np.float32(high - low) + np.float32(low)).astype(np.float32)


def scale_size(size: IntArray, factor: Floats) -> IntArray:
    """Return ``int(size * factor)``. The product is float32, as in torch."""
    return (size.astype(np.float32) * factor).astype(np.int64)
