"""Rules of the transforms of volumes. A volume is (D, H, W, C) in the graph, and its labels are a second view."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torchvision import tv_tensors

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
    find_faulty_row,
)
from torchdali.transforms.spec import IntArray, Params, Sample, Spec

__all__ = ["LoadLabels", "VolumeRule", "label_rules"]

_NAMES = "torchdali.transforms.augment.volumes."


class VolumeRule(Rule):
    """Base of the rules. ``draw`` gets ``(N, 3)`` depths, heights and widths.

    Attributes:
        changes_labels: Whether labels change as the volume does.
        is_label: Whether it is the rule of the labels.
    """

    unsupported_when = "outside of `Volumes`"
    changes_labels = True
    is_label = False

    def infer(self, spec: Spec) -> Spec:
        if spec.kind != "volume":
            raise Unsupported("it is for volumes, and in DALI for those of torchdali.datasets.Volumes")
        self.channels = spec.channels
        return spec

    def channels_first(self) -> Rule | None:
        return _OneChannel(self) if self.channels == 1 else None

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        volume = tv_tensors.Mask(image) if self.is_label else image
        return self.transform.transform(
            volume, self.make_params(sample, (image.shape[-2], image.shape[-1]))
        ).as_subclass(torch.Tensor)


class _OneChannel(Composite):
    """Rule of the last rule of a chain, whose only channel comes first without a copy."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.transform)
        self.parts, self.operators, self.randomness = [rule], rule.operators, rule.randomness

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.reshape(super().lower(ops, image, params), src_dims=[3, 0, 1, 2], layout="CDHW")


class FloatVolumeRule(VolumeRule):
    """Base of the rules that interpolate values."""

    unsupported_when = "outside of `Volumes`; not float32"

    def infer(self, spec: Spec) -> Spec:
        if spec.dtype != torch.float32:
            raise Unsupported(f"DALI rounds other types than float32 otherwise, and this is {spec.dtype_name}")
        return super().infer(spec)


def label_rules(rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules of the labels of volumes: they draw the same numbers."""
    made: list[Rule] = []
    for rule in rules:
        if isinstance(rule, VolumeRule) and rule.changes_labels:
            made.append(copy.copy(rule))
            made[-1].is_label = True  # pyright: ignore[reportAttributeAccessIssue]
    return made


class LoadLabels(Rule):
    """The first rule of labels: they take the place of the volume. The reader stores them in the draws.

    Args:
        dtype: Their element type.
    """

    operators = "labels"
    position = 2**16 - 4
    """Where they are stored. No chain of transforms is that long."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(None)
        self._dtype = np.dtype(str(dtype).removeprefix("torch.")).type

    def infer(self, spec: Spec) -> Spec:
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        return {"labels": Input(self._dtype, 4)}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params = draws.load()
        assert params is not None
        return params

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        labels = params["labels"].gpu() if ops.device == "gpu" else params["labels"]
        return ops.fn.reshape(labels, layout="DHWC")


class RandomCrop3D(VolumeRule):
    """Rule of RandomCrop3D: a window at a random place."""

    handles = (f"{_NAMES}RandomCrop3D",)
    operators = "slice"
    randomness = "place of the window"
    feeds: ClassVar = {"start": Input(np.int32, 1)}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        room = size - np.array(self.transform.size)
        if (row := find_faulty_row(room < 0)) is not None:
            sides = tuple(size[row].tolist())
            raise SampleTransformError(
                row, f"a volume must be at least as large as the crop, {self.transform.size}, got {sides}"
            )
        return {"start": (draws.uniform(3) * (room + 1)).astype(np.int64)}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return np.tile(np.array(self.transform.size, np.int64), (len(size), 1))

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.slice(image, start=params["start"], shape=list(self.transform.size), axes=[0, 1, 2])

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any]:
        return {"start": sample["start"].tolist()}


class RandomFlip3D(VolumeRule):
    """Rule of RandomFlip3D: each of some axes is flipped with a probability."""

    handles = (f"{_NAMES}RandomFlip3D",)
    operators = "flip"
    feeds: ClassVar = {name: Input(np.int32) for name in ("depthwise", "vertical", "horizontal")}

    def infer(self, spec: Spec) -> Spec:
        self.randomness = f"for each axis of {self.transform.axes} whether it is flipped, p={self.transform.p:g}"
        return super().infer(spec)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        flips = draws.uniform(3) < self.transform.p
        flips[:, [axis for axis in range(3) if axis not in self.transform.axes]] = False
        return dict(zip(self.inputs, flips.T, strict=True))

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.flip(image, **params)

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any]:
        return {"axes": [axis - 3 for axis, name in enumerate(self.inputs) if sample[name]]}


