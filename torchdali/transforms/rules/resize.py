"""Rules of resizing, and the resampling that other rules share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as v1_functional
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import (
    Input,
    Node,
    Nodes,
    Ops,
    Rule,
    SampleTransformError,
    Unsupported,
    check_whole_pixels,
    find_faulty_row,
)
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets
from torchdali.transforms.targets.pixels import find_nearest

_BY_PILLOW_CONSTANT = {
    0: InterpolationMode.NEAREST,
    1: InterpolationMode.LANCZOS,
    2: InterpolationMode.BILINEAR,
    3: InterpolationMode.BICUBIC,
    4: InterpolationMode.BOX,
    5: InterpolationMode.HAMMING,
}
_NEAREST = (InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT)
_FILTERS = {InterpolationMode.BILINEAR: 1, InterpolationMode.BICUBIC: 2}
"""Numbers of DALI's filters: ``DALIInterpType``."""


class Resampling:
    """Resampling, shared by all rules that resize.

    Without a GPU, torch's kernel resizes uint8 images, or PIL those of PIL, in threads. Both are exact and faster than
    DALI.

    On a GPU DALI resizes. torchvision resamples uint8 images along the width, rounds, and then along the height. Two
    one-dimensional passes of DALI do the same. One two-dimensional pass of DALI keeps floats in between, and differs by
    a level on every sixth value. v1's functionals, which timm calls too, convert tensors to floats and round once, as
    that pass does.

    torchvision's nearest neighbours are at ``floor(i * scale)``
    (https://github.com/pytorch/pytorch/issues/34808), DALI's at ``floor((i + .5) * scale)``. So DALI's positions are
    moved by half a step, and by what :func:`choose_shift` returns. DALI's resize adds up its positions in float32, and
    misses whole lines of large images. Its warp does not.

    Args:
        transform: Transform with ``interpolation``: one, or a sequence from which each sample takes one. If it has no
            ``antialias``, that is True.
        spec: Type of the input image.
        target: Height and width if all images get the same. Then they are not fed.

    Raises:
        Unsupported: DALI has no equivalent of this interpolation.
    """

    def __init__(self, transform: Any, spec: Spec, target: tuple[int, int] | None) -> None:
        self.target = target
        self.pil = spec.kind == "pil"
        self.antialias: bool = self.pil or bool(getattr(transform, "antialias", True))
        self.floating = spec.dtype.is_floating_point
        self.rounds_once = not isinstance(transform, v2.Transform) and not self.pil
        modes: Any = transform.interpolation
        several = isinstance(modes, (tuple, list))
        self.modes = tuple(self._parse(mode) for mode in cast("Sequence[Any]", modes if several else [modes]))
        self.mode = self.modes[0]
        self.nearest = self.mode in _NEAREST
        self.is_on_host = spec.device == "cpu" and not (self.nearest or self.floating or self.rounds_once)
        self.operators = "warp_affine" if self.nearest else "resize"
        if self.is_on_host:
            self.operators = f"resize by {'PIL' if self.pil else 'torch'}"
        # Bicubic filters overshoot, and torchvision does not clamp floats.
        self.unit = spec.unit and not (self.floating and InterpolationMode.BICUBIC in self.modes)
        if len(self.modes) > 1 and any(mode in _NEAREST for mode in self.modes):
            raise Unsupported("no rule for nearest among several interpolations")
        if spec.dtype not in (torch.uint8, torch.float32):
            raise Unsupported(f"no rule for {spec.dtype} images")

    def _parse(self, mode: Any) -> InterpolationMode:
        try:
            mode = _BY_PILLOW_CONSTANT[mode] if isinstance(mode, int) else InterpolationMode(mode)
        except (KeyError, ValueError) as error:
            raise Unsupported(f"torchvision knows no interpolation {mode!r}") from error
        if self.pil and mode is InterpolationMode.NEAREST:
            return InterpolationMode.NEAREST_EXACT
        if mode is InterpolationMode.BICUBIC and not self.antialias:
            raise Unsupported("DALI's bicubic filter is another one than torch's without antialias")
        if mode not in (*_NEAREST, InterpolationMode.BILINEAR, InterpolationMode.BICUBIC):
            raise Unsupported(f"no rule for {mode.value} interpolation")
        return mode

    @property
    def inputs(self) -> dict[str, Input]:
        """Parameters that are fed: the target if it varies, and for nearest neighbours the map."""
        if self.nearest:
            return {"matrix": Input(np.float32, 2)} | ({} if self.target else {"sides": Input(np.float32, 1)})
        sides = {} if self.target else {"height": Input(np.float32), "width": Input(np.float32)}
        if len(self.modes) > 1:
            sides |= {"mode": Input(np.int32)}
        return sides

    def draw(self, size: IntArray, target: IntArray, draws: Draws) -> Params:
        """Draw the parameters for images of ``size`` that are resized to ``target``, both ``(N, 2)``."""
        if (row := find_faulty_row((target < 1) | (size < 1))) is not None:
            raise SampleTransformError(
                row, f"an image of {tuple(size[row].tolist())} would become {tuple(target[row].tolist())}"
            )
        params: Params = {
            "height": target[:, 0].astype(np.float32),
            "width": target[:, 1].astype(np.float32),
        }
        if self.nearest:
            matrix = np.zeros((len(size), 2, 3))
            for column, axis in ((0, 1), (1, 0)):  # x, then y
                old, new = size[:, axis], target[:, axis]
                begin = -0.5 * old / new if self.mode is InterpolationMode.NEAREST else 0.0
                shifts = [
                    choose_shift(*pair, self.mode.value, self.pil)
                    for pair in zip(old.tolist(), new.tolist(), strict=True)
                ]
                matrix[:, column, column], matrix[:, column, 2] = old / new, begin + np.array(shifts)
            params["matrix"], params["sides"] = matrix.astype(np.float32), target.astype(np.float32)
        if len(self.modes) > 1:
            choice = draws.choice(np.full(len(self.modes), 1 / len(self.modes)))
            params["mode"] = np.array([_FILTERS[mode] for mode in self.modes], np.int32)[choice]
        return params

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        """Emit the operators that resize an HWC image."""
        if self.nearest:
            size = params["sides"] if self.target is None else list(self.target)
            image = ops.fn.reinterpret(image, layout="HWC")  # arithmetic before it may have lost the layout
            interp = ops.types.INTERP_NN
            return ops.fn.warp_affine(image, matrix=params["matrix"], size=size, interp_type=interp)
        height, width = self.target or (params["height"], params["width"])
        if self.is_on_host:
            modes = [params["mode"]] if len(self.modes) > 1 else []
            sides = [] if self.target else [height, width]
            return ops.call(self._resize, image, *sides, *modes, layout="HWC")
        how = {
            "interp_type": ops.fn.cast(params["mode"], dtype=ops.types.INTERP_TYPE)
            if len(self.modes) > 1
            else ops.types.DALIInterpType(_FILTERS[self.mode]),
            "antialias": self.antialias,
            "mode": "stretch",
        }
        if self.floating or self.rounds_once or not self.antialias or ops.fidelity == "fast":
            return ops.fn.resize(image, resize_x=width, resize_y=height, **how)
        image = ops.fn.resize(image, resize_x=width, **how)
        return ops.fn.resize(image, resize_y=height, **how)

    def _resize(self, pixels: npt.NDArray[np.uint8], *args: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Resize an image, HWC. ``args`` are its height and width, and its filter, as far as they vary."""
        height, width = self.target or (int(args[0]), int(args[1]))
        filter_ = int(args[-1]) if len(self.modes) > 1 else _FILTERS[self.mode]
        mode = next(mode for mode in self.modes if _FILTERS[mode] == filter_)
        if self.pil:
            image: Any = PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
            return np.asarray(F.resize(image, [height, width], interpolation=mode)).reshape(height, width, -1)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        resized = F.resize(tensor, [height, width], interpolation=mode, antialias=self.antialias)
        return resized.permute(1, 2, 0).contiguous().numpy()

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        """Apply torchvision's kernel: the one for PIL images if there is no GPU, and else the one for tensors."""
        target = [int(sample["height"]), int(sample["width"])]
        mode = next(mode for mode in self.modes if _FILTERS.get(mode) == sample.get("mode", _FILTERS.get(mode)))
        if self.pil and self.is_on_host:
            return F.pil_to_tensor(F.resize(cast("Any", F.to_pil_image(image)), target, interpolation=mode))
        resize = v1_functional.resize if self.rounds_once else F.resize
        return resize(image, target, interpolation=mode, antialias=self.antialias)


@lru_cache(maxsize=8192)
def choose_shift(old: int, new: int, interpolation: str, pil: bool = False) -> float:
    """Return by how much to move positions in a line of ``old`` pixels, so that their floors are torchvision's.

    Positions are multiples of ``1 / new``, or halves of those. The shift is half of that, so float32 errors of DALI do
    not matter. Where a position is a whole number, torchvision's float32 arithmetic may round it down to the pixel
    before. If that happens to most of them, the shift is negative.

    Args:
        old: Pixels in a line of the image.
        new: Pixels in a line of the resized image.
        interpolation: ``"nearest"`` or ``"nearest-exact"``.
        pil: Whether the image is a PIL image.
    """
    is_exact = interpolation == InterpolationMode.NEAREST_EXACT.value
    theirs = _find_nearest_of_pil(old, new) if pil else find_nearest(old, new, interpolation)
    positions = (np.arange(new) + (0.5 if is_exact else 0.0)) * old / new
    margin = (0.25 if is_exact else 0.5) / new
    return min((margin, -margin), key=lambda x: (np.floor(positions + x).clip(0, old - 1) != theirs).sum())


def _find_nearest_of_pil(old: int, new: int) -> IntArray:
    line = PIL.Image.fromarray(np.arange(old, dtype=np.int32)[None])
    return np.asarray(line.resize((new, 1), PIL.Image.Resampling.NEAREST))[0].astype(np.int64)


def compute_resized_size(
    size: IntArray, target: Sequence[int] | Sequence[IntArray] | None, max_size: int | None
) -> IntArray:
    """Return sizes after torchvision's ``Resize``: ``_compute_resized_output_size`` for many images at once.

    Args:
        size: ``(N, 2)`` heights and widths.
        target: Length of the shorter side (one number, or one for each image), of both sides, or None if only
            ``max_size`` is given.
        max_size: Greatest length of the longer side.
    """
    if target is not None and len(target) == 2:
        return np.tile(np.array(target, np.int64), (len(size), 1))
    short: IntArray = size.min(axis=1)
    long: IntArray = size.max(axis=1)
    if target is None:
        assert max_size is not None
        new_short, new_long = max_size * short // long, np.full_like(long, max_size)
    else:
        new_short, new_long = np.full_like(short, target[0]), target[0] * long // short
        if max_size is not None:
            over = new_long > max_size
            new_short = np.where(over, max_size * new_short // np.maximum(new_long, 1), new_short)
            new_long = np.where(over, max_size, new_long)
    wide = size[:, 1] > size[:, 0]
    return np.stack((np.where(wide, new_short, new_long), np.where(wide, new_long, new_short)), axis=1)


class Resizing(Rule):
    """Base class of rules that resize the whole image to what ``sizes`` returns."""

    operators = "resize"
    moves = True
    unsupported_when = "not uint8 or float32; bicubic without antialias; lanczos, box, hamming"

    @abstractmethod
    def sizes(self, draws: Draws, size: IntArray) -> IntArray:
        """Return ``(N, 2)`` heights and widths of the output images."""

    def infer(self, spec: Spec) -> Spec:
        self.resampling = Resampling(self.transform, spec, None)
        self.operators = self.resampling.operators
        return replace(spec, size=None, unit=self.resampling.unit)

    @property
    def inputs(self) -> dict[str, Input]:
        return self.resampling.inputs

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return self.resampling.draw(size, self.sizes(draws, size), draws)

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return np.stack((params["height"], params["width"]), axis=1).astype(np.int64)

    def move(self, targets: Targets, params: Params) -> None:
        mode: Any = self.transform.interpolation
        is_exact = mode in (InterpolationMode.NEAREST_EXACT, InterpolationMode.NEAREST_EXACT.value)
        targets.resize(self.output_size(targets.size, params), "nearest-exact" if is_exact else "nearest")

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        return {"size": [int(sample["height"]), int(sample["width"])]}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return self.resampling.lower(ops, image, params)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return self.resampling.reference(image, sample)


class Resize(Resizing):
    """Rule of Resize: both sides are given, or the shorter or the longer one."""

    handles = (v2.Resize, v1.Resize)

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        size: Any = transform.size
        self.target: list[int] | None = [size] if isinstance(size, int) else size and list(size)
        self.max_size: int | None = transform.max_size

    def infer(self, spec: Spec) -> Spec:
        check_whole_pixels(self.target or ())
        both = (self.target[0], self.target[1]) if self.target and len(self.target) == 2 else None
        self.resampling = Resampling(self.transform, spec, both)
        self.operators = self.resampling.operators
        if both and self.max_size is not None:
            raise Unsupported("max_size goes with one side only")
        if self.target and self.max_size is not None and self.max_size <= self.target[0]:
            raise Unsupported("max_size is not greater than size")
        spec = replace(spec, unit=self.resampling.unit)
        if both:
            return replace(spec, size=both)
        if spec.size is None:
            return spec
        height, width = compute_resized_size(np.array([spec.size]), self.target, self.max_size)[0].tolist()
        return replace(spec, size=(height, width))

    def sizes(self, draws: Draws, size: IntArray) -> IntArray:
        return compute_resized_size(size, self.target, self.max_size)
