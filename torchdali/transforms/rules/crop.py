"""Rules of crops and of borders. Both are windows on an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2
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
from torchdali.transforms.rules._border import Border
from torchdali.transforms.rules.conversion import TYPES, resolve_mask_fill, select_for_kind
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets


class Window(Rule):
    """Rule of a rectangle ``start`` (top, left), ``shape`` (height, width). It is filled outside of the image."""

    operators = "slice"
    moves = True
    stays_inside = False
    """Whether the window never leaves the image. Then a decoder may decode the window only."""
    fill: Sequence[float] = (0.0,)
    feeds: ClassVar = {"start": Input(np.int32, 1), "shape": Input(np.int32, 1)}

    @property
    def repeats_border(self) -> bool:
        """Whether the window is on an image with a border that repeats its pixels."""
        return False

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        """Return ``(N, 2)`` starts and ``(N, 2)`` shapes for images of ``size``, unless ``draw`` has another way."""
        raise NotImplementedError

    def draw(self, draws: Draws, size: IntArray) -> Params:
        start, shape = self.window(draws, size)
        if (row := find_faulty_row(shape < 1)) is not None:
            raise SampleTransformError(row, f"nothing of an image of {tuple(size[row].tolist())} would be left")
        return {"start": start.astype(np.int32), "shape": shape.astype(np.int32)}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return params["shape"].astype(np.int64)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        window = ops.fn.slice(
            image,
            start=params["start"],
            shape=params["shape"],
            axes=[0, 1],
            out_of_bounds_policy="error" if self.stays_inside else "pad",
            fill_values=list(self.fill),
        )
        return self.lower_window(ops, window, params)

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        # Outside of the previous window there is a border. A fused window would show the image there.
        if isinstance(previous, Window) and previous.operators == "slice" and self.stays_inside:
            return NestedWindow(previous, self)
        return None

    def lower_window(self, ops: Ops, window: Node, params: Nodes) -> Node:
        """Emit the operators that follow the window."""
        return window

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        (top, left), (height, width) = sample["start"].tolist(), sample["shape"].tolist()
        fill = [float(x) for x in self.fill]
        padding = [max(-left, 0), max(-top, 0)]
        padding += [max(left + width - image.shape[-1], 0), max(top + height - image.shape[-2], 0)]
        padded = F.pad(image, padding, fill=fill[0] if len(fill) == 1 else fill)
        return F.crop(padded, top + padding[1], left + padding[0], height, width)


class NestedWindow(Window):
    """Rule of a window on a window, as one window on the image.

    Args:
        outer: First window. It has no operators after the window.
        inner: Second window, inside the first.
    """

    def __init__(self, outer: Window, inner: Window) -> None:
        super().__init__(inner.transform)
        self.outer, self.inner = outer, inner
        self.operators, self.stays_inside, self.fill = inner.operators, outer.stays_inside, outer.fill

    def infer(self, spec: Spec) -> Spec:
        return self.inner.infer(self.outer.infer(spec))

    @property
    def inputs(self) -> dict[str, Input]:
        return self.inner.inputs

    def draw(self, draws: Draws, size: IntArray) -> Params:
        outer = self.outer.draw(draws.select_position(self.outer.position), size)
        inner = self.inner.draw(draws.select_position(self.inner.position), self.outer.output_size(size, outer))
        params = {f"outer_{name}": value for name, value in outer.items()}
        return {**params, **inner, "start": outer["start"] + inner["start"], "inner_start": inner["start"]}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return self.inner.output_size(params["outer_shape"].astype(np.int64), params)

    def lower_window(self, ops: Ops, window: Node, params: Nodes) -> Node:
        return self.inner.lower_window(ops, window, params)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        outer = {name.removeprefix("outer_"): x for name, x in sample.items() if name.startswith("outer_")}
        return self.inner.reference(self.outer.reference(image, outer), {**sample, "start": sample["inner_start"]})


def check_size(size: tuple[int, int]) -> None:
    """Raise Unsupported if a crop is empty. DALI has no empty images."""
    if min(size) < 1:
        raise Unsupported(f"a crop of {size}")


class CenterCrop(Window):
    """Rule of CenterCrop: the middle of the image. An image that is too small gets a black border first."""

    handles = (v2.CenterCrop, v1.CenterCrop)

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        size: Any = transform.size
        sides = [size, size] if isinstance(size, int) else list(size)
        self.size = (int(sides[0]), int(sides[-1]))

    def infer(self, spec: Spec) -> Spec:
        check_whole_pixels(self.transform.size)
        check_size(self.size)
        self.stays_inside = spec.size is not None and all(a >= b for a, b in zip(spec.size, self.size, strict=True))
        return replace(spec, size=self.size)

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        shape = np.broadcast_to(np.array(self.size, np.int64), size.shape)
        spare = size - shape
        # torchvision rounds half a pixel to even when it crops, and down when it pads.
        start = np.where(spare >= 0, np.rint(spare / 2).astype(np.int64), -(-spare // 2))
        return start, shape

    def move(self, targets: Targets, params: Params) -> None:
        targets.crop_center(params["start"].astype(np.int64), params["shape"].astype(np.int64))

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.center_crop(image, list(self.size))


def resolve_fill(transform: Any, spec: Spec) -> list[float]:
    """Return the fill values of a transform for images of this kind, one or one a channel.

    Raises:
        Unsupported: There is no fill for this kind, or it does not fit.
    """
    fill: Any = select_for_kind(transform.fill, spec, "fill names")
    if isinstance(fill, str):
        raise Unsupported(f"a fill of {fill!r}")
    values = [0] if fill is None else [fill] if isinstance(fill, (int, float)) else list(fill)
    if len(values) not in (1, spec.channels):
        raise Unsupported(f"{len(values)} fill values for {spec.channels} channels")
    if spec.dtype == torch.uint8 and not all(0 <= int(x) <= 255 for x in values):
        raise Unsupported(f"a fill of {fill} for uint8")
    # torch casts the fill to the image's dtype. For integers it rounds towards zero.
    return [float(x) if spec.dtype.is_floating_point else float(int(x)) for x in values]


def check_fill_length(transform: Any, spec: Spec) -> None:
    """Raise Unsupported if torchvision refuses to pad tensors with more than one fill value."""
    fill: Any = transform.fill
    if isinstance(fill, dict):
        by_type = cast("dict[Any, Any]", fill)
        fill = by_type.get(TYPES[spec.kind], by_type.get("others"))
    if spec.kind == "pil" or not isinstance(fill, (tuple, list)):
        return
    if isinstance(transform, (v1.Pad, v1.RandomCrop)):
        raise Unsupported(f"v1's {type(transform).__name__} fills tensors with one number")
    if transform.padding_mode != "constant" and len(cast("Sequence[float]", fill)) > 1:
        raise Unsupported(f"torchvision has one fill value for padding_mode={transform.padding_mode!r}")


class Pad(Window):
    """Rule of Pad: a border of fixed width."""

    handles = (v2.Pad, v1.Pad)
    unsupported_when = "negative padding with a mode other than constant; a fill that fits neither type nor channels"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.border = Border.parse(transform.padding, transform.padding_mode)
        self.operators = "slice" if self.border.mode == "constant" else "slice, flip, cat"

    def infer(self, spec: Spec) -> Spec:
        check_fill_length(self.transform, spec)
        if self.border.mode == "constant":
            self.fill = resolve_fill(self.transform, spec)
            spec = spec.with_fill(self.fill)
        elif min(*self.border.before, *self.border.after) < 0:
            raise Unsupported("negative padding goes with padding_mode='constant' only")
        self.border.infer(spec)
        if spec.size is None:
            return spec
        height, width = (np.array(spec.size) + self.border.before + self.border.after).tolist()
        return replace(spec, size=(height, width))

    @property
    def repeats_border(self) -> bool:
        return self.border.mode != "constant"

    @property
    def inputs(self) -> dict[str, Input]:
        return super().inputs if self.border.mode == "constant" else self.border.inputs

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        start = np.broadcast_to(-self.border.before, size.shape)
        return start, size + self.border.before + self.border.after

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return super().draw(draws, size) if self.border.mode == "constant" else self.border.draw(size)

    def move(self, targets: Targets, params: Params) -> None:
        before, after = (np.broadcast_to(x, targets.size.shape) for x in (self.border.before, self.border.after))
        targets.pad(before, after, resolve_mask_fill(self.transform, targets), self.border.mode)

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return size + self.border.before + self.border.after

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        if self.border.mode == "constant":
            return super().lower(ops, image, params)
        return self.border.lower(ops, image, params)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        if self.border.mode == "constant":
            return super().reference(image, sample)
        return self.border.reference(image)


class RandomCrop(Window):
    """Rule of RandomCrop: a window of fixed size at a random position in the padded image."""

    handles = (v2.RandomCrop, v1.RandomCrop)
    unsupported_when = "pad_if_needed with a mode other than constant; a fill that fits neither type nor channels"
    randomness = "top, left"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.size = (int(transform.size[0]), int(transform.size[1]))
        padding: Any = transform.padding
        if isinstance(transform, v2.RandomCrop) and padding is not None:
            # v2 stores the parsed padding, in the order left, right, top, bottom.
            padding = [padding[i] for i in (0, 2, 1, 3)]
        self.border = Border.parse(padding, transform.padding_mode)
        if self.repeats_border:
            self.operators = "slice, flip, cat"

    def infer(self, spec: Spec) -> Spec:
        check_whole_pixels(self.transform.size)
        check_fill_length(self.transform, spec)
        if self.border.mode == "constant":
            self.fill = resolve_fill(self.transform, spec)
            spec = spec.with_fill(self.fill)
        elif self.transform.pad_if_needed:
            raise Unsupported(f"pad_if_needed with padding_mode={self.border.mode!r}")
        self.border.infer(spec)
        check_size(self.size)
        padding: Any = self.transform.padding
        if isinstance(padding, (tuple, list)) and len(cast("Sequence[int]", padding)) not in (1, 2, 4):
            raise Unsupported(f"torchvision refuses padding={padding}")
        self.stays_inside = not self.transform.pad_if_needed and not self.border.exists
        return replace(spec, size=self.size)

    @property
    def repeats_border(self) -> bool:
        return self.border.exists and self.border.mode != "constant"

    @property
    def inputs(self) -> dict[str, Input]:
        return {**super().inputs, **self.border.inputs}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return {**self.border.draw(size), **super().draw(draws, size)}

    def window(self, draws: Draws, size: IntArray) -> tuple[IntArray, IntArray]:
        shape = np.broadcast_to(np.array(self.size, np.int64), size.shape)
        before = np.broadcast_to(self.border.before, size.shape)
        padded = size + self.border.before + self.border.after
        missing = np.maximum(shape - padded, 0)
        if self.transform.pad_if_needed:
            before, padded = before + missing, padded + 2 * missing
        elif (row := find_faulty_row(missing)) is not None:
            raise SampleTransformError(
                row,
                f"the crop of {self.size} is larger than the {'padded ' if self.border.exists else ''}image "
                f"of {tuple(padded[row].tolist())}; set pad_if_needed=True or resize first",
            )
        start = np.floor(draws.uniform(2) * (padded - shape + 1)).astype(np.int64)
        return (start if self.repeats_border else start - before), shape

    def _find_borders(self, size: IntArray) -> tuple[IntArray, IntArray]:
        """Return ``(N, 2)`` widths of the borders before and after images of ``size``."""
        before, after = self.border.before, self.border.after
        missing = np.maximum(np.array(self.size) - (size + before + after), 0) * bool(self.transform.pad_if_needed)
        return before + missing, after + missing

    def move(self, targets: Targets, params: Params) -> None:
        before, after = self._find_borders(targets.size)
        start = params["start"] + (0 if self.repeats_border else before)
        fill, mode = resolve_mask_fill(self.transform, targets), self.transform.padding_mode
        targets.pad_and_crop(before, after, start, params["shape"].astype(np.int64), fill, mode)

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        before, after = self._find_borders(np.array([size]))
        padded = np.array(size) + before[0] + after[0]
        top, left = (sample["start"] + (0 if self.repeats_border else before[0])).tolist()
        (above, before_left), (below, right) = before[0].tolist(), after[0].tolist()
        return {
            "needs_crop": bool((padded != self.size).any()),
            **dict(zip(("top", "left", "height", "width"), (top, left, *self.size), strict=True)),
            "needs_pad": bool(before.any() or after.any()),
            "padding": [before_left, above, right, below],
        }

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return super().lower(ops, self.border.lower(ops, image, params) if self.repeats_border else image, params)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return super().reference(self.border.reference(image) if self.repeats_border else image, sample)
