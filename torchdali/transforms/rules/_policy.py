"""Base class of the augmentation policies, which draw operations and magnitudes for each sample.

A policy is a sequence of *slots*. In a slot each sample has one of the operations below, at one magnitude. Operations
that are the same arithmetic with different numbers are a *family*. A slot is lowered to a sequence of families. Each
family is applied to the samples that drew one of its operations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms import autoaugment as v1

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Composite, Input, Node, Nodes, Ops, Rule, Unsupported
from torchdali.transforms.rules._warp import (
    affine_matrices,
    resolve_border,
    resolve_interpolation,
    rotation_matrices,
    warp,
)
from torchdali.transforms.rules.color import (
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    blend,
    blend_weights,
    check_image,
    check_unit_range,
    white_level,
)
from torchdali.transforms.rules.histogram import EQUALIZE, autocontrast, equalize
from torchdali.transforms.rules.photometric import posterize, posterize_argument, sharpen, solarize
from torchdali.transforms.spec import IntArray, Params, Sample, Spec

Floats = npt.NDArray[np.float64]

OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast"),
    *("Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize", "Invert"),
)
"""torchvision's names. An operation's number is its index here."""

NUMBER = {name: i for i, name in enumerate(OPERATIONS)}
_SIGNED = np.array([1 <= i <= 9 for i in range(len(OPERATIONS))])


@dataclass(frozen=True)
class Family:
    """Operations that are the same arithmetic with different numbers.

    Attributes:
        members: The operations.
        params: Names of its parameters.
        operators: DALI operators, in words.
    """

    members: tuple[str, ...]
    params: tuple[str, ...]
    operators: str


FAMILIES = {
    "warp": Family(("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"), ("matrix",), "warp_perspective"),
    "blend": Family(("Brightness", "Color", "Contrast"), ("value", "grey", "mean"), "coord_transform, reduce"),
    "sharpen": Family(("Sharpness",), ("value",), "filter, erase"),
    "posterize": Family(("Posterize",), ("value",), ""),
    "solarize": Family(("Solarize", "Invert"), ("value",), ""),
    "autocontrast": Family(("AutoContrast",), (), "reduce"),
    "equalize": Family(("Equalize",), (), "equalize, reduce"),
}

_FAMILY = np.array([next((i for i, x in enumerate(FAMILIES.values()) if name in x.members), -1) for name in OPERATIONS])
_BLEND = np.array(
    [{"Brightness": BRIGHTNESS, "Contrast": CONTRAST, "Color": SATURATION}.get(x, -1) for x in OPERATIONS]
)
_INPUTS = {"matrix": Input(np.float32, 2), **{name: Input(np.float32) for name in ("value", "grey", "mean")}}


@dataclass(frozen=True)
class Space:
    """Largest magnitude of each operation.

    Attributes:
        shear: Largest shear.
        rotate: Largest angle, in degrees.
        enhance: Largest change of brightness, colour, contrast and sharpness.
        translate: Largest translation: a share of the side, or pixels if above 1.
        bits: Most bits that Posterize keeps, and how many fewer it keeps at the last magnitude.
    """

    shear: float
    rotate: float
    enhance: float
    translate: float
    bits: tuple[int, int]


USUAL = Space(0.3, 30.0, 0.9, 150.0 / 331.0, (8, 4))
WIDE = Space(0.99, 135.0, 0.99, 32.0, (8, 6))
MIXED = Space(0.3, 30.0, 0.9, 1.0 / 3.0, (4, 4))


def linspace_at(end: npt.ArrayLike, which: npt.ArrayLike, count: int) -> npt.NDArray[np.float32]:
    """Return ``torch.linspace(0, end, count)[which]`` for many ends and indices.

    torch computes in float32, from both ends towards the middle. It rounds the product and the sum once.
    """
    last, place = np.asarray(end, np.float32), np.asarray(which, np.int64)
    step = (last / np.float32(count - 1)).astype(np.float64)
    return np.where(place < count // 2, step * place, last - step * (count - 1 - place)).astype(np.float32)


class Policy(Rule):
    """Rule of a policy: slots, one after another."""

    unsupported_when = "interpolation neither nearest nor bilinear; not uint8 or, with v2's class, float32"
    space: ClassVar[Space]
    bins: int
    slots: Sequence[Sequence[str]] = ()
    """Operations that each slot may have."""

    def infer(self, spec: Spec) -> Spec:
        check_image(spec)
        check_unit_range(spec)
        self.is_v1 = type(self.transform).__module__ == v1.__name__
        if self.is_v1 and spec.dtype.is_floating_point:
            raise Unsupported(f"v1's {type(self.transform).__name__} accepts uint8 only")
        if self.bins < 2:
            raise Unsupported("torchvision needs two magnitudes or more")
        self.spec = spec
        self.magnitudes = self._magnitude_table()
        self.interpolation = resolve_interpolation(self.transform, spec)
        self.fill = resolve_border(self.transform, spec)
        self.families = [
            [name for name, family in FAMILIES.items() if set(family.members) & set(names)] for names in self.slots
        ]
        used = dict.fromkeys(name for names in self.families for name in names)
        words = [word for name in used for word in FAMILIES[name].operators.split(", ") if word]
        if spec.device == "cpu":
            words = [EQUALIZE["cpu"] if word == "equalize" else word for word in words]
        self.operators = ", ".join(dict.fromkeys([*words, "arithmetic", "split", "merge"])) if used else ""
        filled = spec.with_fill(self.fill or ())
        if not filled.unit and len(self.slots) > 1:
            raise Unsupported(f"with a fill of {self.fill}, values may lie outside of [0, 1] before an operation")
        return filled

    @property
    def inputs(self) -> dict[str, Input]:
        fed: dict[str, Input] = {}
        for i, names in enumerate(self.families):
            for name in names:
                fed[f"{i}_{name}"] = Input(np.bool_)
                fed |= {f"{i}_{param}": _INPUTS[param] for param in self._params(name)}
        return fed

    def _params(self, family: str) -> list[str]:
        """Return the names of a family's parameters. A grey image is not blended with its grey version."""
        return [name for name in FAMILIES[family].params if name != "grey" or self.spec.channels == 3]

    @abstractmethod
    def choose(self, draws: Draws) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
        """Return ``(N, slots)`` numbers of operations, numbers of magnitudes, and signs: True is negative.

        Operations without a sign ignore it.
        """

    def draw(self, draws: Draws, size: IntArray) -> Params:
        operation, which, negative = self.choose(draws)
        magnitude = self._select_magnitudes(operation, which, size)
        magnitude = np.where(negative & _SIGNED[operation], -magnitude, magnitude)
        each = self._family_params(operation.ravel(), magnitude.ravel(), np.repeat(size, operation.shape[1], axis=0))
        params: Params = {"operation": operation, "magnitude": magnitude}
        for name, values in each.items():
            by_place = values.reshape(*operation.shape, *values.shape[1:])
            params |= {f"{i}_{name}": by_place[:, i] for i in range(operation.shape[1])}
        return params

    def _magnitude_table(self) -> Floats:
        """Return ``(operations, bins)`` magnitudes, float32 values. :meth:`_select_magnitudes` adds translations."""
        space, bins = self.space, self.bins
        ends = dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), space.enhance)
        ends |= {"ShearX": space.shear, "ShearY": space.shear, "Rotate": space.rotate}
        table = np.zeros((len(OPERATIONS), bins))
        # The user may have set another default dtype or device.
        how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        for name, end in ends.items():
            table[NUMBER[name]] = torch.linspace(0.0, end, bins, **how).numpy()
        most, fewer = space.bits
        table[NUMBER["Posterize"]] = (most - (torch.arange(bins, **how) / ((bins - 1) / fewer))).round().numpy()
        table[NUMBER["Solarize"]] = torch.linspace(255.0 if self.is_v1 else 1.0, 0.0, bins, **how).numpy()
        return table

    def _select_magnitudes(self, operation: IntArray, which: IntArray, size: IntArray) -> Floats:
        """Return the magnitudes of operations, without sign."""
        result = self.magnitudes[operation, which]
        for axis, name in ((1, "TranslateX"), (0, "TranslateY")):
            row, place = np.nonzero(operation == NUMBER[name])
            share = self.space.translate
            end = share * size[row, axis] if share <= 1 else np.full(len(row), share)
            result[row, place] = linspace_at(end, which[row, place], self.bins)
        return result

    def _family_params(self, operation: IntArray, magnitude: Floats, size: IntArray) -> Params:
        """Return the parameters of all families. Each row is a sample and a slot."""
        family = _FAMILY[operation]
        params: Params = {name: family == i for i, name in enumerate(FAMILIES)}
        rows = np.flatnonzero(params["warp"])
        which, amount = operation[rows], magnitude[rows]
        shear = [np.where(which == NUMBER[f"Shear{axis}"], np.degrees(np.arctan(amount)), 0.0) for axis in "XY"]
        translate = [np.where(which == NUMBER[f"Translate{axis}"], np.trunc(amount), 0.0) for axis in "XY"]
        moved = affine_matrices(0, np.stack(translate, axis=1), 1, np.stack(shear, axis=1), (0, 0), size[rows])
        rotated, _ = rotation_matrices(amount, None, size[rows])
        matrix = np.zeros((len(operation), 3, 3), np.float32)
        matrix[rows] = np.where((which == NUMBER["Rotate"])[:, None, None], rotated, moved)

        kind = np.where((operation == NUMBER["Color"]) & (self.spec.channels == 1), -1, _BLEND[operation])
        factor = 1.0 + magnitude
        blended = blend_weights(kind, factor)
        value = blended["keep"].astype(np.float64)
        value[params["sharpen"]] = 1.0 - factor[params["sharpen"]]
        value[params["posterize"]] = posterize_argument(magnitude[params["posterize"]].astype(np.int64), self.spec)
        white = 1.0 if self.is_v1 else white_level(self.spec)
        value[params["solarize"]] = white * magnitude[params["solarize"]]
        value[operation == NUMBER["Invert"]] = -np.inf
        return {**params, "matrix": matrix, "value": value, "grey": blended["grey"], "mean": blended["mean"]}

    def lower_slot(self, ops: Ops, image: Node, number: int, params: Nodes) -> Node:
        """Emit the operators of one slot."""
        spec, floating = self.spec, self.spec.dtype.is_floating_point

        def drop_bits(x: Node, by: Node) -> Node:
            return posterize(ops, x, by if floating else ops.fn.cast(by, dtype=ops.types.UINT8), spec)

        def blend_image(x: Node, p: Nodes) -> Node:
            return blend(ops, x, {"keep" if name == "value" else name: node for name, node in p.items()}, spec)

        bodies: dict[str, Callable[[Node, Nodes], Node]] = {
            "warp": lambda x, p: warp(ops, x, p["matrix"], self.interpolation, self.fill, floating),
            "blend": blend_image,
            "sharpen": lambda x, p: sharpen(ops, x, p["value"], spec),
            "posterize": lambda x, p: drop_bits(x, p["value"]),
            "solarize": lambda x, p: solarize(ops, x, p["value"], spec),
            "autocontrast": lambda x, _: autocontrast(ops, x, spec),
            "equalize": lambda x, _: equalize(ops, x, spec),
        }
        own = Composite.select_params(number, params)
        for name in self.families[number]:
            image = ops.apply_where(own[name], bodies[name], image, {key: own[key] for key in self._params(name)})
        return image

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        for number in range(len(self.slots)):
            image = self.lower_slot(ops, image, number, params)
        return image

    def reference_slot(self, image: torch.Tensor, number: int, sample: Sample) -> torch.Tensor:
        """Apply torchvision's own code to one slot."""
        name, magnitude = OPERATIONS[int(sample["operation"][number])], float(sample["magnitude"][number])
        mode = InterpolationMode(self.interpolation)
        if self.is_v1:
            return cast("Any", v1)._apply_op(image, name, magnitude, mode, self.fill)  # noqa: SLF001
        apply = self.transform._apply_image_or_video_transform  # noqa: SLF001
        return apply(image, name, magnitude, interpolation=mode, fill={torch.Tensor: self.fill})

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        for number in range(len(self.slots)):
            image = self.reference_slot(image, number, sample)
        return image
