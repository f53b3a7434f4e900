"""Rules of ToDtype, LinearTransformation and Normalize, alone or in one operator with the transforms before them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.errors import TransformError
from torchdali.transforms.rule import Composite, Node, Nodes, Ops, Rule, Unsupported
from torchdali.transforms.rules.conversion import ToTensor, select_for_kind
from torchdali.transforms.rules.flip import RandomHorizontalFlip
from torchdali.transforms.spec import Params, Sample, Spec
from torchdali.transforms.targets import Targets


class ToDtype(Rule):
    """Rule of ToDtype: uint8 to float32 or float16, scaled to [0, 1] or not; float32 to float16."""

    handles = (v2.ToDtype, v2.ConvertImageDtype, v1.ConvertImageDtype)
    unsupported_when = (
        "not uint8 to float32 or float16, nor float32 to float16 (batch by batch); dtypes that name neither the "
        "image's type nor 'others'; v1's on a PIL image"
    )

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.scale: bool = getattr(transform, "scale", True)
        self.source = torch.uint8
        self.target: torch.dtype | None = None
        # A single dtype is for images alone.
        self.moves = isinstance(getattr(transform, "dtype", None), dict)

    def infer(self, spec: Spec) -> Spec:
        if spec.kind == "pil":
            if isinstance(self.transform, v1.ConvertImageDtype):
                raise Unsupported("v1's ConvertImageDtype accepts tensors only")
            return spec
        self.source, self.target = spec.dtype, self._dtype_for(spec)
        if self.target in (None, self.source):
            self.target = None
            return spec
        if (self.source, self.target) not in (
            (torch.uint8, torch.float32),
            (torch.uint8, torch.float16),
            (torch.float32, torch.float16),
        ):
            raise Unsupported(f"no rule for {self.source} to {self.target}")
        self.operators = "arithmetic, cast" if self.is_scaled else "cast"
        return replace(spec, dtype=self.target, unit=spec.unit and (self.scale or not self.target.is_floating_point))

    def infer_batch(self, spec: Spec) -> Spec | None:
        try:
            return None if spec.kind == "pil" else replace(spec, dtype=self._dtype_for(spec) or spec.dtype)
        except Unsupported:
            return None

    def move(self, targets: Targets, params: Params) -> None:
        targets.to_dtype(self._find_dtype)

    def _find_dtype(self, kind: type) -> torch.dtype | None:
        """Return the dtype for boxes, masks or key points. None leaves them as they are."""
        by_type = cast("dict[Any, torch.dtype | None]", self.transform.dtype)
        for key in (kind, "others"):
            if key in by_type:
                return by_type[key]
        raise TransformError(
            f'ToDtype: No dtype was specified for type {kind.__name__}; add it, or "others", to the dictionary'
        )

    def _dtype_for(self, spec: Spec) -> torch.dtype | None:
        return select_for_kind(self.transform.dtype, spec, "dtypes name")

    @property
    def is_scaled(self) -> bool:
        """Whether values are scaled from 0..255 to [0, 1]."""
        return self.scale and self.source == torch.uint8 and self.target is not None

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.target is None:
            return image
        if self.is_scaled:
            image = image * np.float32(1 / 255)
        dtype = ops.types.FLOAT16 if self.target == torch.float16 else ops.types.FLOAT
        return ops.fn.cast(image, dtype=dtype)

    @property
    def _is_float_scale(self) -> bool:
        return (self.source, self.target) == (torch.uint8, torch.float32)

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        # (x - 0) / 255 is equal to torchvision's product for each of the 256 values.
        return Arithmetic([previous, self]) if self._is_float_scale and type(previous) is RandomHorizontalFlip else None

    def channels_first(self) -> Rule | None:
        return Arithmetic([self], "CHW") if self._is_float_scale else None

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        if self.target is None:
            return image
        return F.to_dtype(image, self.target, scale=self.scale)


class LinearTransformation(Rule):
    """Rule of LinearTransformation, a matrix product of whole images. torch multiplies whole batches."""

    handles = (v2.LinearTransformation, v1.LinearTransformation)
    unsupported_when = "always: a matrix product is torch's, for the whole batch where all images have one size"

    def infer(self, spec: Spec) -> Spec:
        raise Unsupported("DALI has no matrix product")

    def infer_batch(self, spec: Spec) -> Spec | None:
        return spec if spec.kind != "pil" and spec.size and spec.dtype.is_floating_point else None


class Normalize(Rule):
    """Rule of Normalize: ``(x - mean) / std`` for each channel."""

    handles = (v2.Normalize, v1.Normalize)
    unsupported_when = (
        "a PIL image; not float32 (half types batch by batch); means or deviations that do not fit the channels; a "
        "deviation of 0"
    )
    operators = "crop_mirror_normalize"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.mean, self.std = ([float(x) for x in np.ravel(values)] for values in (transform.mean, transform.std))

    def infer(self, spec: Spec) -> Spec:
        if spec.kind == "pil" or spec.dtype != torch.float32:
            actual = "a PIL image" if spec.kind == "pil" else spec.dtype
            raise Unsupported(f"Normalize needs float32, and there is {actual} at this place")
        if not {len(self.mean), len(self.std)} <= {1, spec.channels}:
            raise Unsupported(f"{len(self.mean)} means and {len(self.std)} deviations for {spec.channels} channels")
        if 0.0 in self.std:
            raise Unsupported("a standard deviation is zero")
        return replace(spec, unit=False)

    def infer_batch(self, spec: Spec) -> Spec | None:
        return spec if spec.kind != "pil" and spec.dtype.is_floating_point else None

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.crop_mirror_normalize(
            image, mean=self.mean, std=self.std, dtype=ops.types.FLOAT, output_layout="HWC"
        )

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.normalize(image, self.transform.mean, self.transform.std)

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        if isinstance(previous, Arithmetic):
            return previous.append(self)
        if isinstance(previous, (ToTensor, Normalize)) or (
            type(previous) is ToDtype and (previous.source, previous.target) == (torch.uint8, torch.float32)
        ):
            return Arithmetic([previous, self])
        return None


class Arithmetic(Composite):
    """Rule of conversions, scaling and normalizing in one pass. A flip before them and the layout are included.

    Each of them is ``(x - mean) / std`` for each channel, and so is their composition.
    """

    operators = "crop_mirror_normalize"

    def __init__(self, parts: list[Rule], layout: str = "HWC") -> None:
        super().__init__(parts[-1].transform)
        self.parts = parts
        self.layout = layout

    def append(self, later: Rule) -> Arithmetic:
        """Return a rule for this and then ``later``."""
        return Arithmetic([*self.parts, later])

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        flips = type(self.parts[0]) is RandomHorizontalFlip
        mean, std = np.zeros(1), np.ones(1)
        half = False
        for part in self.parts:
            if isinstance(part, Normalize):
                mean, std = mean + std * np.array(part.mean), std * np.array(part.std)
            elif isinstance(part, ToTensor) or (isinstance(part, ToDtype) and part.is_scaled):
                std = std * 255
            half |= isinstance(part, ToDtype) and part.target == torch.float16
        return ops.fn.crop_mirror_normalize(
            image,
            mirror=params["0_flip"] if flips else 0,
            mean=mean.tolist(),
            std=std.tolist(),
            dtype=ops.types.FLOAT16 if half else ops.types.FLOAT,
            output_layout=self.layout,
        )

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        if type(previous) is RandomHorizontalFlip and type(self.parts[0]) is not RandomHorizontalFlip:
            return Arithmetic([previous, *self.parts])
        return None

    def fuse_with_next(self, later: Rule) -> Rule | None:
        to_half = type(later) is ToDtype and (later.source, later.target) == (torch.float32, torch.float16)
        return self.append(later) if to_half else None

    def channels_first(self) -> Rule | None:
        return Arithmetic(list(self.parts), "CHW")
