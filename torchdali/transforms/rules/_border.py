"""Borders of ``Pad`` and ``RandomCrop``."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rule import Input, Node, Nodes, Ops, SampleTransformError, find_faulty_row
from torchdali.transforms.spec import IntArray, Params, Spec

__all__ = ["Border"]

_REFLECTIONS = ("reflect", "symmetric")


class Border:
    """Padding of ``Pad`` and ``RandomCrop``.

    torchvision pads PIL images with numpy, which reflects an image as often as a border is wide. Its kernel for tensors
    refuses a border wider than the image.

    Args:
        left: Width on the left, in pixels.
        top: Height at the top, in pixels.
        right: Width on the right, in pixels.
        bottom: Height at the bottom, in pixels.
        mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``.

    Attributes:
        may_be_wide: Whether there may be images to reflect more than once.
    """

    may_be_wide = False

    def __init__(self, left: int, top: int, right: int, bottom: int, mode: str) -> None:
        self.before = np.array([top, left], np.int64)
        self.after = np.array([bottom, right], np.int64)
        self.mode = mode

    @classmethod
    def parse(cls, padding: Any, mode: str) -> Border:
        """Parse torchvision's ``padding``: one number, (horizontal, vertical), or (left, top, right, bottom)."""
        sides = [padding] if isinstance(padding, int) else list(padding or [0])
        left, top, right, bottom = (sides * 4)[:4] if len(sides) < 4 else sides
        return cls(left, top, right, bottom, mode)

    @property
    def exists(self) -> bool:
        """Whether any side has a border."""
        return bool(self._axes)

    @property
    def _axes(self) -> list[int]:
        """The axes with a border: 0 above and below, 1 on the left and right."""
        return [axis for axis in (0, 1) if self.before[axis] or self.after[axis]]

    @property
    def _narrowest(self) -> IntArray:
        """Smallest height and width of an image that is reflected at most once."""
        return np.maximum(self.before, self.after) + (self.mode == "reflect")

    def infer(self, spec: Spec) -> None:
        """Find out whether images may be reflected more than once."""
        is_large = spec.size is not None and bool((np.array(spec.size) >= self._narrowest).all())
        self.may_be_wide = spec.kind == "pil" and self.mode in _REFLECTIONS and self.exists and not is_large

    @property
    def inputs(self) -> dict[str, Input]:
        """Parameters that DALI is fed, by name."""
        if not self.may_be_wide:
            return {}
        masks = {f"{name}{axis}": Input(np.bool_) for axis in self._axes for name in ("wide", "narrow")}
        return masks | {
            f"{name}{axis}": Input(np.int32, 1) for axis in self._axes for name in ("mirrored", "offset", "padded")
        }

    def draw(self, size: IntArray) -> Params:
        """Return the parameters for images of ``size``.

        Raises:
            SampleTransformError: A border is wider than a tensor.
        """
        if self.mode not in _REFLECTIONS:
            return {}
        wide = size < self._narrowest
        if not self.may_be_wide:
            if (row := find_faulty_row(wide)) is not None:
                raise SampleTransformError(
                    row,
                    f"padding_mode={self.mode!r} needs a border narrower than the image of {tuple(size[row].tolist())}",
                )
            return {}
        # A reflected image repeats after twice these rows. The one row of the smallest image is all that is repeated.
        mirrored = np.maximum(size - (self.mode == "reflect"), 1)
        params: Params = {}
        for axis in self._axes:
            params[f"wide{axis}"], params[f"narrow{axis}"] = wide[:, axis], ~wide[:, axis]
            params[f"mirrored{axis}"] = mirrored[:, axis, None]
            params[f"offset{axis}"] = -self.before[axis] % (2 * mirrored[:, axis, None])
            params[f"padded{axis}"] = (size + self.before + self.after)[:, axis, None]
        return params

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        """Emit a border that repeats the image: first above and below, then on both sides."""
        for axis in self._axes:
            if self.may_be_wide:
                image = ops.apply_where(params[f"wide{axis}"], partial(self._lower_wide, ops, axis), image, params)
                image = ops.apply_where(params[f"narrow{axis}"], partial(self._lower_narrow, ops, axis), image, params)
            else:
                image = self._lower_narrow(ops, axis, image, params)
        return image

    def _lower_narrow(self, ops: Ops, axis: int, image: Node, params: Nodes) -> Node:
        before, after = int(self.before[axis]), int(self.after[axis])
        strips = [self._strip(ops, image, axis, before, False)] if before else []
        strips.append(image)
        if after:
            strips.append(self._strip(ops, image, axis, after, True))
        return ops.fn.cat(*strips, axis=axis) if len(strips) > 1 else image

    def _lower_wide(self, ops: Ops, axis: int, image: Node, params: Nodes) -> Node:
        """Emit the image and its reflection, one after another as often as need be, and a window of that."""
        mirrored, zero = params[f"mirrored{axis}"], [0]
        flipped = ops.fn.flip(image, horizontal=axis, vertical=1 - axis)
        both = [ops.fn.slice(part, start=zero, shape=mirrored, axes=[axis]) for part in (image, flipped)]
        tiles = ops.fn.cat(*both, axis=axis)
        # The window begins in the first tile of two images, which are narrower than a border.
        narrowest, border = int(self._narrowest[axis]), int(self.before[axis] + self.after[axis])
        most, length = 3 * narrowest + border, 2
        while length < most:
            tiles, length = ops.fn.cat(tiles, tiles, axis=axis), 2 * length
            tiles = ops.fn.slice(tiles, start=zero, shape=[most], axes=[axis], out_of_bounds_policy="trim_to_shape")
        return ops.fn.slice(tiles, start=params[f"offset{axis}"], shape=params[f"padded{axis}"], axes=[axis])

    def _strip(self, ops: Ops, image: Node, axis: int, width: int, at_end: bool) -> Node:
        def rows(count: int, offset: int) -> Node:
            source = ops.fn.flip(image, horizontal=axis, vertical=1 - axis) if at_end else image
            strip = ops.fn.slice(source, start=[offset], shape=[count], axes=[axis])
            return ops.fn.flip(strip, horizontal=axis, vertical=1 - axis) if at_end else strip

        if self.mode == "edge":
            return ops.fn.cat(*[rows(1, 0)] * width, axis=axis)
        strip = rows(width, 1 if self.mode == "reflect" else 0)
        return ops.fn.flip(strip, horizontal=axis, vertical=1 - axis)

    def reference(self, image: torch.Tensor) -> torch.Tensor:
        """Pad as torchvision does: with numpy if the image was a PIL image, else with the tensor kernel."""
        top, left, bottom, right = (int(x) for x in (*self.before, *self.after))
        if self.may_be_wide:
            mode: Any = self.mode
            return torch.from_numpy(np.pad(image.numpy(), ((0, 0), (top, bottom), (left, right)), mode))
        return F.pad(image, [left, top, right, bottom], padding_mode=self.mode)