class RandomAffine3D(FloatVolumeRule):
    """Rule of RandomAffine3D and RandomRotate3D: a linear map about the middle."""

    handles = (f"{_NAMES}RandomAffine3D", f"{_NAMES}RandomRotate3D")
    operators = "warp_affine"
    randomness = "an angle and a shift for each axis, a factor"
    feeds: ClassVar = {"matrix": Input(np.float32, 2)}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        ranges = np.array([*self.transform.degrees, *self.transform.translate, self.transform.scale])
        drawn = ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * draws.uniform(7)
        rotation = np.tile(np.eye(3), (len(size), 1, 1))
        for axis in range(3):
            rotation = rotation @ _turn(axis, np.radians(drawn[:, axis]))
        linear = rotation / drawn[:, 6, None, None]
        shift = -(linear @ drawn[:, 3:6, None])
        # DALI counts in voxels from the corner, and its axes are x, y, z.
        middle = size[:, :, None] / 2
        corner = np.concatenate((linear, middle + shift - linear @ middle), axis=2)[:, ::-1]
        corner = np.concatenate((corner[:, :, 2::-1], corner[:, :, 3:]), axis=2)
        return {"matrix": corner.astype(np.float32), "middle": np.concatenate((linear, shift), axis=2)}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        kind = ops.types.INTERP_NN if self.is_label else ops.types.INTERP_LINEAR
        fill = 0.0 if self.is_label else self.transform.fill
        return ops.fn.warp_affine(image, matrix=params["matrix"], inverse_map=True, interp_type=kind, fill_value=fill)

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any]:
        return {"matrix": torch.from_numpy(sample["middle"])}


def _turn(axis: int, angle: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ``(N, 3, 3)`` rotations about an axis, as RandomAffine3D has them."""
    turn = np.tile(np.eye(3), (len(angle), 1, 1))
    first, second = (i for i in range(3) if i != axis)
    turn[:, first, first] = turn[:, second, second] = np.cos(angle)
    turn[:, first, second], turn[:, second, first] = -np.sin(angle), np.sin(angle)
    return turn


class GaussianBlur3D(FloatVolumeRule):
    """Rule of GaussianBlur3D: labels stay as they are."""

    handles = (f"{_NAMES}GaussianBlur3D",)
    operators = "gaussian_blur"
    randomness = "sigma"
    changes_labels = False
    feeds: ClassVar = {"sigma": Input(np.float32), "window_size": Input(np.int32)}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        sigma = draws.uniform_range(*self.transform.sigma)
        radius = np.ceil(3 * sigma).astype(np.int64)
        if (row := find_faulty_row(radius >= size.min(1))) is not None:
            raise SampleTransformError(
                row,
                f"sigma={sigma[row]:.3g} blurs {radius[row]} voxels far, and a volume must be larger, got "
                f"{tuple(size[row].tolist())}",
            )
        # A window of one voxel changes nothing, and DALI needs a sigma for it.
        return {"sigma": np.where(sigma > 0, sigma, 1), "window_size": 2 * radius + 1, "drawn": sigma}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.gaussian_blur(image, sigma=params["sigma"], window_size=params["window_size"])

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any]:
        return {"sigma": float(sample["drawn"])}


class RandomIntensity(VolumeRule):
    """Rule of RandomIntensity: a factor and a number to add. Labels stay as they are."""

    handles = (f"{_NAMES}RandomIntensity",)
    operators = "arithmetic"
    randomness = "a factor, a number to add"
    changes_labels = False
    feeds: ClassVar = {"scale": Input(np.float32), "shift": Input(np.float32)}

    def infer(self, spec: Spec) -> Spec:
        return replace(super().infer(spec), dtype=spec.dtype if spec.dtype.is_floating_point else torch.float32)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return {name: draws.uniform_range(*getattr(self.transform, name)) for name in self.inputs}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.cast(image, dtype=ops.types.FLOAT) * params["scale"] + params["shift"]

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any]:
        return {name: float(sample[name]) for name in self.inputs}
