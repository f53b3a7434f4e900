"""Rules of conversions: PIL image to tensor, uint8 to floating point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali.transforms.rule import Node, Nodes, Ops, Rule, Unsupported
from torchdali.transforms.spec import Params, Sample, Spec
from torchdali.transforms.targets import Targets
from torchdali.transforms.targets.pixels import find_mask_fill

TYPES: dict[str, type] = {
    "pil": PIL.Image.Image,
    "image": tv_tensors.Image,
    "video": tv_tensors.Video,
    "tensor": torch.Tensor,
}
"""Type that torchvision would hold, by :attr:`torchdali.transforms.spec.Spec.kind`."""


def select_for_kind(argument: Any, spec: Spec, name: str) -> Any:
    """Return a transform's argument for images of this kind. It is one for all kinds, or a dictionary by type.

    Raises:
        Unsupported: The dictionary has no entry for this kind.
    """
    if not isinstance(argument, dict):
        return argument
    by_type = cast("dict[Any, Any]", argument)
    for key in (TYPES[spec.kind], "others"):
        if key in by_type:
            return by_type[key]
    raise Unsupported(f"its {name} neither {TYPES[spec.kind].__name__} nor 'others'")


def resolve_mask_fill(transform: Any, targets: Targets) -> float:
    """Return the fill of a transform for masks, if there are any."""
    return find_mask_fill(transform) if targets.pixels else 0


class Identity(Rule):
    """Rule of Identity: it changes nothing."""

    handles = (v2.Identity, nn.Identity)

    def infer(self, spec: Spec) -> Spec:
        return spec

    def infer_batch(self, spec: Spec) -> Spec | None:
        return spec


class ToImage(Rule):
    """Rule of ToImage: it changes the kind only, because the graph has only tensors."""

    handles = (v2.ToImage,)

    def infer(self, spec: Spec) -> Spec:
        return spec if spec.kind == "video" else replace(spec, kind="image")

    def infer_batch(self, spec: Spec) -> Spec | None:
        return None if spec.kind == "pil" else self.infer(spec)


class ToPureTensor(Rule):
    """Rule of ToPureTensor: it changes the kind only, as :class:`ToImage`. Boxes, masks and points get plain too."""

    handles = (v2.ToPureTensor,)
    moves = True

    def infer(self, spec: Spec) -> Spec:
        return replace(spec, kind="tensor") if spec.kind in ("image", "video") else spec

    def move(self, targets: Targets, params: Params) -> None:
        targets.is_pure = True

    def infer_batch(self, spec: Spec) -> Spec | None:
        return None if spec.kind == "pil" else self.infer(spec)


class PILToTensor(Rule):
    """Rule of PILToTensor: PIL image to uint8 tensor."""

    handles = (v2.PILToTensor, v1.PILToTensor)
    unsupported_when = "v1's on a tensor, which it refuses"

    def infer(self, spec: Spec) -> Spec:
        if spec.kind == "pil":
            return replace(spec, kind="tensor")
        if isinstance(self.transform, v1.PILToTensor):
            raise Unsupported("v1's PILToTensor accepts PIL images only")
        return spec


class ToTensor(Rule):
    """Rule of ToTensor: PIL image to float32 in [0, 1], ``x / 255``. Images of more than 8 bits are not changed."""

    handles = (v2.ToTensor, v1.ToTensor)
    unsupported_when = "a tensor, which it refuses; torch's default dtype is not float32; 16-bit unsigned integers"
    operators = "arithmetic"

    def infer(self, spec: Spec) -> Spec:
        if spec.kind != "pil":
            raise Unsupported("ToTensor accepts PIL images only")
        if torch.get_default_dtype() != torch.float32:
            raise Unsupported("torch's default dtype is not float32")
        if spec.dtype == torch.uint16:
            raise Unsupported("of a PIL image it makes int16 and of an array uint16")
        if spec.dtype != torch.uint8:
            self.operators = ""
            return replace(spec, kind="tensor")
        return replace(spec, kind="tensor", dtype=torch.float32)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return image / np.float32(255) if self.operators else image

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return image.to(torch.float32).div(255) if self.operators else image
