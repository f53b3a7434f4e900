"""What belongs to the images of a batch and moves with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.spec import IntArray, SampleTransformError
from torchdali.transforms.targets.boxes import Boxes
from torchdali.transforms.targets.leaves import Leaves
from torchdali.transforms.targets.maps import AffineMaps, corner_points
from torchdali.transforms.targets.ragged import Flags, Ragged, Values, canvas


class Targets(Leaves):
    """Boxes, key points and masks of a batch, and their moves.

    A rule moves them by the parameters that it drew for the images. Arguments have one row for each sample. Pairs are
    (y, x), such as (top, left) and (height, width), in pixels. ``on`` is ``(N,)`` flags: which samples a move concerns,
    or None for all. The arguments and attributes are those of :class:`Leaves`.
    """

    def select_rows(self, rows: IntArray) -> Targets:
        """Return the targets of some samples, ``rows`` in ascending order. Their moves do not move these."""
        groups = [group.select_rows(rows, len(self.size)) for group in self.groups]
        part = Targets(self.size[rows], groups, self.pixels and self.pixels.select_rows(rows))
        part.is_pure, part.mask_dtype = self.is_pure, self.mask_dtype
        return part

    def put_rows(self, rows: IntArray, part: Targets) -> None:
        """Take back targets that :meth:`select_rows` returned.

        Raises:
            ValueError: Their dtype, their format or their clamping mode is another one now.
        """
        if (part.is_pure, part.mask_dtype) != (self.is_pure, self.mask_dtype):
            raise ValueError(
                "all samples must get masks of one dtype, and plain tensors or none; apply ToDtype and ToPureTensor to "
                "all of them"
            )
        for group, moved in zip(self.groups, part.groups, strict=True):
            group.put_rows(rows, moved, len(self.size))
        if self.pixels and part.pixels:
            self.pixels.put_rows(rows, part.pixels)
        self.is_sanitized |= part.is_sanitized
        self.size = self.size.copy()
        self.size[rows] = part.size

    def apply_each(
        self,
        move_boxes: Callable[[torch.Tensor, Any, int], torch.Tensor],
        move_points: Callable[[torch.Tensor, int], torch.Tensor],
        on: Flags | None = None,
    ) -> None:
        """Move boxes and key points by torchvision's kernels, in one call for each sample.

        Args:
            move_boxes: Function of the boxes of a sample, of what has their format, and of the sample's number.
            move_points: Function of the key points of a sample and of its number.
            on: ``(N,)`` samples to move, or None for all.
        """
        for boxes in self.boxes:
            boxes.apply_each(on, lambda values, i, of=boxes: move_boxes(values, of, i))
        for points in self.points:
            points.apply_each(on, move_points)

    def flip(self, axis: int, on: Flags | None = None) -> None:
        """Mirror along x if ``axis`` is 0, along y if it is 1."""
        for group in self.groups:
            group.flip(self.size, axis, on)
        if self.pixels:
            self.pixels.flip(axis, on)

    def crop(self, start: IntArray, shape: IntArray, on: Flags | None = None) -> None:
        """Take windows of ``shape`` at ``start``. Boxes are clamped to them."""
        for group in self.groups:
            group.crop(start, shape, on)
        if self.pixels:
            self.pixels.cut(start, shape, 0, on)
        self._set_size(shape, on)

    def crop_center(self, start: IntArray, shape: IntArray) -> None:
        """Take the middle, windows of ``shape`` at ``start``. Where an image is padded, boxes may be a pixel beside it.

        torchvision rounds half a pixel down when it pads the image, but to even when it moves the boxes.
        """
        middle = np.rint((self.size - shape) / 2).astype(np.int64)
        for group in self.groups:
            group.crop(middle, shape, None)
        if self.pixels:
            self.pixels.cut(start, shape)
        self._set_size(shape, None)

    def pad(
        self, before: IntArray, after: IntArray, fill: float = 0, mode: str = "constant", on: Flags | None = None
    ) -> None:
        """Add borders.

        Args:
            before: ``(N, 2)`` heights above and widths on the left.
            after: ``(N, 2)`` heights below and widths on the right.
            fill: Value of the borders of masks.
            mode: Padding mode.
            on: ``(N,)`` samples that get a border, or None for all.

        Raises:
            SampleTransformError: There are boxes or points, and the mode is not ``"constant"``.
        """
        for group in self.groups:
            if mode != "constant" and len(group.owners):
                what = "bounding boxes" if isinstance(group, Boxes) else "KeyPoints"
                raise SampleTransformError(
                    int(group.owners[0]),
                    f"Padding mode '{mode}' is not supported with {what}; use padding_mode='constant'",
                )
        shape = self.size + before + after
        for group in self.groups:
            group.pad(before, shape, on)
        if self.pixels and mode == "constant":
            self.pixels.cut(-before, shape, fill, on)
        elif self.pixels:
            self.pixels.repeat_border(before, after, mode, on)
        self._set_size(shape, on)

    def pad_and_crop(
        self,
        before: IntArray,
        after: IntArray,
        start: IntArray,
        shape: IntArray,
        fill: float = 0,
        mode: str = "constant",
    ) -> None:
        """Add borders, then take windows, as torchvision's ``RandomCrop``. It skips a step that changes nothing.

        Args:
            before: ``(N, 2)`` heights above and widths on the left.
            after: ``(N, 2)`` heights below and widths on the right.
            start: ``(N, 2)`` top left pixels of the windows, in the images with their borders.
            shape: ``(N, 2)`` shapes of the windows.
            fill: Value of the borders of masks.
            mode: Padding mode.
        """
        padded = ((before != 0) | (after != 0)).any(axis=1)
        if padded.any():
            self.pad(before, after, fill, mode, padded)
        self.crop(start, shape, (self.size != shape).any(axis=1))

    def resize(self, size: IntArray, interpolation: str = "nearest", on: Flags | None = None) -> None:
        """Resize images to ``size``.

        Args:
            size: ``(N, 2)`` new heights and widths.
            interpolation: ``"nearest"`` or ``"nearest-exact"``, for masks.
            on: ``(N,)`` samples to resize, or None for all.
        """
        for group in self.groups:
            group.resize(self.size, size, on)
        if self.pixels:
            self.pixels.resize(size, interpolation, on)
        self._set_size(size, on)

    def rotate(
        self,
        angle: Values,
        size: IntArray,
        expand: bool = False,
        center: list[float] | None = None,
        fill: float = 0,
    ) -> None:
        """Turn images by ``angle`` degrees, counterclockwise.

        Args:
            angle: ``(N,)`` degrees.
            size: ``(N, 2)`` heights and widths of the results. With ``expand``, torchvision may give boxes a canvas
                that is a pixel larger than the image (https://github.com/pytorch/vision/issues/8654). Here it is the
                image's size.
            expand: Whether the result is large enough for the whole image.
            center: (x, y) in pixels, or None for the middle.
            fill: Value of masks outside of the image.
        """
        old = self.size
        self.apply_each(
            lambda boxes, of, i: F.rotate_bounding_boxes(
                boxes, of.format, canvas(old, i), float(angle[i]), expand, center, of.clamping_mode
            )[0],
            lambda points, i: F.rotate_keypoints(points, canvas(old, i), float(angle[i]), expand, center)[0],
        )
        if self.pixels:
            self.pixels.warp(lambda mask, i: F.rotate_mask(mask, float(angle[i]), expand, center), fill)
        self._set_size(size, None)

    def affine(self, maps: AffineMaps, fill: float = 0) -> None:
        """Move images by affine maps. Masks are ``fill`` outside of the image."""
        size = self.size
        self.apply_each(
            lambda boxes, of, i: F.affine_bounding_boxes(
                boxes, of.format, canvas(size, i), *maps.row(i), of.clamping_mode
            ),
            lambda points, i: F.affine_keypoints(points, canvas(size, i), *maps.row(i))[0],
        )
        if self.pixels:
            self.pixels.warp(lambda mask, i: F.affine_mask(mask, *maps.row(i)[:4], center=maps.center), fill)

    def perspective(self, corners: IntArray, fill: float = 0, on: Flags | None = None) -> None:
        """Move the corner pixels of images to ``corners``, ``(N, 4, 2)`` (x, y), clockwise from the top left.

        Masks are ``fill`` outside of the image.
        """
        size = self.size
        self.apply_each(
            lambda boxes, of, i: F.perspective_bounding_boxes(
                boxes, of.format, canvas(size, i), *corner_points(size, corners, i), clamping_mode=of.clamping_mode
            ),
            lambda points, i: F.perspective_keypoints(points, canvas(size, i), *corner_points(size, corners, i)),
            on,
        )
        if self.pixels:
            self.pixels.warp(lambda mask, i: F.perspective_mask(mask, *corner_points(size, corners, i)), fill, on)

    def sanitize_boxes(self, min_size: float, min_area: float) -> None:
        """Drop boxes that are too small or leave their image.

        Raises:
            SampleTransformError: A sample has no boxes, or several tensors of them.
        """
        self.check_one_leaf(self.boxes, "bounding boxes")
        for boxes in self.boxes:
            boxes.drop(boxes.find_valid(self.size, min_size, min_area))
        self.is_sanitized = True

    def sanitize_points(self) -> None:
        """Drop key points, or groups of them, that leave their image.

        Raises:
            SampleTransformError: A sample has no key points, or several tensors of them.
        """
        self.check_one_leaf(self.points, "key points")
        for points in self.points:
            points.drop(points.find_valid(self.size))

    def check_one_leaf(self, groups: Sequence[Ragged], what: str) -> None:
        """Raise SampleTransformError unless each sample has one tensor among the groups."""
        count = np.zeros(len(self.size), np.int64)
        for group in groups:
            np.add.at(count, group.owners, 1)
        if (count != 1).any():
            row = int(np.argmax(count != 1))
            raise SampleTransformError(
                row, f"the sample must have one tensor of {what}, got {int(count[row])}; add an empty one or merge them"
            )

    def _set_size(self, size: IntArray, on: Flags | None) -> None:
        if on is None:
            self.size = size.astype(np.int64)
        else:
            self.size = self.size.copy()
            self.size[on] = size[on]
