"""Transforms and bounds that cases of the parity certificate share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torchvision import transforms as annotated_v1
from torchvision.transforms import v2 as annotated_v2
from torchvision.transforms.v2 import functional as F

# torchvision's transforms accept more than their annotations tell.
v1, v2 = cast("Any", annotated_v1), cast("Any", annotated_v2)


def _refusal(kernel: Callable[..., Any], *args: Any) -> str:
    try:
        kernel(*args)
    except ValueError as error:
        return f"the installed torchvision refuses it: {error}"
    return ""


FLOAT = v2.ToDtype(torch.float32, scale=True)
F32 = (v2.ToImage(), FLOAT)
LINEAR = v2.InterpolationMode.BILINEAR
SMALL = v2.Resize((90, 120), interpolation="nearest-exact")
IMAGENET: dict[str, Any] = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
EXACT = (0, 0, 0)
# The design promises 11, 1, 0.03 for larger pictures that are reduced less.
EDGE = (24, 2, 0.06, "the part of a filter beyond the edge: torchvision spreads it inside, DALI repeats the edge")
BLURRED = "torch and DALI blur in different orders, which moves positions by about 1e-5 pixels"
ELASTIC = (1, 1, 1e-3, BLURRED)
FLOAT_EDGE = (0.1, 1e-5, 4e-4, EDGE[3])
# torchvision before 0.24 resizes uint8 as float32 with AVX-512: https://github.com/pytorch/vision/issues/8374
FLOATING = not cast("Any", F)._geometry._do_native_uint8_resize_on_cpu(v2.InterpolationMode.BILINEAR)  # noqa: SLF001
BILINEAR = (24, 2, 0.2, "torchvision before 0.24 rounds once, not after each axis") if FLOATING else EDGE
V1_BILINEAR = (BILINEAR[0] / 255, BILINEAR[1] / 255, BILINEAR[2] / 255, BILINEAR[3])
NORMALIZED = (1e-6, 1e-6, 3e-7, "three float32 steps of a value near 2.6 are 7.2e-7; room for one more")
# torchvision before 0.24 refuses uint8: https://github.com/pytorch/vision/pull/9169
UINT8_NOISE = _refusal(F.gaussian_noise, torch.empty(0, dtype=torch.uint8))
INDEX = (255, 255, 0.05, "torch rounds some float32 indices to just below a whole number, and takes the pixel before")
GREY = (1, 1, 1e-5, "a whole grey value that float32 rounds down is floored to the one below")
NEIGHBOUR = (255, 255, 2e-3, "a position between two pixels may be rounded to the other one in another float32 order")
STEP = "torchvision rounds the step of its table down, and DALI's table has a resolution of 1/255"
NEAREST = "float32 may choose either of two pixels at the same distance"
ROUNDED = (1, 1, 1e-3, "DALI rounds halves of float32 sums that are computed in another order")
TWIST = "float32 products in another order"
TWICE = "an operation enlarges a difference of one level from the operation before"
