"""Key points of a batch. They move as torchvision's kernels move them, all samples at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchvision import tv_tensors

from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets.ragged import Canvas, Flags, Ragged, Values, to_array


class Points(Ragged):
    """Key points of a batch that have one dtype, and one shape without the first axis.

    All methods change the points. Their arguments have one row for each sample of the batch. Pairs are (y, x).

    Args:
        values: ``(M, ..., 2)`` points, or groups of points, as (x, y).
        counts: ``(L,)`` numbers of rows of the leaves.
        owners: ``(L,)`` sample of each leaf, ascending.
    """

    tensor_type = tv_tensors.KeyPoints

    @classmethod
    def collect(cls, leaves: Sequence[tv_tensors.KeyPoints], owners: IntArray) -> Points:
        """Return the points of leaves that have one dtype, and one shape without the first axis."""
        return cls(*to_array(leaves), owners)

    def wrap(self, tensor: torch.Tensor, size: Canvas) -> tv_tensors.KeyPoints:
        """Return points as torchvision's type. ``size`` is (height, width) of their image."""
        return tv_tensors.KeyPoints._wrap(tensor, canvas_size=size)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def _expand(self, pairs: Values) -> Values:
        """Return (x, y) of each row's sample, in the shape of the values."""
        return pairs[self.row, ::-1].reshape(-1, *[1] * (self.values.ndim - 2), 2)

    def flip(self, size: IntArray, axis: int, on: Flags | None) -> None:
        """Mirror points in images of ``size``: along x if ``axis`` is 0, along y if it is 1. A point is a pixel."""
        flipped = np.array(self.values)
        last = (self._expand(size)[..., axis] - 1).astype(flipped.dtype)
        flipped[..., axis] = -(flipped[..., axis] - last)
        self.replace_on(flipped, on)

    def shift(self, offset: IntArray, on: Flags | None) -> None:
        """Move points by ``offset`` pixels."""
        self.replace_on(self.values + self._expand(offset).astype(self.values.dtype), on)

    def crop(self, start: IntArray, shape: IntArray, on: Flags | None) -> None:
        """Move points into windows of ``shape`` at ``start``. They are not clamped."""
        self.shift(-start, on)

    def pad(self, before: IntArray, shape: IntArray, on: Flags | None) -> None:
        """Move points behind a border of ``before`` pixels."""
        self.shift(before, on)

    def clamp(self, size: IntArray, on: Flags | None) -> None:
        """Clamp points to the pixels of images of ``size``."""
        values = self.values if self.values.dtype.kind == "f" else self.values.astype(np.float32)
        last = (self._expand(size) - 1).astype(values.dtype)
        self.replace_on(np.clip(values, 0, last).astype(self.values.dtype), on)

    def resize(self, old: IntArray, new: IntArray, on: Flags | None) -> None:
        """Move points from images of the size ``old`` to images of the size ``new``."""
        changed = (old != new).any(axis=1)
        values = self.values if self.values.dtype.kind == "f" else self.values.astype(np.float32)
        ratios = self._expand((new / old).astype(np.float32))
        self.replace_on((values * ratios).astype(self.values.dtype), changed if on is None else on & changed)

    def find_valid(self, size: IntArray) -> Flags:
        """Return ``(M,)`` which rows have all their points inside of images of ``size``."""
        inside = (self.values >= 0) & (self.values < self._expand(size))
        return np.asarray(inside.reshape(len(inside), -1).all(axis=1))
