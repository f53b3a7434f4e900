"""Bounding boxes of a batch. They move as torchvision's kernels move them, all samples at once.

Arithmetic is in the dtype of the boxes, as in torchvision. Integers are clamped and scaled in float32, then cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F
from torchvision.tv_tensors import BoundingBoxFormat

from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets.ragged import Canvas, Flags, Ragged, Values, canvas, to_array

# torchvision 0.26 converts XYWH and CXCYWH by way of XYXY, later versions directly:
# https://github.com/pytorch/vision/pull/9326. Remove this when torchvision 0.27 is required.
_CONVERTS_DIRECTLY = hasattr(cast("Any", F)._meta, "_xywh_to_cxcywh")  # noqa: SLF001
XYXY, XYWH, CXCYWH = BoundingBoxFormat.XYXY, BoundingBoxFormat.XYWH, BoundingBoxFormat.CXCYWH


def _to_float(values: Values) -> Values:
    return values if values.dtype.kind == "f" else values.astype(np.float32)


def _halve(values: Values) -> Values:
    return values / values.dtype.type(2) if values.dtype.kind == "f" else values // 2


def _to_xyxy(boxes: Values, old: BoundingBoxFormat) -> Values:
    if old == XYWH:
        return np.concatenate((boxes[:, :2], boxes[:, 2:] + boxes[:, :2]), axis=1)
    if old == CXCYWH:
        values = _to_float(boxes)
        corner = values[:, :2] - values[:, 2:] / values.dtype.type(2)
        return np.concatenate((corner, values[:, 2:] + corner), axis=1).astype(boxes.dtype)
    return boxes


def _from_xyxy(boxes: Values, new: BoundingBoxFormat) -> Values:
    sides = boxes[:, 2:] - boxes[:, :2]
    if new == XYWH:
        return np.concatenate((boxes[:, :2], sides), axis=1)
    if new == CXCYWH:
        return np.concatenate((_halve(boxes[:, :2] * boxes.dtype.type(2) + sides), sides), axis=1)
    return boxes


def convert(boxes: Values, old: BoundingBoxFormat, new: BoundingBoxFormat) -> Values:
    """Return boxes without rotation in another format."""
    if old == new:
        return boxes
    if _CONVERTS_DIRECTLY and (old, new) == (XYWH, CXCYWH):
        return np.concatenate((boxes[:, :2] + _halve(boxes[:, 2:]), boxes[:, 2:]), axis=1)
    if _CONVERTS_DIRECTLY and (old, new) == (CXCYWH, XYWH) and boxes.dtype.kind == "f":
        return np.concatenate((boxes[:, :2] - boxes[:, 2:] / boxes.dtype.type(2), boxes[:, 2:]), axis=1)
    return _from_xyxy(_to_xyxy(boxes, old), new)


class Boxes(Ragged):
    """Bounding boxes of a batch that have one format, one dtype and one clamping mode.

    All methods change the boxes. Their arguments have one row for each sample of the batch. Pairs are (y, x).

    Args:
        values: ``(M, 4)`` boxes; ``(M, 5)`` or ``(M, 8)`` in a rotated format.
        counts: ``(L,)`` numbers of boxes of the leaves.
        owners: ``(L,)`` sample of each leaf, ascending.
        box_format: Format of all boxes.
        clamping_mode: ``"soft"``, ``"hard"``, or None for boxes that may leave the image.
    """

    tensor_type = tv_tensors.BoundingBoxes

    def __init__(
        self,
        values: Values,
        counts: IntArray,
        owners: IntArray,
        box_format: BoundingBoxFormat = XYXY,
        clamping_mode: str | None = "soft",
    ) -> None:
        super().__init__(values, counts, owners)
        self.format, self.clamping_mode = box_format, clamping_mode

    @classmethod
    def collect(cls, leaves: Sequence[tv_tensors.BoundingBoxes], owners: IntArray) -> Boxes:
        """Return the boxes of leaves that have one format, dtype and clamping mode."""
        values, counts = to_array(leaves)
        return cls(values, counts, owners, leaves[0].format, leaves[0].clamping_mode)

    @property
    def is_rotated(self) -> bool:
        """Whether the boxes are rotated. Then torchvision's kernels move them."""
        return tv_tensors.is_rotated_bounding_format(self.format)

    def wrap(self, tensor: torch.Tensor, size: Canvas) -> tv_tensors.BoundingBoxes:
        """Return boxes as torchvision's type. ``size`` is (height, width) of their image."""
        # The constructor takes several times as long, and this runs for every sample.
        return tv_tensors.BoundingBoxes._wrap(  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            tensor, format=self.format, canvas_size=size, clamping_mode=self.clamping_mode
        )

    def flip(self, size: IntArray, axis: int, on: Flags | None) -> None:
        """Mirror boxes in images of ``size``: along x if ``axis`` is 0, along y if it is 1."""
        if self.is_rotated:
            mirror = (F.horizontal_flip_bounding_boxes, F.vertical_flip_bounding_boxes)[axis]
            self.apply_each(on, lambda boxes, i: mirror(boxes, self.format, canvas(size, i)))
            return
        boxes = self.values
        side = size[self.row, 1 - axis].astype(boxes.dtype)
        flipped = np.array(boxes)
        if self.format == XYXY:
            flipped[:, axis], flipped[:, axis + 2] = -(boxes[:, axis + 2] - side), -(boxes[:, axis] - side)
        else:
            far = boxes[:, axis] + boxes[:, axis + 2] if self.format == XYWH else boxes[:, axis]
            flipped[:, axis] = -(far - side)
        self.replace_on(flipped, on)

    def shift(self, offset: IntArray, on: Flags | None) -> None:
        """Move boxes by ``offset`` pixels."""
        pair = offset[:, ::-1]
        if self.format == XYXY:
            pattern = np.tile(pair, 2)
        elif self.format == BoundingBoxFormat.XYXYXYXY:
            pattern = np.tile(pair, 4)
        else:
            pattern = np.concatenate((pair, np.zeros((len(pair), self.values.shape[1] - 2), np.int64)), axis=1)
        self.replace_on(self.values + pattern[self.row].astype(self.values.dtype), on)

    def crop(self, start: IntArray, shape: IntArray, on: Flags | None) -> None:
        """Move boxes into windows of ``shape`` at ``start``, and clamp them."""
        self.shift(-start, on)
        if not self.is_rotated:
            self.clamp(shape, on)
            return
        mode: Any = self.clamping_mode
        self.apply_each(
            on,
            lambda boxes, i: F.crop_bounding_boxes(boxes, self.format, 0, 0, *canvas(shape, i), clamping_mode=mode)[0],
        )

    def pad(self, before: IntArray, shape: IntArray, on: Flags | None) -> None:
        """Move boxes behind a border, and clamp them.

        Args:
            before: ``(N, 2)`` heights above and widths on the left of the images.
            shape: ``(N, 2)`` heights and widths of the images with their borders.
            on: ``(N,)`` samples to move, or None for all.
        """
        self.shift(before, on)
        self.clamp(shape, on)

    def clamp(self, size: IntArray, on: Flags | None, mode: str | None = "auto") -> None:
        """Clamp boxes to images of ``size``.

        Args:
            size: ``(N, 2)`` heights and widths.
            on: ``(N,)`` samples to clamp, or None for all.
            mode: Clamping mode, or ``"auto"`` for that of the boxes.
        """
        mode = self.clamping_mode if mode == "auto" else mode
        if mode is None:
            return
        if self.is_rotated:
            self.apply_each(
                on,
                lambda boxes, i: F.clamp_bounding_boxes(
                    boxes, format=self.format, canvas_size=canvas(size, i), clamping_mode=mode
                ),
            )
            return
        boxes = np.array(_to_xyxy(_to_float(self.values), self.format))
        limit = size[self.row].astype(boxes.dtype)
        np.clip(boxes[:, 0::2], 0, limit[:, 1:], out=boxes[:, 0::2])
        np.clip(boxes[:, 1::2], 0, limit[:, :1], out=boxes[:, 1::2])
        self.replace_on(_from_xyxy(boxes, self.format).astype(self.values.dtype), on)

    def resize(self, old: IntArray, new: IntArray, on: Flags | None) -> None:
        """Move boxes from images of the size ``old`` to images of the size ``new``."""
        changed = (old != new).any(axis=1)
        on = changed if on is None else on & changed
        if self.is_rotated:
            mode: Any = self.clamping_mode
            self.apply_each(
                on,
                lambda boxes, i: F.resize_bounding_boxes(
                    boxes, canvas(old, i), new[i].tolist(), None, self.format, mode
                )[0],
            )
            return
        ratios = np.tile((new / old)[:, ::-1].astype(np.float32), 2)[self.row]
        self.replace_on((_to_float(self.values) * ratios).astype(self.values.dtype), on)

    def convert(self, new: BoundingBoxFormat) -> None:
        """Convert boxes to another format.

        Raises:
            ValueError: One of the two formats is rotated.
        """
        if self.is_rotated or tv_tensors.is_rotated_bounding_format(new):
            tensor = torch.from_numpy(self.values)
            self.values = F.convert_bounding_box_format(tensor, self.format, new).numpy()
        else:
            self.values = convert(self.values, self.format, new)
        self.format = new

    def to_xyxy(self) -> Values:
        """Return ``(M, 4)`` boxes as corners.

        Raises:
            ValueError: The boxes are rotated.
        """
        if self.is_rotated:
            raise ValueError("Cannot convert between rotated and unrotated bounding boxes.")
        return _to_xyxy(self.values, self.format)

    def set_zero(self, rows: Flags) -> None:
        """Set some boxes, ``(M,)``, to zero."""
        self.values = np.where(rows[:, None], self.values.dtype.type(0), self.values)

    def find_valid(self, size: IntArray, min_size: float, min_area: float) -> Flags:
        """Return ``(M,)`` which boxes are large enough and inside of images of ``size``."""
        if self.is_rotated:
            flags = self.copy()

            def check(boxes: torch.Tensor, i: int) -> torch.Tensor:
                valid = F.sanitize_bounding_boxes(boxes, self.format, canvas(size, i), min_size, min_area)[1]
                return valid[:, None].to(boxes.dtype).expand_as(boxes)

            flags.apply_each(None, check)
            return flags.values[:, 0] != 0
        boxes = _to_xyxy(self.values, self.format)
        sides, limit = boxes[:, 2:] - boxes[:, :2], np.tile(size[self.row, ::-1], 2)
        inside = ((boxes >= 0) & (boxes <= limit)).all(axis=1)
        return inside & (sides >= min_size).all(axis=1) & (sides[:, 0] * sides[:, 1] >= min_area)

    def _check_kind(self, part: Ragged) -> None:
        super()._check_kind(part)
        other = (part.format, part.clamping_mode) if isinstance(part, Boxes) else None
        if other != (self.format, self.clamping_mode):
            raise ValueError(
                "all samples must have boxes of one format and clamping mode; "
                "apply ConvertBoundingBoxFormat and SetClampingMode to all of them"
            )
