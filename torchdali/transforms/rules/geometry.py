"""Rules of rotations, affine maps and changes of perspective."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.functional import _get_perspective_coeffs  # pyright: ignore[reportPrivateUsage]
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import (
    Composite,
    Input,
    Node,
    Nodes,
    Ops,
    Rule,
    SampleTransformError,
    Unsupported,
    check_ranges,
    find_faulty_row,
)
from torchdali.transforms.rules._warp import (
    affine_matrices,
    perspective_matrices,
    resolve_border,
    resolve_interpolation,
    rotation_matrices,
    warp,
)
from torchdali.transforms.rules.conversion import resolve_mask_fill
from torchdali.transforms.rules.flip import Flips, RandomHorizontalFlip, RandomVerticalFlip
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets
from torchdali.transforms.targets.maps import AffineMaps


def _list_corners(height: int, width: int) -> list[list[int]]:
    """Return the positions ``[x, y]`` of an image's corner pixels, clockwise from the top left."""
    return [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]]


class Warp(Rule):
    """Rule of a map of the plane that is drawn for each sample."""

    operators = "warp_perspective"
    moves = True
    unsupported_when: ClassVar[str] = (
        "interpolation neither nearest nor bilinear; not uint8 or float32; not 1, 3 or 4 channels"
    )
    feeds: ClassVar = {"matrix": Input(np.float32, 2)}

    def infer(self, spec: Spec) -> Spec:
        if spec.dtype not in (torch.uint8, torch.float32):
            raise Unsupported(f"no rule for {spec.dtype} images")
        if spec.channels not in (1, 3, 4):
            raise Unsupported(f"DALI's warp of {spec.channels} channels is another one, or none")
        self.interpolation = resolve_interpolation(self.transform, spec)
        self.fill = resolve_border(self.transform, spec)
        self.floating = spec.dtype == torch.float32
        return spec.with_fill(self.fill or ())

    @abstractmethod
    def draw(self, draws: Draws, size: IntArray) -> Params:
        """Draw ``matrix`` for :func:`warp`, and the numbers that ``reference`` needs."""

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        size = params.get("size")
        return warp(ops, image, params["matrix"], self.interpolation, self.fill, self.floating, size)

    @property
    def how(self) -> dict[str, Any]:
        """Arguments that torchvision's functionals have in common."""
        return {"interpolation": InterpolationMode(self.interpolation), "fill": self.fill}

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        return FlippedWarp([self]).fuse_with_previous(previous)


class RandomRotation(Warp):
    """Rule of RandomRotation: a random angle about the middle or another point."""

    handles = (v2.RandomRotation, v1.RandomRotation)
    randomness = "angle"
    unsupported_when = f"{Warp.unsupported_when}; v1 with expand, by quarters, on a tensor"

    def infer(self, spec: Spec) -> Spec:
        check_ranges(degrees=self.transform.degrees)
        spec = super().infer(spec)
        if not self.transform.expand:
            return spec
        low, high = self.transform.degrees
        if isinstance(self.transform, v1.RandomRotation) and spec.kind != "pil" and low == high and low % 90 == 0:
            raise Unsupported("v1's RandomRotation by quarters adds a line to sides of odd length")
        return replace(spec, size=None)

    @property
    def inputs(self) -> dict[str, Input]:
        return {**super().inputs, "size": Input(np.float32, 1)} if self.transform.expand else super().inputs

    def draw(self, draws: Draws, size: IntArray) -> Params:
        angle = draws.uniform_range(*self.transform.degrees)
        matrix, out_size = rotation_matrices(angle, self.transform.center, size, self.transform.expand)
        return {"matrix": matrix, "size": out_size, "angle": angle}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return params["size"]

    def move(self, targets: Targets, params: Params) -> None:
        transform, size = self.transform, params["size"].astype(np.int64)
        targets.rotate(params["angle"], size, transform.expand, transform.center, resolve_mask_fill(transform, targets))

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        return {"angle": float(sample["angle"])}

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        angle, transform = float(sample["angle"]), self.transform
        return F.rotate(image, angle, expand=transform.expand, center=transform.center, **self.how)


