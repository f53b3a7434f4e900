"""Rules of augmentations that take each pixel from another place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchvision.transforms import InterpolationMode

from torchdali.transforms.augment.displace import Jitter, Sphere, Water
from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Unsupported
from torchdali.transforms.rules import _noise
from torchdali.transforms.rules._host import call_torch
from torchdali.transforms.rules._remap import count_pixels, take_pixels
from torchdali.transforms.rules._warp import blend_fill
from torchdali.transforms.rules.augment import Augmentation, list_drawn
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets
from torchdali.transforms.targets.ragged import canvas


class DisplacementRule(Augmentation):
    """Base of the rules. Boxes, masks and key points move by the transform's own methods.

    Attributes:
        places: Whether the rule computes the place of each pixel: on a GPU in the graph, and else in torch.
    """

    moves = True
    places = True

    def infer(self, spec: Spec) -> Spec:
        spec = super().infer(spec).with_fill([self.transform.fill])
        self.is_on_host = self.places and spec.device == "cpu"
        if self.places and not self.is_on_host and spec.channels not in (1, 3):
            raise Unsupported(f"DALI's remap does not take {spec.channels} channels")
        if self.places:
            name = type(self.transform).__name__.lower()
            self.operators = f"{name} by torch" if self.is_on_host else "arithmetic, remap"
        self.floating = spec.dtype.is_floating_point
        return spec

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.is_on_host:
            return call_torch(ops, self.reference, image, params)
        sides = image.shape(dtype=ops.types.INT32)
        nearest = self.transform.interpolation is InterpolationMode.NEAREST
        values = image if self.floating else ops.fn.cast(image, dtype=ops.types.FLOAT)
        x, y = self.find_sources(ops, count_pixels(ops, params, sides), sides, params)
        values, inside = take_pixels(ops, values, x, y, nearest)
        result = blend_fill(ops, values, inside, [self.transform.fill])
        return result if self.floating else ops.fn.cast(result, dtype=ops.types.UINT8)

    def find_sources(self, ops: Ops, pixels: tuple[Node, Node], sides: Node, params: Nodes) -> tuple[Node, Node]:
        """Return the column and the row, ``(H, W)``, from which each pixel is taken. A pixel's centre is its number.

        Args:
            ops: The operators.
            pixels: ``(1, W)`` numbers of the columns, and ``(H, 1)`` numbers of the rows.
            sides: Height and width of the image.
            params: The nodes of the parameters.
        """
        raise NotImplementedError

    def move(self, targets: Targets, params: Params) -> None:
        size, transform = targets.size, self.transform

        def find_params(i: int) -> dict[str, Any]:
            return self.make_params({name: values[i] for name, values in params.items()}, canvas(size, i))

        targets.apply_each(
            lambda boxes, of, i: transform.move_boxes(
                boxes, of.format, canvas(size, i), of.clamping_mode, find_params(i)
            ),
            lambda points, i: transform.move_points(points, canvas(size, i), find_params(i)),
        )
        if targets.pixels:
            targets.pixels.warp(lambda mask, i: transform.move_mask(mask, find_params(i)), 0)

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any]:
        return {name: float(sample[name]) for name in self.transform.drawn}

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        height, width = image.shape[-2:]
        return self.transform.apply(image, self.make_params(sample, (height, width)))


class SphereRule(DisplacementRule):
    """Rule of Sphere."""

    handles = (Sphere,)
    operators = "sphere"
    unsupported_when = "not uint8 or float32"
    places = False

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.sphere(image, **_find_options(ops, self.transform))


class WaterRule(DisplacementRule):
    """Rule of Water. DALI takes one phase for all samples, so phases that are drawn go another way."""

    handles = (Water,)
    operators = "water"
    unsupported_when = "not uint8 or float32; on a GPU, a range of phases for neither grey nor RGB"

    def infer(self, spec: Spec) -> Spec:
        self.places = bool(list_drawn(self.transform))
        return super().infer(spec)

    @property
    def inputs(self) -> dict[str, Input]:
        if not self.places:
            return {}
        return super().inputs if self.is_on_host else {**super().inputs, "noise_ramp": _noise.INPUTS["noise_ramp"]}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return {**super().draw(draws, size), **_noise.make_ramp(size)}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.places:
            return super().lower(ops, image, params)
        (ampl_x, ampl_y), (freq_x, freq_y) = self.transform.amplitude, self.transform.frequency
        phases = {"phase_x": self.transform.phase_x[0], "phase_y": self.transform.phase_y[0]}
        how = _find_options(ops, self.transform)
        return ops.fn.water(image, ampl_x=ampl_x, ampl_y=ampl_y, freq_x=freq_x, freq_y=freq_y, **phases, **how)

    def find_sources(self, ops: Ops, pixels: tuple[Node, Node], sides: Node, params: Nodes) -> tuple[Node, Node]:
        x, y = pixels
        (ampl_x, ampl_y), (freq_x, freq_y) = self.transform.amplitude, self.transform.frequency
        across = ops.math.sin(y * np.float32(freq_x) + params["phase_x"]) * np.float32(ampl_x)
        down = ops.math.cos(x * np.float32(freq_y) + params["phase_y"]) * np.float32(ampl_y)
        return x + across - np.float32(0.5), y + down - np.float32(0.5)


class JitterRule(DisplacementRule):
    """Rule of Jitter. The graph, or torch, computes the numbers of the pixels."""

    handles = (Jitter,)
    randomness = "two numbers for every pixel"
    unsupported_when = "not uint8 or float32; on a GPU, neither grey nor RGB"

    def infer(self, spec: Spec) -> Spec:
        spec = super().infer(spec)
        self.randomness = type(self).randomness
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        names = ("noise_step", "noise_start") if self.is_on_host else tuple(_noise.INPUTS)
        return {name: _noise.INPUTS[name] for name in names}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return _noise.draw_noise(draws, size)

    def _find_move(self, words: Any) -> Any:
        """Return numbers from 0 to twice the largest move, each equally likely, in integers: equal on CPU and GPU."""
        count = np.uint32(self.transform.degree // 2 * 2 + 1)
        return ((words >> np.uint32(16)) * count) >> np.uint32(16)

    def find_sources(self, ops: Ops, pixels: tuple[Node, Node], sides: Node, params: Nodes) -> tuple[Node, Node]:
        fn, (x, y) = ops.fn, pixels
        moves = self._find_move(_noise.random_words(ops, params, sides[0], sides[1], 2))
        moves = fn.cast(moves, dtype=ops.types.FLOAT) - np.float32(self.transform.degree // 2)
        down, across = (
            fn.reinterpret(fn.squeeze(fn.slice(moves, start=[i], shape=[1], axes=[2]), axes=[2]), layout="HW")
            for i in (0, 1)
        )
        return x + across, y + down

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any]:
        moves = self._find_move(_noise.reference_words(sample, *size, 2)).astype(np.int64) - self.transform.degree // 2
        return {"moves": torch.from_numpy(moves).permute(2, 0, 1)}


def _find_options(ops: Ops, transform: Any) -> dict[str, Any]:
    """Return the arguments that DALI's operators of displacement have in common."""
    nearest = transform.interpolation is InterpolationMode.NEAREST
    interpolation = ops.types.INTERP_NN if nearest else ops.types.INTERP_LINEAR
    return {"interp_type": interpolation, "fill_value": transform.fill}
