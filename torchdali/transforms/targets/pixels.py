"""Masks of a batch: where each of their pixels comes from.

A mask is never moved step by step. The moves change an index, and all masks of a sample are taken by it once. Every
move of torchvision picks pixels from masks, so the result is equal to torchvision's.

An index counts the rows and columns of the mask as it was at the beginning. A negative number is a code for a fill
value: -1 for the first fill, -2 for the second, and so on. A later border lies over an earlier one, so the least code
of a pixel's row and column is that pixel's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from inspect import signature
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets.ragged import Flags, Values

Index = npt.NDArray[np.int64]
_EXACT_IN_FLOAT32 = 2**24
_MOST_TOGETHER = 2**23
"""Pixels of masks that are gathered together at most. The index of a pixel takes eight bytes."""
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Types that CUDA does not index and ``masked_fill_`` does not fill, and for each another with its values."""

_HAS_EXACT_MASKS = "interpolation" in signature(F.resize_mask).parameters
"""Whether the installed torchvision resizes masks by ``NEAREST_EXACT`` if a transform says so. 0.26 never does."""


def find_mask_fill(transform: Any) -> float:
    """Return the value with which a transform of torchvision fills masks.

    Raises:
        ValueError: It is not one number.
    """
    fill: Any = transform.fill
    if isinstance(fill, dict):
        # torchvision asks with `in` for the exact type. Therefore the default of a defaultdict does not count.
        by_type = cast("dict[Any, Any]", fill)
        name = next((name for name in (tv_tensors.Mask, "others") if name in by_type), None)
        fill = None if name is None else by_type[name]
    if fill is None:
        return 0
    if not isinstance(fill, (int, float)):
        raise ValueError(  # noqa: TRY004 - as torchvision's pad
            f"the fill of masks must be one number, got {fill!r}; "
            "set fill={tv_tensors.Image: ..., tv_tensors.Mask: NUMBER}"
        )
    return fill


@lru_cache(maxsize=8192)
def find_nearest(old: int, new: int, interpolation: str) -> Index:
    """Return ``(new,)``: which of ``old`` pixels in a line torchvision's resize of masks takes."""
    if interpolation == "nearest":  # as torch computes it, in a sixth of the time
        positions: Values = np.arange(new, dtype=np.float32) * np.divide(old, new, dtype=np.float32)
        return np.minimum(positions.astype(np.int64), old - 1)
    line = torch.arange(old, dtype=torch.float32).expand(1, 1, old)
    mode = InterpolationMode(interpolation)
    return F.resize_image(line, [1, new], interpolation=mode, antialias=False)[0, 0].numpy().astype(np.int64)


def _cut(index: Any, axis: int, start: int, length: int, code: int) -> Index:
    """Return ``length`` lines of an index from ``start`` on, along ``axis``. Outside of it they are ``code``."""
    lines = index.swapaxes(0, axis)
    inside = lines[max(start, 0) : max(start + length, 0)]
    if len(inside) == length:
        return inside.swapaxes(0, axis)
    whole: Any = np.full((length, *lines.shape[1:]), code)
    first = max(-start, 0)
    whole[first : first + len(inside)] = inside
    return whole.swapaxes(0, axis)


def _to_index(numbers: torch.Tensor) -> Index:
    """Return positions counted from 0, given numbers counted from 1. What is not of the image is -1."""
    return numbers.numpy().astype(np.int64) - 1


def _find_runs(codes: Index, code: int) -> Iterator[slice]:
    """Return the parts of a line that have one code."""
    ends = np.flatnonzero(np.diff(codes == code, prepend=False, append=False)).tolist()
    return (slice(*pair) for pair in zip(ends[::2], ends[1::2], strict=True))


def _find_inner(line: Index) -> slice:
    """Return the part of a line between its outer borders. A border that was repeated may lie in it."""
    inner = np.flatnonzero(line >= 0)
    return slice(int(inner[0]), int(inner[-1]) + 1) if len(inner) else slice(0, 0)