class RandomAffine(Warp):
    """Rule of RandomAffine: random rotation, translation, scale and shear."""

    handles = (v2.RandomAffine, v1.RandomAffine)
    _drawn = ("angle", "translate", "scale", "shear")

    def infer(self, spec: Spec) -> Spec:
        transform, shear = self.transform, self.transform.shear
        check_ranges(degrees=transform.degrees, scale=transform.scale, shear=shear)
        check_ranges(shear=shear and shear[-2:])
        drawn = {"angle": True, "translation": transform.translate, "scale": transform.scale, "shear": shear}
        self.randomness = ", ".join(name for name, used in drawn.items() if used)
        return super().infer(spec)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        transform = self.transform
        count = len(draws)
        angle, scale = draws.uniform_range(*transform.degrees), np.ones(count)
        translate, shear = np.zeros((count, 2)), np.zeros((count, 2))
        if transform.translate is not None:
            most = np.asarray(transform.translate, np.float64) * size[:, ::-1]
            translate = np.rint((2 * draws.uniform(2) - 1) * most)
        if transform.scale is not None:
            scale = draws.uniform_range(*transform.scale)
        if transform.shear is not None:
            shear[:, 0] = draws.uniform_range(*transform.shear[:2])
            if len(transform.shear) == 4:
                shear[:, 1] = draws.uniform_range(*transform.shear[2:])
        matrix = affine_matrices(angle, translate, scale, shear, transform.center, size)
        return {"matrix": matrix, "angle": angle, "translate": translate, "scale": scale, "shear": shear}

    def move(self, targets: Targets, params: Params) -> None:
        angle, translate, scale, shear = (params[name] for name in self._drawn)
        maps = AffineMaps(angle, translate, scale, shear, self.transform.center)
        targets.affine(maps, resolve_mask_fill(self.transform, targets))

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        return {name: sample[name].tolist() for name in self._drawn}

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        translate, shear = sample["translate"].tolist(), sample["shear"].tolist()
        angle, scale = float(sample["angle"]), float(sample["scale"])
        return F.affine(image, angle, translate, scale, shear, center=self.transform.center, **self.how)


class RandomPerspective(Warp):
    """Rule of RandomPerspective: with probability p the corners move inwards by random amounts."""

    handles = (v2.RandomPerspective, v1.RandomPerspective)

    def infer(self, spec: Spec) -> Spec:
        if self.transform.distortion_scale < 0:
            raise Unsupported("distortion_scale is negative")
        self.operators = "warp_perspective" if self.transform.p >= 1 else "split, warp_perspective, merge"
        self.randomness = f"apply with probability {self.transform.p:g}, four corners"
        return super().infer(spec)

    @property
    def inputs(self) -> dict[str, Input]:
        return super().inputs if self.transform.p >= 1 else {"warp": Input(np.bool_), **super().inputs}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        apply = draws.bernoulli(self.transform.p)
        width_height = size[:, ::-1]
        bound = (self.transform.distortion_scale * (width_height // 2)).astype(np.int64) + 1
        inwards = np.floor(draws.uniform(8).reshape(-1, 4, 2) * bound[:, None]).astype(np.int64)
        far = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
        # At the right and at the bottom torchvision draws from ``side - bound`` upwards.
        corners = inwards + far * (width_height - bound)[:, None]
        if (row := find_faulty_row(apply[:, None] & (size < 2))) is not None:
            raise SampleTransformError(row, f"corners of an image of {tuple(size[row].tolist())} fall together")
        matrix = np.where(apply[:, None, None], perspective_matrices(corners, size), np.eye(3))
        return {"warp": apply, "apply": apply, "matrix": matrix, "corners": corners}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if "warp" not in params:
            return super().lower(ops, image, params)
        return ops.apply_where(
            params["warp"], lambda x, p: Warp.lower(self, ops, x, p), image, {"matrix": params["matrix"]}
        )

    def move(self, targets: Targets, params: Params) -> None:
        targets.perspective(params["corners"], resolve_mask_fill(self.transform, targets), params["apply"])

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        corners = _list_corners(*size), sample["corners"].tolist()
        return {"coefficients": _get_perspective_coeffs(*corners)} if sample["apply"] else None

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        if not sample["apply"]:
            return image
        start = _list_corners(*image.shape[-2:])
        return F.perspective(image, start, sample["corners"].tolist(), **self.how)


class FlippedWarp(Composite):
    """Rule of flips and then a map of the plane, in one matrix."""

    operators = "warp_perspective"

    def __init__(self, parts: list[Rule]) -> None:
        super().__init__(parts[-1].transform)
        self.parts = parts

    @property
    def _last(self) -> str:
        return f"{len(self.parts) - 1}_"

    @property
    def inputs(self) -> dict[str, Input]:
        return {f"{self._last}{name}": x for name, x in self.parts[-1].inputs.items()}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params = super().draw(draws, size)
        matrix = np.array(params[f"{self._last}matrix"], np.float64)
        for i, flip in enumerate(self.parts[:-1]):
            flipped = params[f"{i}_flip"].astype(bool)
            row, side = (1, size[:, 0]) if isinstance(flip, RandomVerticalFlip) else (0, size[:, 1])
            mirrored = side[:, None] * matrix[:, 2] - matrix[:, row]
            matrix[flipped, row] = mirrored[flipped]
            if f"{self._last}warp" in params:
                params[f"{self._last}warp"] = params[f"{self._last}warp"] | flipped
        params[f"{self._last}matrix"] = matrix
        return params

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return self.parts[-1].lower(ops, image, self.select_params(len(self.parts) - 1, params))

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        if isinstance(previous, Flips):
            return FlippedWarp([*previous.parts, *self.parts])
        return FlippedWarp([previous, *self.parts]) if isinstance(previous, RandomHorizontalFlip) else None
