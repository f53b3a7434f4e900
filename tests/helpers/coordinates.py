"""Boxes and key points of a batch, and parameters of moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.targets.maps import AffineMaps

COUNT = 12
AXIS_ALIGNED, ROTATED = ["XYXY", "XYWH", "CXCYWH"], ["XYWHR", "CXCYWHR", "XYXYXYXY"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32]
RANDOM = np.random.default_rng(3)
SIZE = RANDOM.integers(60, 640, (COUNT, 2))
START = np.floor(RANDOM.uniform(-0.1, 0.3, (COUNT, 2)) * SIZE).astype(np.int64)
SHAPE = np.ceil(SIZE * 0.6).astype(np.int64)
BEFORE, AFTER = RANDOM.integers(0, 90, (COUNT, 2)), RANDOM.integers(0, 90, (COUNT, 2))
NEW = RANDOM.integers(30, 900, (COUNT, 2))
NEW[0] = SIZE[0]
MAPS = AffineMaps(
    RANDOM.uniform(-30, 30, COUNT),
    RANDOM.integers(-30, 30, (COUNT, 2)).astype(float),
    RANDOM.uniform(0.8, 1.2, COUNT),
    RANDOM.uniform(-10, 10, (COUNT, 2)),
)
FAR = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
INWARDS = RANDOM.integers(0, 20, (COUNT, 4, 2))
CORNERS = np.where(FAR > 0, SIZE[:, None, ::-1] - 1 - INWARDS, INWARDS)


def make_boxes(box_format: str, dtype: torch.dtype, mode: str | None = "soft") -> list[list[torch.Tensor]]:
    """Boxes of each sample, some of them partly or wholly outside; one sample has none."""
    random, samples = np.random.default_rng(1), []
    for i, (height, width) in enumerate(SIZE.tolist()):
        count = 0 if i == 2 else int(random.integers(1, 9))
        corner = random.uniform(-0.1, 0.9, (count, 2)) * (width, height)
        side = random.uniform(2, 200, (count, 2))
        canvas = {"canvas_size": (height, width), "clamping_mode": mode}
        if box_format in ROTATED:
            values = np.concatenate((corner, side, random.uniform(-90, 90, (count, 1))), 1)
            boxes = tv_tensors.BoundingBoxes(torch.from_numpy(values), format="CXCYWHR", **canvas)
        else:
            values = np.concatenate((corner, corner + side), 1)
            boxes = tv_tensors.BoundingBoxes(torch.from_numpy(values), format="XYXY", **canvas)
        boxes = F.convert_bounding_box_format(boxes, new_format=box_format)
        samples.append([tv_tensors.wrap(boxes.to(dtype), like=boxes)])
    return samples


def make_points(dtype: torch.dtype, shape: tuple[int, ...] = ()) -> list[list[torch.Tensor]]:
    random = np.random.default_rng(2)
    samples = []
    for i, size in enumerate(SIZE.tolist()):
        values = random.uniform(-0.1, 1.1, (0 if i == 2 else i, *shape, 2)) * size[::-1]
        samples.append([tv_tensors.KeyPoints(torch.from_numpy(values).to(dtype), canvas_size=tuple(size))])
    return samples


def assert_same(ours: Any, theirs: Any, off: float = 0) -> None:
    assert type(ours) is type(theirs)
    assert (ours.dtype, ours.shape, ours.canvas_size) == (theirs.dtype, theirs.shape, theirs.canvas_size)
    if isinstance(ours, tv_tensors.BoundingBoxes):
        assert (ours.format, ours.clamping_mode) == (theirs.format, theirs.clamping_mode)
    a, b = (x.as_subclass(torch.Tensor) for x in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=0, atol=off, equal_nan=True)
