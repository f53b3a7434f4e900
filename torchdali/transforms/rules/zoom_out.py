"""Rule of RandomZoomOut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torchvision.transforms import v2

from torchdali.transforms.rng import Draws
from torchdali.transforms.rules.crop import Window, resolve_fill
from torchdali.transforms.rules.random_resize import interpolate, scale_size, to_fractions
from torchdali.transforms.spec import IntArray, Spec


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

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        low, high = self.transform.side_range
        drawn = to_fractions(draws.words(4))
        apply = drawn[:, :1] < np.float32(self.transform.p)
        canvas = scale_size(size, interpolate(low, high, drawn[:, 1:2]))
        start = scale_size(canvas - size, drawn[:, 2:])
        return np.where(apply, -start, 0), np.where(apply, canvas, size)
