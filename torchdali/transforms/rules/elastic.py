"""Rule of elastic deformation: smooth noise moves the position from which each pixel is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
import torchvision
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Node, Nodes, Ops, SampleTransformError, Unsupported, find_faulty_row
from torchdali.transforms.rules import _noise
from torchdali.transforms.rules._remap import count_pixels, take_pixels
from torchdali.transforms.rules._warp import blend_fill
from torchdali.transforms.rules.filters import check_window
from torchdali.transforms.rules.geometry import Warp
from torchdali.transforms.spec import IntArray, Params, Sample, Spec

# Before 0.26 torchvision divides moves along the width by the height, and moves along the height by the width:
# https://github.com/pytorch/vision/issues/9299. Remove this when torchvision 0.26 is required.
CROSSWISE = tuple(int(x) for x in torchvision.__version__.split(".")[:2]) < (0, 26)


def blur_window(sigma: float) -> int:
    """Return the side of the blur's window in pixels. torchvision makes it odd."""
    return int(8 * sigma + 1) | 1


class ElasticTransform(Warp):
    """Rule of ElasticTransform: uniform noise, blurred and scaled, moves every pixel."""

    handles = (v2.ElasticTransform, v1.ElasticTransform)
    operators = "arithmetic, gaussian_blur, remap"
    randomness = "two uniform numbers for every pixel"
    moves_in_torch = True
    unsupported_when = (
        "on the CPU, where DALI has no remap; interpolation neither nearest nor bilinear; not uint8 or float32; sigma "
        "above 63"
    )
    feeds: ClassVar = _noise.INPUTS

    def infer(self, spec: Spec) -> Spec:
        spec = super().infer(spec)
        if spec.device != "gpu":
            raise Unsupported("DALI has remap on the GPU only")
        if spec.channels not in (1, 3):
            raise Unsupported(f"no rule for {spec}")
        self.alpha = [float(x) for x in self.transform.alpha]
        self.sigma = [float(x) for x in self.transform.sigma]
        if max(self.sigma) > 0 >= min(self.sigma):
            raise Unsupported("torchvision blurs in both directions or in none")
        check_window([blur_window(max(self.sigma))] * 2, replace(spec, channels=1))
        return spec

    def draw(self, draws: Draws, size: IntArray) -> Params:
        window = blur_window(max(self.sigma))
        if (row := find_faulty_row(size <= window // 2)) is not None:
            raise SampleTransformError(
                row,
                f"sigma={self.sigma} blurs in a window of {window} x {window}, which needs an image of more than half "
                f"of that, and this one has {size[row, 1]} x {size[row, 0]} (width x height)",
            )
        return _noise.draw_noise(draws, size)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        fn = ops.fn
        sides = image.shape(dtype=ops.types.INT32)
        noise = _noise.to_uniform(_noise.random_words(ops, params, sides[0], sides[1], 2)) * np.float32(2) - np.float32(
            1
        )
        x, y = (at + self._offset(ops, noise, sides, i) for i, at in enumerate(count_pixels(ops, params, sides)))
        values = image if self.floating else fn.cast(image, dtype=ops.types.FLOAT)
        values, inside = take_pixels(ops, values, x, y, self.interpolation == "nearest")
        result = values * inside
        if self.fill is not None:
            # With nearest pixels the weight is 0 or 1, so a second multiplication changes nothing.
            result = blend_fill(ops, result, inside, self.fill)
        return result if self.floating else fn.cast(result, dtype=ops.types.UINT8)

    def _offset(self, ops: Ops, noise: Node, sides: Node, channel: int) -> Node:
        """Return ``(H, W)`` moves in pixels along x (channel 0) or y (1). ``sides`` are height and width."""
        fn = ops.fn
        offset = fn.squeeze(fn.slice(noise, start=[channel], shape=[1], axes=[2]), axes=[2])
        offset = fn.reinterpret(offset, layout="HW")
        if max(self.sigma) > 0:
            window = blur_window(self.sigma[channel])
            offset = fn.gaussian_blur(offset, sigma=self.sigma[::-1], window_size=[window, window])
        # In torchvision the image's sides have length 2.
        offset = offset * np.float32(self.alpha[channel] / 2)
        if CROSSWISE:
            lengths = fn.cast(sides, dtype=ops.types.FLOAT)
            offset = offset * (lengths[1 - channel] / lengths[channel])
        return offset

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        height, width = image.shape[-2:]
        words = _noise.reference_words(sample, height, width, 2)
        noise = torch.from_numpy(_noise.to_uniform(words).astype(np.float32)).permute(2, 0, 1) * 2 - 1
        parts: list[torch.Tensor] = []
        for channel, side in enumerate((height, width) if CROSSWISE else (width, height)):
            part = noise[None, channel : channel + 1]
            if max(self.sigma) > 0:
                part = F.gaussian_blur(part, [blur_window(self.sigma[channel])] * 2, self.sigma)
            parts.append(part * self.alpha[channel] / side)
        return F.elastic(image, torch.concat(parts, 1).permute(0, 2, 3, 1), **self.how)
