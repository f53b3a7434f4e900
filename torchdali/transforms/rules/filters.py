"""Rules of filters: Gaussian blur and JPEG compression."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Rule, SampleTransformError, Unsupported, find_faulty_row
from torchdali.transforms.spec import IntArray, Params, Sample, Spec

_MOST_ON_GPU = 510
"""Bound of DALI's convolution on the GPU for the window's height times the channels."""


class GaussianBlur(Rule):
    """Rule of GaussianBlur: a fixed window and a random sigma. The image is mirrored at its edges."""

    handles = (v2.GaussianBlur, v1.GaussianBlur)
    operators = "gaussian_blur"
    unsupported_when = "not uint8 or float32; on a GPU windows of more than 169 (one channel: 509)"
    feeds: ClassVar = {"sigma": Input(np.float32)}

    def infer(self, spec: Spec) -> Spec:
        if spec.dtype not in (torch.uint8, torch.float32):
            raise Unsupported(f"no rule for {spec}")
        width, height = (int(x) for x in self.transform.kernel_size)
        self.window = [height, width]
        check_window(self.window, spec)
        low, high = self.transform.sigma
        self.randomness = "sigma" if low < high else ""
        return spec

    def draw(self, draws: Draws, size: IntArray) -> Params:
        if (row := find_faulty_row(size <= np.array(self.window) // 2)) is not None:
            raise SampleTransformError(
                row,
                f"a window of {self.window[1]} x {self.window[0]} (width x height) needs an image of more than half "
                f"of that, and this one has {size[row, 1]} x {size[row, 0]}",
            )
        # With a smaller sigma the window has one pixel that differs from 0. DALI's squares would leave float32's range.
        return {"sigma": np.maximum(draws.uniform_range(*self.transform.sigma), 1e-3).astype(np.float32)}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.gaussian_blur(image, sigma=params["sigma"], window_size=self.window)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.gaussian_blur(image, self.window[::-1], [float(sample["sigma"])] * 2)


def check_window(window: Sequence[int], spec: Spec) -> None:
    """Raise Unsupported if DALI's blur on the GPU cannot have a window of this (height, width)."""
    if spec.device == "gpu" and max(window) * spec.channels >= _MOST_ON_GPU:
        raise Unsupported(f"a window of {window[1]} x {window[0]} (width x height) is too large for DALI on a GPU")


class JPEG(Rule):
    """Rule of JPEG: compress and decompress with a random quality."""

    handles = (v2.JPEG,)
    unsupported_when = "not uint8 RGB"
    feeds: ClassVar = {"quality": Input(np.int32)}

    def infer(self, spec: Spec) -> Spec:
        if spec.channels != 3 or spec.dtype != torch.uint8:
            raise Unsupported(f"no rule for {spec}")
        low, high = self.transform.quality
        self.randomness = "quality" if low < high else ""
        self.operators = "jpeg_compression_distortion" + (" on the CPU" if spec.device == "gpu" else "")
        return spec

    def draw(self, draws: Draws, size: IntArray) -> Params:
        low, high = self.transform.quality
        return {"quality": np.floor(draws.uniform_range(low, high + 1)).astype(np.int32)}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if ops.device == "gpu" and ops.fidelity == "exact":
            # On the GPU, DALI enlarges colours without interpolation, as its decoders there do: the mean difference is
            # 0.8. The copy keeps DALI 2.4 from merging this node with an equal one in another view: DALI then fails to
            # find the node. https://github.com/NVIDIA/DALI/pull/5752 added the merging. We know no issue about this
            # fault, and no version that mends it.
            image = ops.fn.copy(image, preserve=True).cpu()
            image = ops.fn.jpeg_compression_distortion(image, quality=params["quality"]).gpu()
            return ops.fn.reinterpret(image, layout="HWC")  # a copy of an empty batch has no layout
        return ops.fn.jpeg_compression_distortion(image, quality=params["quality"])

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        with warnings.catch_warnings():
            # torchvision 0.29 deprecates the encoder that its own transform uses. No version mends it yet:
            # https://github.com/pytorch/vision/pull/9609.
            warnings.simplefilter("ignore", DeprecationWarning)
            return F.jpeg(image, int(sample["quality"]))
