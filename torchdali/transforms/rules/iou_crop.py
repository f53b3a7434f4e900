"""Rule of RandomIoUCrop: a window that shows enough of some box."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms import v2

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import SampleTransformError, Unsupported
from torchdali.transforms.rules.crop import Window
from torchdali.transforms.rules.random_resize import interpolate, scale_size, to_fractions
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets

ROUNDS = 200
"""torchvision tries for ever. A round is one least overlap and up to 40 windows."""

_ROUNDS_IN_ALL, _ROUNDS_AT_ONCE = 32, 8
"""A step has several rounds of each sample: at most so many, and at most 32 rounds of all samples together."""

Floats = npt.NDArray[np.floating[Any]]
Flags = npt.NDArray[np.bool_]


class _Boxes(NamedTuple):
    """The boxes of some samples, sorted by sample.

    Attributes:
        corners: ``(M, 4)`` left, top, right, bottom.
        row: ``(M,)`` sample of each box, ascending.
    """

    corners: Floats
    row: IntArray

    def select(self, samples: IntArray, count: int) -> tuple[_Boxes, IntArray]:
        """Return the boxes of some of ``count`` samples with new sample numbers, and which boxes these are."""
        number = np.full(count, -1)
        number[samples] = np.arange(len(samples))
        chosen = np.flatnonzero(number[self.row] >= 0)
        return _Boxes(self.corners[chosen], number[self.row[chosen]]), chosen


def _find_overlaps(boxes: _Boxes, windows: Floats) -> tuple[Floats, Flags]:
    """Return how much K windows of each sample show of its boxes.

    Args:
        boxes: The boxes.
        windows: ``(N, K, 4)`` left, top, right, bottom.

    Returns:
        ``(N, K)`` greatest overlaps: intersection over union. Only boxes whose centre is in the window count; the
        overlap is -1 if there are none. And ``(M, K)`` which boxes have their centre in which window.
    """
    # One array for each side: numpy takes several times as long to reduce an axis of two.
    left, top, right, bottom = (boxes.corners[:, side, None] for side in range(4))
    own: list[Floats] = [np.ascontiguousarray(windows[..., side]) for side in range(4)]
    own_areas = (own[2] - own[0]) * (own[3] - own[1])
    own_left, own_top, own_right, own_bottom = (side[boxes.row] for side in own)
    half = boxes.corners.dtype.type(0.5)
    x, y = (left + right) * half, (top + bottom) * half
    inside = (own_left < x) & (x < own_right) & (own_top < y) & (y < own_bottom)
    width = np.minimum(right, own_right) - np.maximum(left, own_left)
    height = np.minimum(bottom, own_bottom) - np.maximum(top, own_top)
    common = np.maximum(width, 0) * np.maximum(height, 0)
    areas = own_areas[boxes.row] + (right - left) * (bottom - top)
    overlap = np.where(inside, common / np.maximum(areas - common, np.finfo(np.float32).tiny), -1)
    best = np.full(windows.shape[:2], -1, overlap.dtype)
    counts = np.bincount(boxes.row, minlength=len(windows))
    if len(overlap):
        best[counts > 0] = np.maximum.reduceat(overlap, (np.cumsum(counts) - counts)[counts > 0], axis=0)
    return best, inside


class RandomIoUCrop(Window):
    """Rule of RandomIoUCrop: a random window that shows enough of some box, or the whole image.

    Windows are drawn for all samples of a batch at once, and again for those that found none.
    """

    handles = (v2.RandomIoUCrop,)
    randomness = "least overlap; up to 40 windows, again until one fits"
    unsupported_when = "scales that are no share of the image, no options, no trials"
    stays_inside = True
    needs = (
        "RandomIoUCrop() requires input sample to contain tensor or PIL images and bounding boxes. "
        "Sample can also contain masks."
    )

    def infer(self, spec: Spec) -> Spec:
        transform = self.transform
        if not transform.options or transform.trials < 1 or not 0 < transform.min_scale <= transform.max_scale <= 1:
            raise Unsupported("torchvision finds no window inside of the image with these arguments")
        return replace(spec, size=None)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params = draws.load()
        if params is None:
            raise SampleTransformError(0, self.needs)
        return params

    def draw_and_move(self, draws: Draws, size: IntArray, targets: Targets) -> Params:
        targets.check_one_leaf(targets.boxes, "bounding boxes")
        row = np.concatenate([boxes.row for boxes in targets.boxes])
        order = np.argsort(row, kind="stable")
        corners = np.concatenate([boxes.to_xyxy() for boxes in targets.boxes])[order]
        boxes = _Boxes(corners.astype(np.float64 if corners.dtype == np.float64 else np.float32), row[order])
        start, shape, found, within = self._find_windows(draws, size, boxes)
        params: Params = {
            "start": start.astype(np.int32),
            "shape": shape.astype(np.int32),
            "found": found,
            "within": _pad_rows(within, boxes.row, len(size)),
            "count": np.bincount(boxes.row, minlength=len(size)),
        }
        draws.store({name: params[name] for name in self.inputs})
        targets.crop(start, shape, found)
        outside = np.empty(len(order), bool)
        outside[order] = ~within
        # torchvision marks boxes whose centre is outside. SanitizeBoundingBoxes drops them.
        ends = np.cumsum([len(group.values) for group in targets.boxes])
        for group, flags in zip(targets.boxes, np.split(outside, ends[:-1]), strict=True):
            group.set_zero(flags)
        return params

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        if not sample["found"]:
            return {}
        (top, left), (height, width) = sample["start"].tolist(), sample["shape"].tolist()
        within = torch.from_numpy(np.array(sample["within"][: int(sample["count"])]))
        return {"top": top, "left": left, "height": height, "width": width, "is_within_crop_area": within}

    def _find_windows(self, draws: Draws, size: IntArray, boxes: _Boxes) -> tuple[IntArray, IntArray, Flags, Flags]:
        """Return ``(N, 2)`` starts and shapes, ``(N,)`` whether a sample is cropped, and ``(M,)`` which boxes stay."""
        trials = int(self.transform.trials)
        options = np.array(self.transform.options, np.float32)
        start, shape = np.zeros_like(size), np.array(size)
        found, within = np.zeros(len(size), bool), np.ones(len(boxes.row), bool)
        open_rows = np.arange(len(size))
        blocks = -(-(1 + 4 * trials) // 4)
        if not len(size):  # RandomApply may have chosen no sample
            return start, shape, found, within
        done = 0
        while done < ROUNDS:
            # A round of few samples takes as long as one of many, so few samples get several rounds at once.
            rounds = min(max(1, _ROUNDS_IN_ALL // len(open_rows)), _ROUNDS_AT_ONCE, ROUNDS - done)
            words = draws.select_rows(open_rows).skip(done * blocks).words(4 * rounds * blocks)
            words = words.reshape(len(open_rows), rounds, -1)[..., : 1 + 4 * trials]
            which = words[..., 0].astype(np.uint64) * np.uint64(len(options)) >> np.uint64(32)
            option = options[which.astype(np.int64)]
            corner, sides, allowed = self._draw_windows(words[..., 1:], size[open_rows])
            windows = np.concatenate((corner, corner + sides), axis=2).astype(boxes.corners.dtype)
            open_boxes, chosen = boxes.select(open_rows, len(size))
            best, inside = _find_overlaps(open_boxes, windows)
            best = best.reshape(len(open_rows), rounds, trials)
            fits = allowed.reshape(best.shape) & (best >= 0) & (best >= option[..., None])
            # The first round counts that drew "whole" or found a window.
            whole = option >= 1
            ends = whole | fits.any(axis=2)
            end, each_row = ends.argmax(axis=1), np.arange(len(open_rows))
            first = end * trials + fits[each_row, end].argmax(axis=1)
            hit = ends.any(axis=1) & ~whole[each_row, end]
            rows, each = open_rows[hit], first[hit]
            start[rows], shape[rows], found[rows] = corner[hit, each, ::-1], sides[hit, each, ::-1], True
            of_hits = hit[open_boxes.row]
            within[chosen[of_hits]] = inside[of_hits, first[open_boxes.row[of_hits]]]
            open_rows = open_rows[~ends.any(axis=1)]
            if not len(open_rows):
                return start, shape, found, within
            done += rounds
        raise SampleTransformError(
            int(open_rows[0]),
            f"none of {ROUNDS} x {trials} windows shows enough of a box; add 1.0 to sampler_options, "
            "which leaves the image as it is",
        )

    def _draw_windows(self, words: npt.NDArray[np.uint32], size: IntArray) -> tuple[IntArray, IntArray, Flags]:
        """Return ``(N, K, 2)`` corners and sides of windows as (x, y), and ``(N, K)`` which of them are allowed."""
        transform = self.transform
        drawn = to_fractions(words).reshape(len(size), -1, 4)
        whole = size[:, None, ::-1]
        sides = scale_size(whole, interpolate(transform.min_scale, transform.max_scale, drawn[..., :2]))
        corner = scale_size(whole - sides, drawn[..., 2:])
        ratio = sides[..., 0] / np.maximum(sides[..., 1], 1)
        allowed = (transform.min_aspect_ratio <= ratio) & (ratio <= transform.max_aspect_ratio)
        return corner, sides, allowed & (sides > 0).all(axis=2)


def _pad_rows(values: Flags, row: IntArray, count: int) -> Flags:
    """Return ``(count, K)`` flags of each sample's boxes, filled up with False."""
    counts = np.bincount(row, minlength=count)
    table = np.zeros((count, int(counts.max(initial=0))), bool)
    table[row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = values
    return table
