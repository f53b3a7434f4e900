"""Rules of filters that look at a window around each pixel: dilation, erosion and the median."""

from __future__ import annotations

import torch

from torchdali.transforms.augment.filters import Dilate, Erode, MedianBlur
from torchdali.transforms.rule import Node, Nodes, Ops, Unsupported
from torchdali.transforms.rules._host import call_torch
from torchdali.transforms.rules.augment import Augmentation
from torchdali.transforms.spec import Sample, Spec


class WindowRule(Augmentation):
    """Rule of Dilate, Erode and MedianBlur. DALI has them on the GPU only."""

    handles = (Dilate, Erode, MedianBlur)
    unsupported_when = "not uint8 or float32; on a GPU, not 1, 3 or 4 channels"

    def infer(self, spec: Spec) -> Spec:
        self.is_on_host = spec.device == "cpu"
        if not self.is_on_host and spec.channels not in (1, 3, 4):
            raise Unsupported(f"DALI does not filter {spec.channels} channels")
        self.operators = _NAMES[type(self.transform)] + (" by torch" if self.is_on_host else "")
        self.floating = spec.dtype.is_floating_point
        return super().infer(spec)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.is_on_host:
            return call_torch(ops, self.reference, image, params)
        filters = ops.fn.experimental
        image = ops.fn.reinterpret(image, layout="HWC")  # arithmetic before it may have lost the layout
        window = list(self.transform.size[::-1])
        if isinstance(self.transform, MedianBlur):
            return filters.median_blur(image, window_size=window)
        how = {"mask_size": window, "border_mode": "replicate"}
        if isinstance(self.transform, Erode):
            return filters.erode(image, **how)
        if not self.floating:
            return filters.dilate(image, **how)
        # CV-CUDA begins a dilation of floats with the least positive number, so that no value of 0 or below is left:
        # https://github.com/CVCUDA/CV-CUDA, src/cvcuda/priv/legacy/morphology_var_shape.cu. We know no issue about it.
        return -filters.erode(ops.fn.reinterpret(-image, layout="HWC"), **how)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return self.transform.apply(image, {})


_NAMES = {Dilate: "dilate", Erode: "erode", MedianBlur: "median_blur"}