class Pixels:
    """Where the pixels of the masks of a batch come from.

    Arguments have one row for each sample. Pairs are (y, x). ``on`` is ``(N,)`` flags of samples, or None for all.

    Args:
        size: ``(N, 2)`` heights and widths of the masks.
        has_masks: ``(N,)`` which samples have masks. The others take no time.
    """

    def __init__(self, size: IntArray, has_masks: Flags) -> None:
        self.has_masks = has_masks
        self._begin = size
        self._lines: dict[int, tuple[Index, Index]] = {}
        """Rows and columns of samples that were moved along the axes only."""
        self._device_lines: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._planes: dict[int, Index] = {}
        """``(H, W)`` numbers of pixels, row by row, of samples that were warped."""
        self._fills: list[float] = []

    @property
    def has_fill(self) -> bool:
        """Whether a move may have filled masks with something else than 0."""
        return any(fill != 0 for fill in self._fills)

    @property
    def has_warps(self) -> bool:
        """Whether a move was not along the axes. Then a sample has an index of eight bytes a pixel."""
        return bool(self._planes)

    def select_rows(self, rows: IntArray) -> Pixels:
        """Return the pixels of some samples. The sample at ``rows[i]`` gets the number ``i``."""
        part = Pixels(self._begin[rows], self.has_masks[rows])
        numbers = {i: int(row) for i, row in enumerate(rows)}
        part._lines = {i: self._lines[row] for i, row in numbers.items() if row in self._lines}
        part._planes = {i: self._planes[row] for i, row in numbers.items() if row in self._planes}
        part._fills = self._fills  # shared, so that codes mean the same
        return part

    def put_rows(self, rows: IntArray, part: Pixels) -> None:
        """Take back pixels that :meth:`select_rows` returned."""
        for i, row in enumerate(int(row) for row in rows):
            self._lines.pop(row, None)
            self._planes.pop(row, None)
            if i in part._lines:
                self._lines[row] = part._lines[i]
            if i in part._planes:
                self._planes[row] = part._planes[i]

    def flip(self, axis: int, on: Flags | None = None) -> None:
        """Mirror along x if ``axis`` is 0, along y if it is 1."""
        for i in self._rows(on):
            self._change(i, 1 - axis, np.flip)

    def cut(self, start: IntArray, shape: IntArray, fill: float = 0, on: Flags | None = None) -> None:
        """Take windows of ``shape`` at ``start``. Outside of the image they are ``fill``."""
        code = self._find_code(fill)
        for i in self._rows(on):
            for axis, old in enumerate(self._shape(i)):
                first, length = int(start[i, axis]), int(shape[i, axis])
                if first or length != old:
                    self._change(i, axis, partial(_cut, start=first, length=length, code=code))

    def repeat_border(self, before: IntArray, after: IntArray, mode: Any, on: Flags | None = None) -> None:
        """Add borders that repeat the image; ``mode`` is ``"edge"``, ``"reflect"`` or ``"symmetric"``."""
        for i in self._rows(on):
            for axis, old in enumerate(self._shape(i)):
                width = (int(before[i, axis]), int(after[i, axis]))
                if any(width):
                    self._take(i, axis, np.pad(np.arange(old), width, mode=mode))

    def resize(self, size: IntArray, interpolation: str = "nearest", on: Flags | None = None) -> None:
        """Resize to ``size``, by ``"nearest"`` or ``"nearest-exact"``."""
        interpolation = interpolation if _HAS_EXACT_MASKS else "nearest"
        for i in self._rows(on):
            for axis, old in enumerate(self._shape(i)):
                new = int(size[i, axis])
                if new != old:
                    self._take(i, axis, find_nearest(old, new, interpolation))

    def warp(self, kernel: Callable[[torch.Tensor, int], torch.Tensor], fill: float, on: Flags | None = None) -> None:
        """Move pixels by one of torchvision's kernels that do not keep the axes.

        Args:
            kernel: Function of a mask, ``(C, H, W)``, and of the sample's number. It sets zero outside of the image.
            fill: Value outside of the image.
            on: ``(N,)`` samples to move, or None for all.
        """
        code = self._find_code(fill)
        for i in self._rows(on):
            plane = self._make_plane(i)
            height, width = self._shape(i)
            if height * width < _EXACT_IN_FLOAT32:
                numbers = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, height, width)
                source = _to_index(kernel(numbers, i)[0])
            else:
                rows = torch.arange(1, height + 1, dtype=torch.float32)[:, None].expand(height, width)
                columns = torch.arange(1, width + 1, dtype=torch.float32).expand(height, width)
                row, column = (_to_index(x) for x in kernel(torch.stack((rows, columns)), i))
                source = np.where(row >= 0, row * width + column, -1)
            self._planes[i] = np.where(source >= 0, plane.reshape(-1)[source], code)
            self._lines.pop(i, None)

    def take(self, i: int, mask: Values) -> Values:
        """Return masks of one sample as they are after all moves.

        Args:
            i: The sample's number.
            mask: ``(..., H, W)`` masks.

        Raises:
            ValueError: They do not have the size of their image.
        """
        self._check_size(i, mask.shape)
        if i in self._planes:
            plane = self._planes[i]
            out = mask.reshape(*mask.shape[:-2], mask.shape[-2] * mask.shape[-1]).take(np.maximum(plane, 0), axis=-1)
            for code in range(-1, int(plane.min(initial=0)) - 1, -1):
                out[..., plane == code] = self._get_fill(code)
            return out
        if i not in self._lines:
            return mask
        rows, columns = self._lines[i]
        if min(rows.min(initial=0), columns.min(initial=0)) >= 0:
            return mask.take(columns, axis=-1).take(rows, axis=-2)  # columns first: half the time
        height, width = _find_inner(rows), _find_inner(columns)
        out = np.empty((*mask.shape[:-2], len(rows), len(columns)), mask.dtype)
        if height.stop and width.stop:
            inside = np.maximum(rows[height], 0)
            low = int(inside.min())
            part = mask[..., low : int(inside.max()) + 1, :].take(np.maximum(columns[width], 0), axis=-1)
            out[..., height, width] = part.take(inside - low, axis=-2)
        self._paint(i, out)
        return out

    def gather(self, i: int, mask: torch.Tensor) -> torch.Tensor:
        """Return masks of one sample as :meth:`take` does, on the device of ``mask`` and its current stream."""
        self._check_size(i, mask.shape)
        device = mask.device
        if i in self._planes:
            plane = torch.from_numpy(np.ascontiguousarray(self._planes[i])).to(device, non_blocking=True)
            flat = mask.reshape(*mask.shape[:-2], mask.shape[-2] * mask.shape[-1])
            flat = flat.to(_WIDER.get(mask.dtype, mask.dtype))
            out = flat.index_select(-1, plane.clamp(min=0).flatten()).reshape(*mask.shape[:-2], *plane.shape)
            for code in range(-1, int(self._planes[i].min(initial=0)) - 1, -1):
                out.masked_fill_(plane == code, self._get_fill(code))
            return out.to(mask.dtype)
        if i not in self._lines:
            return mask
        rows, columns = self._get_device_lines(device)[i]
        out = mask.index_select(-1, columns).index_select(-2, rows)
        self._paint(i, out)
        return out

    def gather_together(self, owners: Sequence[int], masks: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return masks of several samples as :meth:`gather` does, in as many kernels as one sample takes.

        Args:
            owners: The sample of each of the masks.
            masks: ``(..., H, W)`` masks on one device.

        Returns:
            Views of one tensor. None if the masks differ in dtype or in their size after all moves, if they were not
            moved along the axes only, or if torch has no kernels for their dtype.
        """
        for i, mask in zip(owners, masks, strict=True):
            self._check_size(i, mask.shape)
        shapes = {self._shape(i) if i in self._lines else None for i in owners}
        counts = [math.prod(mask.shape[:-2]) for mask in masks]
        if len(dtypes := {mask.dtype for mask in masks}) != 1 or dtypes & _WIDER.keys():
            return None
        if len(shapes) != 1 or not (shape := shapes.pop()):
            return None
        if sum(counts) * math.prod(shape) > _MOST_TOGETHER:
            return None
        rows, columns = (
            np.repeat(np.stack([self._lines[i][axis] for i in owners]), counts, axis=0) for axis in range(2)
        )
        sizes = np.repeat(self._begin[list(owners)], counts, axis=0)
        begins = np.cumsum(sizes.prod(1)) - sizes.prod(1)
        starts = begins[:, None] + np.maximum(rows, 0) * sizes[:, 1:]
        lines = np.concatenate((starts, np.maximum(columns, 0), np.minimum(rows, 0), np.minimum(columns, 0)), axis=1)
        whole, (height, width) = torch.from_numpy(lines).to(masks[0].device, non_blocking=True), shape
        index = whole[:, :height, None] + whole[:, None, height : height + width]
        out = torch.cat([mask.flatten() for mask in masks])[index]
        if least := int(lines.min(initial=0)):
            codes = whole[:, height + width :]
            codes = torch.minimum(codes[:, :height, None], codes[:, None, height:])
            for code in range(-1, least - 1, -1):
                out.masked_fill_(codes == code, self._get_fill(code))
        ends = np.cumsum(counts).tolist()
        return [
            out[end - count : end].view(*mask.shape[:-2], *shape)
            for count, end, mask in zip(counts, ends, masks, strict=True)
        ]

    def _get_device_lines(self, device: torch.device) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the lines of all samples after all moves, without codes. One copy to the device has all of them."""
        if self._device_lines is None:
            lines = [line for pair in self._lines.values() for line in pair]
            whole = torch.from_numpy(np.maximum(np.concatenate(lines), 0)).to(device, non_blocking=True)
            parts = cast("tuple[torch.Tensor, ...]", whole.split([len(line) for line in lines]))
            self._device_lines = dict(zip(self._lines, zip(parts[::2], parts[1::2], strict=True), strict=True))
        return self._device_lines

    def _rows(self, on: Flags | None) -> list[int]:
        """Return the samples that are moved and have masks."""
        return np.flatnonzero(self.has_masks if on is None else self.has_masks & on).tolist()

    def _shape(self, i: int) -> tuple[int, int]:
        if i in self._planes:
            height, width = (int(side) for side in self._planes[i].shape)
            return height, width
        rows, columns = self._get_lines(i)
        return len(rows), len(columns)

    def _get_lines(self, i: int) -> tuple[Index, Index]:
        if i in self._lines:
            return self._lines[i]
        return np.arange(int(self._begin[i, 0])), np.arange(int(self._begin[i, 1]))

    def _change(self, i: int, axis: int, change: Callable[[Index, int], Index]) -> None:
        """Change the order of rows if ``axis`` is 0, of columns if it is 1.

        Args:
            i: The sample's number.
            axis: The axis.
            change: Returns a changed index, given an index and the axis along which to change it.
        """
        if i in self._planes:
            self._planes[i] = change(self._planes[i], axis)
            return
        lines = list(self._get_lines(i))
        lines[axis] = change(lines[axis], 0)
        self._lines[i] = (lines[0], lines[1])

    def _take(self, i: int, axis: int, positions: Index) -> None:
        """Take rows at ``positions`` if ``axis`` is 0, columns if it is 1."""
        self._change(i, axis, lambda index, axis: index.take(positions, axis=axis))

    def _make_plane(self, i: int) -> Index:
        if i in self._planes:
            return self._planes[i]
        width = int(self._begin[i, 1])
        rows, columns = self._get_lines(i)
        codes = np.minimum(rows[:, None], columns)
        return np.where(codes >= 0, rows[:, None] * width + columns, codes)

    def _find_code(self, fill: float) -> int:
        """Return the code of a fill value that lies over all earlier ones."""
        if not self._fills or self._fills[-1] != fill:
            self._fills.append(fill)
        return -len(self._fills)

    def _get_fill(self, code: int) -> float:
        return self._fills[-code - 1]

    def _paint(self, i: int, out: Any) -> None:
        """Set the borders of ``out``, ``(..., H, W)``, an array or a tensor. The latest border is painted last."""
        rows, columns = self._lines[i]
        for code in range(-1, min(int(rows.min(initial=0)), int(columns.min(initial=0))) - 1, -1):
            for run in _find_runs(rows, code):
                out[..., run, :] = self._get_fill(code)
            for run in _find_runs(columns, code):
                out[..., run] = self._get_fill(code)

    def _check_size(self, i: int, shape: tuple[int, ...]) -> None:
        height, width = int(self._begin[i, 0]), int(self._begin[i, 1])
        if tuple(shape[-2:]) != (height, width):
            raise ValueError(
                f"masks must have the size {height} x {width} of their image, got a shape of {tuple(shape)}"
            )
