"""Augmentations that move pixels: boxes, masks and key points go where the pixels go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali.transforms import Jitter, Sphere, Water

SIZE = (90, 121)
LINEAR = v2.InterpolationMode.BILINEAR
MOVES = {
    "water": lambda **how: Water((8, 5), phase=(0, 6.3), **how),
    "steeper water": lambda **how: Water((5, 8), (0.15, 0.1), phase=2.0, **how),
    "sphere": Sphere,
}


def in_the_middle(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Places (x, y) far from the edges."""
    places = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return (places * 0.5 + 0.25) * torch.tensor(SIZE[::-1])


def as_points(places: torch.Tensor) -> Any:
    return tv_tensors.KeyPoints(places, canvas_size=SIZE)


def as_boxes(boxes: Any, box_format: str = "XYXY", **how: Any) -> Any:
    return tv_tensors.BoundingBoxes(torch.as_tensor(boxes), format=box_format, canvas_size=SIZE, **how)  # pyright: ignore


@pytest.mark.parametrize("name", MOVES)
def test_a_point_shows_what_it_showed_before(name: str) -> None:
    """In an image of coordinates, the value at a moved point is the point's old place."""
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float32) for side in SIZE), indexing="ij")
    points = in_the_middle((20, 2, 2), 1)
    image, moved = MOVES[name](interpolation=LINEAR)(torch.stack((columns, rows)), as_points(points))
    grid = (moved.as_subclass(torch.Tensor) + 0.5) / torch.tensor(SIZE[::-1]) * 2 - 1
    shown = torch.nn.functional.grid_sample(image[None], grid[None], align_corners=False)[0].permute(1, 2, 0)
    assert type(moved) is tv_tensors.KeyPoints
    assert (shown - points).abs().max() < 0.1
    assert (moved - points).abs().max() > 2


@pytest.mark.parametrize("name", MOVES)
def test_a_box_lies_around_its_moved_mask(name: str) -> None:
    first, second = in_the_middle((2, 12, 2), 2)
    low, high = torch.minimum(first, second).floor(), torch.maximum(first, second).floor() + 12
    y, x = torch.arange(SIZE[0])[None, :, None], torch.arange(SIZE[1])[None, None]
    left, top, right, bottom = torch.cat((low, high), 1).T[:, :, None, None]
    masks = ((x >= left) & (x < right) & (y >= top) & (y < bottom)).to(torch.uint8)
    boxes = as_boxes(torch.cat((low, high), 1))
    moved, moved_masks = MOVES[name]()(boxes, tv_tensors.Mask(masks))
    for box, mask in zip(moved, moved_masks, strict=True):
        ys, xs = mask.nonzero().T
        around = torch.stack((xs.min(), ys.min(), xs.max() + 1, ys.max() + 1))
        assert (box - around).abs().max() <= 1.6
    assert (moved - boxes).abs().max() > 2


@pytest.mark.parametrize("transform", [Water(phase=1.0), Water(phase=1.0, interpolation=LINEAR, fill=9), Jitter(6, 9)])
def test_a_mask_takes_the_nearest_pixels_and_is_0_outside(transform: Any) -> None:
    mask = torch.randint(1, 9, (2, *SIZE), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(4)
    moved = transform(tv_tensors.Mask(mask))
    transform = Jitter(6) if isinstance(transform, Jitter) else Water(phase=1.0)
    torch.manual_seed(4)
    assert type(moved) is tv_tensors.Mask
    assert moved.equal(transform(mask))
    assert (moved == 0).any()


def test_boxes_of_all_formats_move_alike_and_are_clamped() -> None:
    convert, transform = v2.functional.convert_bounding_box_format, Water((20, 20), phase=0.3)
    corners = as_boxes([[3.0, 5.0, 40.0, 30.0], [0.0, 60.0, 121.0, 90.0]])
    expected = transform(corners)
    assert (expected[:, 0::2] >= 0).all()
    assert (expected[:, 0::2] <= SIZE[1]).all()
    assert (expected[:, 1::2] <= SIZE[0]).all()
    for name in ("XYWH", "CXCYWH"):
        moved = transform(convert(corners, new_format=tv_tensors.BoundingBoxFormat[name]))
        assert moved.format == tv_tensors.BoundingBoxFormat[name]
        back = convert(moved, new_format=tv_tensors.BoundingBoxFormat.XYXY)
        torch.testing.assert_close(back, expected, rtol=0, atol=1e-4)
    assert transform(corners.long()).dtype == torch.int64
    free = transform(as_boxes(corners.as_subclass(torch.Tensor), clamping_mode=None))
    assert free.min() < 0


def test_boxes_and_points_stay_in_jitter() -> None:
    boxes, points = as_boxes([[3.0, 5.0, 40.0, 30.0]]), as_points(in_the_middle((5, 2), 3))
    image, *moved = Jitter(9)(torch.rand(3, *SIZE), boxes, points)
    assert moved[0].equal(boxes)
    torch.testing.assert_close(moved[1].numpy(), np.asarray(points), rtol=0, atol=1e-5)
    assert image.shape == (3, *SIZE)


def test_rotated_boxes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^boxes must not be rotated, because Sphere bends their edges, got XYWHR; leave it out"
    ):
        Sphere()(as_boxes([[3.0, 5.0, 40.0, 30.0, 10.0]], "XYWHR"))
