"""Rules of DALI's own augmentations, which draw a number from each of their ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from torchdali.transforms.augment import BGR, HSV, ColorSpace, ColorTwist, GridMask, LookupTable, SaltAndPepper
from torchdali.transforms.augment.filters import CLAHE
from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Rule, SampleTransformError, Unsupported, find_faulty_row
from torchdali.transforms.rules import _noise
from torchdali.transforms.spec import IntArray, Params, Sample, Spec


def list_drawn(transform: Any) -> list[str]:
    """Return the names of a transform's ranges that are more than one number."""
    ranges = {name: getattr(transform, name) for name in transform.drawn}
    return [name for name, (low, high) in ranges.items() if low < high]


def draw_ranges(transform: Any, draws: Draws) -> Params:
    """Return ``(N,)`` float32 numbers from each range of a transform."""
    params: Params = {}
    for name in transform.drawn:
        low, high = getattr(transform, name)
        numbers = draws.uniform_range(low, high) if low < high else np.full(len(draws), low)
        params[name] = numbers.astype(np.float32)
    return params


class Augmentation(Rule):
    """Base of the rules. They feed one float32 for each range of the transform.

    Attributes:
        dtypes: Element types of images that DALI takes.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.float32)

    def infer(self, spec: Spec) -> Spec:
        if spec.dtype not in self.dtypes:
            raise Unsupported(f"no rule for {spec}")
        self.randomness = ", ".join(list_drawn(self.transform))
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        return {name: Input(np.float32) for name in self.transform.drawn}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return draw_ranges(self.transform, draws)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return self.transform.apply(image, {name: float(sample[name]) for name in self.transform.drawn})


class _Color(Augmentation):
    """Base of the rules of RGB images."""

    unsupported_when = "not uint8 or float32; not RGB"

    def infer(self, spec: Spec) -> Spec:
        if spec.channels != 3:
            raise Unsupported(f"no rule for {spec}")
        return super().infer(spec)


class ColorTwistRule(_Color):
    """Rule of ColorTwist."""

    handles = (ColorTwist,)
    operators = "color_twist"

    def infer(self, spec: Spec) -> Spec:
        return super().infer(spec).with_fill([np.inf])  # floats are not clamped

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.color_twist(image, **params)


class HSVRule(_Color):
    """Rule of HSV."""

    handles = (HSV,)
    operators = "hsv"

    def infer(self, spec: Spec) -> Spec:
        return super().infer(spec).with_fill([np.inf])

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.hsv(image, **params)


class ColorSpaceRule(_Color):
    """Rule of ColorSpace and BGR."""

    handles = (ColorSpace, BGR)
    operators = "color_space_conversion"
    dtypes = (torch.uint8,)
    unsupported_when = "not uint8 RGB"

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        space = getattr(ops.types, self.transform.space)
        return ops.fn.color_space_conversion(image, image_type=ops.types.RGB, output_type=space)


class LookupTableRule(Augmentation):
    """Rule of LookupTable."""

    handles = (LookupTable,)
    operators = "lookup_table"
    dtypes = (torch.uint8,)
    unsupported_when = "not uint8; a table of floats on a PIL image"

    def infer(self, spec: Spec) -> Spec:
        values = self.transform.values
        if spec.kind == "pil" and values.dtype != torch.uint8:
            raise Unsupported("a PIL image holds no floats")
        unit = not values.is_floating_point() or bool(((values >= 0) & (values <= 1)).all())
        return replace(super().infer(spec), dtype=values.dtype, unit=unit)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        values = self.transform.values
        dtype = ops.types.UINT8 if values.dtype == torch.uint8 else ops.types.FLOAT
        return ops.fn.lookup_table(image, keys=list(range(256)), values=values.tolist(), dtype=dtype)


class GridMaskRule(Augmentation):
    """Rule of GridMask."""

    handles = (GridMask,)
    operators = "grid_mask"
    unsupported_when = "not uint8 or float32"

    def infer(self, spec: Spec) -> Spec:
        return super().infer(spec).with_fill([0.0])

    @property
    def inputs(self) -> dict[str, Input]:
        return {**super().inputs, "tile": Input(np.int32)}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params = super().draw(draws, size)
        return {**params, "tile": np.floor(params["tile"]).astype(np.int32)}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        tile = ops.fn.cast(params["tile"], dtype=ops.types.FLOAT)
        return ops.fn.grid_mask(
            image,
            tile=params["tile"],
            ratio=params["ratio"],
            angle=params["angle"] * np.float32(np.pi / 180),
            shift_x=params["shift_x"] * tile,
            shift_y=params["shift_y"] * tile,
        )


class SaltAndPepperRule(Augmentation):
    """Rule of SaltAndPepper. The graph computes the numbers of the pixels."""

    handles = (SaltAndPepper,)
    operators = "arithmetic"
    unsupported_when = "not uint8 or float32"

    def infer(self, spec: Spec) -> Spec:
        spec = super().infer(spec).with_fill([0.0, 1.0])
        self.randomness = ", ".join(filter(None, (self.randomness, "a number for every pixel")))
        self.floating = spec.dtype.is_floating_point
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        return {**super().inputs, **_noise.INPUTS}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return {**super().draw(draws, size), **_noise.draw_noise(draws, size)}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        fn, types = ops.fn, ops.types
        sides = image.shape(dtype=types.INT32)
        uniform = _noise.to_uniform(_noise.random_words(ops, params, sides[0], sides[1], 1))
        noisy, white = uniform < params["p"], uniform < params["p"] * params["salt"]
        if self.floating:
            return image * fn.cast(~noisy, dtype=types.FLOAT) + fn.cast(white, dtype=types.FLOAT)
        keep = fn.cast(noisy, dtype=types.UINT8) * np.uint8(255) ^ np.uint8(255)
        return (image & keep) | fn.cast(white, dtype=types.UINT8) * np.uint8(255)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        height, width = image.shape[-2:]
        words = _noise.reference_words(sample, height, width, 1)[..., 0]
        uniform = torch.from_numpy(_noise.to_uniform(words).astype(np.float32))
        p, salt = (np.float32(sample[name]) for name in ("p", "salt"))
        return self.transform.apply(image, {"p": float(p), "salt": float(salt), "uniform": uniform})


class CLAHERule(Augmentation):
    """Rule of CLAHE."""

    handles = (CLAHE,)
    operators = "clahe"
    dtypes = (torch.uint8,)
    unsupported_when = "not uint8; neither grey nor RGB; on a GPU"

    def infer(self, spec: Spec) -> Spec:
        # On a GPU DALI 2.4 equalizes otherwise: grey values differ by up to 58 from OpenCV's. No issue is known.
        if spec.device == "gpu" or spec.channels not in (1, 3):
            raise Unsupported(f"no rule for {spec}")
        return super().infer(spec)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        if (row := find_faulty_row(size <= np.array(self.transform.tiles))) is not None:
            tiles, sides = self.transform.tiles, tuple(size[row].tolist())
            raise SampleTransformError(
                row, f"an image must be larger than the number of CLAHE's tiles, {tiles}, got {sides}"
            )
        return {}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        down, across = self.transform.tiles
        return ops.fn.clahe(image, tiles_y=down, tiles_x=across, clip_limit=self.transform.clip, luma_only=False)
