"""Rule of RandomResizedCrop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Unsupported, check_ranges, check_whole_pixels
from torchdali.transforms.rules._boxes import ATTEMPTS, random_boxes
from torchdali.transforms.rules.crop import Window
from torchdali.transforms.rules.resize import Resampling
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets


class RandomResizedCrop(Window):
    """Rule of RandomResizedCrop: a box of random area and aspect ratio, resized to a fixed size.

    As in torchvision, up to ten attempts are made to find a box that fits. If none does, the middle is taken.
    """

    handles = (v2.RandomResizedCrop, v1.RandomResizedCrop)
    unsupported_when = "as Resize"
    operators = "slice, resize"
    randomness = f"area and log ratio ({ATTEMPTS} attempts), top, left"
    stays_inside = True

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.size = (int(transform.size[0]), int(transform.size[-1]))

    def infer(self, spec: Spec) -> Spec:
        check_whole_pixels(self.transform.size)
        check_ranges(scale=self.transform.scale, ratio=self.transform.ratio)
        if self.transform.scale[0] < 0 or self.transform.ratio[0] <= 0:
            raise Unsupported("a negative area or ratio")
        self.resampling = Resampling(self.transform, spec, self.size)
        self.operators = f"slice, {self.resampling.operators}"
        return replace(spec, size=self.size, unit=self.resampling.unit)

    @property
    def inputs(self) -> dict[str, Input]:
        return {**super().inputs, **self.resampling.inputs}

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        height, width = size[:, :1], size[:, 1:]
        start, shape, fitting = random_boxes(
            draws,
            size,
            self.transform.scale,
            self.transform.ratio,
            tall=False,
            fits=lambda h, w: (w > 0) & (w <= width) & (h > 0) & (h <= height),
        )
        failed = ~fitting
        if failed.any():
            shape[failed] = self._central(size[failed])
            start[failed] = (size[failed] - shape[failed]) // 2
        return start, shape

    def _central(self, size: IntArray) -> IntArray:
        lowest, highest = min(self.transform.ratio), max(self.transform.ratio)
        height, width = size[:, 0], size[:, 1]
        ratio = width / height
        h = np.where(ratio < lowest, np.rint(width / lowest), height)
        w = np.where(ratio > highest, np.rint(height * highest), width)
        return np.stack((h, w), axis=1).astype(np.int64)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params = super().draw(draws, size)
        target = np.broadcast_to(np.array(self.size, np.int64), size.shape)
        return {**params, **self.resampling.draw(params["shape"].astype(np.int64), target, draws)}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return np.broadcast_to(np.array(self.size, np.int64), size.shape)

    def move(self, targets: Targets, params: Params) -> None:
        targets.crop(params["start"].astype(np.int64), params["shape"].astype(np.int64))
        targets.resize(self.output_size(targets.size, params))

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        (top, left), (height, width) = sample["start"].tolist(), sample["shape"].tolist()
        return {"top": top, "left": left, "height": height, "width": width}

    def lower_window(self, ops: Ops, window: Node, params: Nodes) -> Node:
        return self.resampling.lower(ops, window, params)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        (top, left), (height, width) = sample["start"].tolist(), sample["shape"].tolist()
        return self.resampling.reference(F.crop(image, top, left, height, width), sample)
