"""Rule of RandomErasing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Rule, Unsupported, check_ranges
from torchdali.transforms.rules import _noise
from torchdali.transforms.rules._boxes import ATTEMPTS, random_boxes
from torchdali.transforms.rules.noise import reference_noise, truncate, wrap_to_uint8
from torchdali.transforms.spec import IntArray, Params, Sample, Spec


class RandomErasing(Rule):
    """Rule of RandomErasing: with probability p a random box is filled with a value or with normal noise.

    Up to ten attempts are made to find a box that is smaller than the image. If none is, nothing is erased.
    """

    handles = (v2.RandomErasing, v1.RandomErasing)
    unsupported_when = "not uint8 or float32; v1's class on a PIL image, which it refuses"

    def infer(self, spec: Spec) -> Spec:
        if spec.dtype not in (torch.uint8, torch.float32):
            raise Unsupported(f"no rule for {spec}")
        if spec.kind == "pil" and isinstance(self.transform, v1.RandomErasing):
            raise Unsupported("v1's RandomErasing accepts tensors only")
        check_ranges(scale=self.transform.scale, ratio=self.transform.ratio)
        if self.transform.ratio[0] <= 0:
            raise Unsupported("a ratio that is not positive")
        value: Any = self.transform.value
        if value is None or isinstance(value, str):  # v2 stores None for "random"
            values = [0.0]
        else:
            values = [float(value)] if isinstance(value, (int, float)) else [float(x) for x in value]
        self.noise = value is None or isinstance(value, str)
        if len(values) not in (1, spec.channels):
            raise Unsupported(f"{len(values)} values for {spec.channels} channels")
        self.value = values
        # torch casts the value to the image's dtype when it assigns it.
        self.fill = [float(x) for x in torch.tensor(values).to(spec.dtype)]
        self.channels, self.integer = spec.channels, spec.dtype == torch.uint8
        self.operators = "erase, slice, arithmetic" if self.noise else "erase"
        self.randomness = f"erase with probability {self.transform.p:g}, area and log ratio ({ATTEMPTS} attempts)"
        self.randomness += ", top, left" + (", a normal number for every value" if self.noise else "")
        return spec.with_fill([-np.inf] if self.noise else self.fill)

    @property
    def inputs(self) -> dict[str, Input]:
        # These are integers, but DALI's erase takes floating point only.
        inputs = {"start": Input(np.float32, 1), "shape": Input(np.float32, 1)}
        return {**inputs, "erase": Input(np.bool_), **_noise.INPUTS} if self.noise else inputs

    def draw(self, draws: Draws, size: IntArray) -> Params:
        chosen = draws.bernoulli(self.transform.p)
        height, width = size[:, :1], size[:, 1:]
        start, shape, fitting = random_boxes(
            draws,
            size,
            self.transform.scale,
            self.transform.ratio,
            tall=True,
            fits=lambda h, w: (h < height) & (w < width),
        )
        erase = chosen & fitting & (shape > 0).all(axis=1)
        box: IntArray = np.where(erase[:, None], shape, 0)
        params: Params = {"start": start, "shape": box, "erase": erase}
        return {**params, **_noise.draw_noise(draws, box)} if self.noise else params

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.noise:
            return ops.apply_where(params["erase"], lambda x, p: self._erase_with_noise(ops, x, p), image, params)
        return self._erase(ops, image, params)

    def _erase(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.erase(image, anchor=params["start"], shape=params["shape"], axes=[0, 1], fill_value=self.fill)

    def _erase_with_noise(self, ops: Ops, image: Node, params: Nodes) -> Node:
        start, box = (ops.fn.cast(params[name], dtype=ops.types.INT32) for name in ("start", "shape"))
        numbers = _noise.random_normal(ops, params, box[0], box[1], self.channels)
        if self.integer:
            numbers = wrap_to_uint8(ops, truncate(ops, numbers))
        size = image.shape(dtype=ops.types.INT32)
        framed = ops.fn.slice(
            numbers,
            start=0 - start,
            shape=ops.fn.slice(size, start=[0], shape=[2], axes=[0]),
            axes=[0, 1],
            out_of_bounds_policy="pad",
        )
        return self._erase(ops, image, params) + framed

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        if not sample["erase"]:
            return image
        (top, left), (height, width) = sample["start"].tolist(), sample["shape"].tolist()
        value = torch.tensor(self.value)[:, None, None]
        if self.noise:
            value = reference_noise(sample, height, width, self.channels)
        return F.erase(image, top, left, height, width, value)
