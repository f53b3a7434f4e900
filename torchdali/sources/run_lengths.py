"""COCO's polygons and run lengths as masks that are not yet expanded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.transforms.targets.stored import RunMasks

__all__ = ["parse_run_lengths", "read_runs"]


def read_runs(segmentations: Sequence[Any], size: tuple[int, int]) -> RunMasks | None:
    """Return the masks of objects as torchvision's wrapper of ``CocoDetection`` makes them, but not expanded.

    Args:
        segmentations: Polygons, or run lengths with or without compression, of each object.
        size: Height and width of the image.

    Returns:
        The masks; None if one is neither, or not all of one size, or its runs do not fill it.
    """
    from pycocotools import mask  # pyright: ignore[reportMissingTypeStubs] - CocoDetection needs it, too

    api: Any = mask
    rles: list[Any] = []
    for segmentation in segmentations:
        if isinstance(segmentation, list):
            rles.append(api.merge(api.frPyObjects(segmentation, *size)))
        elif isinstance(segmentation, dict):
            is_compressed = isinstance(segmentation.get("counts"), str)
            rles.append(segmentation if is_compressed else api.frPyObjects(segmentation, *size))
        else:
            return None
    sizes = {tuple(rle["size"]) for rle in rles}
    if len(sizes) != 1:
        return None
    height, width = (int(side) for side in sizes.pop())
    strings = [rle["counts"] for rle in rles]
    runs, counts = parse_run_lengths([x.encode() if isinstance(x, str) else x for x in strings])
    if counts.min() == 0 or runs.min() < 0:
        return None
    begins = np.cumsum(counts) - counts
    if (np.add.reduceat(runs, begins) != height * width).any():
        return None
    return RunMasks(runs.astype(np.int32), counts, (height, width))


def parse_run_lengths(strings: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the run lengths that COCO's strings stand for, one string after another, and their number by string.

    A number is written in groups of five bits, the lowest first. Each group is a character, 48 plus its bits, plus 32
    if another group follows. The highest bit of the last group is the sign. From the fourth number on, it is the
    difference to the number before the last one (``rleToString`` in cocodataset/cocoapi, common/maskApi.c).
    """
    codes = np.frombuffer(b"".join(strings), np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero((codes & 32) == 0)
    if len(ends) == 0 or ends[-1] != len(codes) - 1:
        return np.empty(0, np.int64), np.zeros(len(strings), np.int64)
    lengths = np.diff(ends, prepend=-1)
    begins = ends + 1 - lengths
    shift = 5 * (np.arange(len(codes)) - np.repeat(begins, lengths))
    values = np.add.reduceat((codes & 31) << shift, begins)
    values -= (codes[ends] & 16) << (5 * lengths - 4)
    counts = np.diff(np.searchsorted(ends, np.cumsum([len(x) for x in strings])), prepend=0)
    return _add_differences(values, counts), counts


def _add_differences(values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of all strings, of which those from the fourth on are differences."""
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    position = np.arange(len(values)) - firsts
    is_odd = (position & 1).astype(bool)
    numbers = np.where(position == 0, values, 0)
    for is_chosen in (is_odd, ~is_odd):
        sums = np.cumsum(np.where(is_chosen, values, 0))
        numbers += np.where(is_chosen, sums - sums[firsts], 0)
    return numbers
