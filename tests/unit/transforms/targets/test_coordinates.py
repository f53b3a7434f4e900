"""Boxes and key points against torchvision's functionals, sample by sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.coordinates import (
    AFTER,
    AXIS_ALIGNED,
    BEFORE,
    CORNERS,
    COUNT,
    DTYPES,
    MAPS,
    NEW,
    ROTATED,
    SHAPE,
    SIZE,
    START,
    assert_same,
    make_boxes,
    make_points,
)
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.targets import Targets

Move = tuple[Callable[[Targets], None], Callable[[torch.Tensor, int], torch.Tensor]]


def perspective(leaf: torch.Tensor, i: int) -> torch.Tensor:
    bottom, right = (SIZE[i] - 1).tolist()
    return F.perspective(leaf, [[0, 0], [right, 0], [right, bottom], [0, bottom]], CORNERS[i].tolist())


def clamp(leaf: torch.Tensor, i: int) -> torch.Tensor:
    return F.clamp_bounding_boxes(leaf) if isinstance(leaf, tv_tensors.BoundingBoxes) else F.clamp_keypoints(leaf)


def clamp_ours(targets: Targets) -> None:
    for group in targets.groups:
        group.clamp(targets.size, None)


MOVES: dict[str, Move] = {
    "hflip": (lambda t: t.flip(0), lambda x, i: F.horizontal_flip(x)),
    "crop": (
        lambda t: t.crop(START, SHAPE),
        lambda x, i: F.crop(x, *START[i].tolist(), *SHAPE[i].tolist()),
    ),
    "pad": (
        lambda t: t.pad(BEFORE, AFTER),
        lambda x, i: F.pad(x, [*BEFORE[i, ::-1].tolist(), *AFTER[i, ::-1].tolist()]),
    ),
    "resize": (lambda t: t.resize(NEW), lambda x, i: F.resize(x, NEW[i].tolist())),
    "clamp": (clamp_ours, clamp),
    "vflip": (lambda t: t.flip(1), lambda x, i: F.vertical_flip(x)),
    "center": (lambda t: t.crop_center(START, np.full((COUNT, 2), 301)), lambda x, i: F.center_crop(x, [301, 301])),
    "affine": (lambda t: t.affine(MAPS), lambda x, i: F.affine(x, *MAPS.row(i)[:4])),
    "rotate": (lambda t: t.rotate(MAPS.angle, SIZE), lambda x, i: F.rotate(x, float(MAPS.angle[i]))),
    "perspective": (lambda t: t.perspective(CORNERS), perspective),
}


def assert_equals_torchvision(samples: list[list[torch.Tensor]], move: Move, off: float = 0) -> None:
    before = [leaf.clone() for sample in samples for leaf in sample]
    targets = Targets.collect(samples, SIZE)
    move[0](targets)
    for i, (ours, sample) in enumerate(zip(targets.leaves(), samples, strict=True)):
        for leaf, original in zip(ours, sample, strict=True):
            assert_same(leaf, move[1](original, i), off)
    assert all(torch.equal(x, y) for x, y in zip(before, [leaf for sample in samples for leaf in sample], strict=True))


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("box_format", AXIS_ALIGNED)
def test_boxes_equal_torchvisions(box_format: str, name: str) -> None:
    for dtype in DTYPES:
        if dtype != torch.float16 or name != "perspective":  # torchvision: float16 and float32 do not multiply
            assert_equals_torchvision(make_boxes(box_format, dtype), MOVES[name])
    assert_equals_torchvision(make_boxes(box_format, torch.float32, None), MOVES[name])


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("box_format", ROTATED)
def test_rotated_boxes_are_close_to_torchvisions(box_format: str, name: str) -> None:
    # One call of a kernel rounds otherwise than many. Clamping a box with hardly any slope makes 3e-3 pixels of it.
    for mode in ("soft", "hard", None) if name == "crop" else ("soft",):
        samples = make_boxes(box_format, torch.float32, mode)
        assert_equals_torchvision([*samples[:6], *[[]] * (COUNT - 6)], MOVES[name], 5e-3)


@pytest.mark.parametrize("name", MOVES)
def test_points_equal_torchvisions(name: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        if dtype == torch.float32 or name != "perspective":
            assert_equals_torchvision(make_points(dtype), MOVES[name])
    assert_equals_torchvision(make_points(torch.float32, (3, 2)), MOVES[name])
