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
    runs = parse_run_lengths([x.encode() if isinstance(x, str) else x for x in strings])
    if any(len(x) == 0 or x.min() < 0 or x.sum() != height * width for x in runs):
        return None
    return RunMasks(np.concatenate(runs).astype(np.int32), np.array([len(x) for x in runs], np.int64), (height, width))


def parse_run_lengths(strings: Sequence[bytes]) -> list[npt.NDArray[np.int64]]:
    """Return the run lengths that COCO's strings stand for.

    A number is written in groups of five bits, the lowest first. Each group is a character, 48 plus its bits, plus 32
    if another group follows. The highest bit of the last group is the sign. From the fourth number on, it is the
    difference to the number before the last one (``rleToString`` in cocodataset/cocoapi, common/maskApi.c).
    """
    codes = np.frombuffer(b"".join(strings), np.uint8).astype(np.int64) - 48
    is_last = (codes & 32) == 0
    if len(codes) == 0 or not is_last[-1]:
        return [np.empty(0, np.int64) for _ in strings]
    ends = np.flatnonzero(is_last)
    begins = np.concatenate(([0], ends[:-1] + 1))
    shift = 5 * (np.arange(len(codes)) - np.repeat(begins, ends - begins + 1))
    values = np.add.reduceat((codes & 31) << shift, begins)
    is_negative = (codes[ends] & 16) != 0
    values[is_negative] -= np.int64(1) << (shift[ends][is_negative] + 5)
    owners = np.searchsorted(np.cumsum([len(x) for x in strings]), ends, side="right")
    numbers = np.split(values, np.searchsorted(owners, np.arange(1, len(strings))))
    for number in numbers:
        number[1::2] = np.cumsum(number[1::2])
        number[2::2] = np.cumsum(number[2::2])
    return numbers
