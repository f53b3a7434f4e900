"""Transforms of volumes do what scipy does with the same numbers, and masks move alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from torchvision import tv_tensors

from torchdali.transforms import (
    GaussianBlur3D,
    RandomAffine3D,
    RandomCrop3D,
    RandomFlip3D,
    RandomIntensity,
    RandomRotate3D,
)

SIDES = (14, 20, 17)
VOLUME = torch.from_numpy(
    scipy.ndimage.gaussian_filter(np.random.default_rng(0).normal(size=SIDES), 1.5).astype(np.float32)
)
MASK = ((VOLUME > 0).long() + (VOLUME > 0.05).long())[None]
LABELS = tv_tensors.Mask(MASK)


def affine(matrix: np.ndarray, shift: Any, order: int, volume: Any, fill: float = 0.0) -> np.ndarray:
    """Map the voxels of the output to ``matrix @ ((o - shift) ...)`` from the middle, by scipy."""
    middle = (np.array(volume.shape) - 1) / 2
    offset = middle + np.array(shift) - matrix @ middle
    return scipy.ndimage.affine_transform(volume, matrix, offset, order=order, mode="grid-constant", cval=fill)


def test_rotations_are_scipys() -> None:
    """A rotation by 90 degrees about an axis is numpy's, in the plane of the other two."""
    cube = torch.arange(27.0).reshape(3, 3, 3)
    for axis in range(3):
        degrees = [0.0, 0.0, 0.0]
        degrees[axis] = 90.0
        first, second = (i for i in range(3) if i != axis)
        assert np.allclose(RandomRotate3D(degrees)(cube), np.rot90(cube, -1, (first, second)), atol=1e-4)


@pytest.mark.parametrize("fill", [0.0, 0.3])
def test_affine_maps_are_scipys(fill: float) -> None:
    angles, moves, scale = np.radians([10.0, -25.0, 40.0]), np.array([1.5, -2.0, 0.25]), 1.2
    turns = []
    for axis, angle in enumerate(angles):
        turn = np.eye(3)
        first, second = (i for i in range(3) if i != axis)
        turn[first, first] = turn[second, second] = math.cos(angle)
        turn[first, second], turn[second, first] = -math.sin(angle), math.sin(angle)
        turns.append(turn)
    matrix = turns[0] @ turns[1] @ turns[2] / scale
    transform = RandomAffine3D((10.0, -25.0, 40.0), tuple(moves), scale, fill)
    image, mask = transform(VOLUME[None], LABELS)
    expected = affine(matrix, -matrix @ moves, 1, VOLUME.numpy(), fill)
    assert np.abs(image[0].numpy() - expected).max() < 2e-5
    moved = affine(matrix, -matrix @ moves, 0, MASK[0].numpy())
    assert (mask[0].numpy() != moved).mean() < 1e-3  # between two voxels the rounding decides
    assert isinstance(mask, tv_tensors.Mask)
    assert mask.dtype == torch.int64


@pytest.mark.parametrize("sigma", [0.7, 1.6])
def test_the_blur_is_scipys(sigma: float) -> None:
    blurred, mask = GaussianBlur3D(sigma)(VOLUME[None], LABELS)
    expected = scipy.ndimage.gaussian_filter(VOLUME, sigma, mode="mirror", radius=math.ceil(3 * sigma))
    assert np.abs(blurred[0].numpy() - expected).max() < 1e-6
    assert torch.equal(mask, LABELS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_values_that_float32_cannot_hold(dtype: torch.dtype) -> None:
    volume = (1000 * VOLUME.double() + 2**28).to(dtype)  # float32 holds multiples of 32 there
    bound = 1e-5 if dtype.is_floating_point else 0.51  # integers are rounded
    moved, blurred = RandomAffine3D(translate=(0.5, 0, 0))(volume), GaussianBlur3D(0.7)(volume)
    assert moved.dtype == blurred.dtype == dtype
    assert (moved[1:].double() - (volume[1:].double() + volume[:-1]) / 2).abs().max() < bound
    expected = scipy.ndimage.gaussian_filter(volume.double(), 0.7, mode="mirror", radius=3)
    assert np.abs(blurred.double().numpy() - expected).max() < bound


def test_parts_of_a_sample_move_alike() -> None:
    places = torch.arange(math.prod(SIDES)).reshape(1, *SIDES)
    for transform in (RandomCrop3D((5, 6, 7)), RandomFlip3D(), RandomFlip3D(1, axes=[2])):
        seen = set()
        for seed in range(30):
            torch.manual_seed(seed)
            image, mask = transform(places.float(), tv_tensors.Mask(places))
            assert torch.equal(image.long(), mask.as_subclass(torch.Tensor))
            seen.add(int(mask[0, 0, 0, 0]))
        assert len(seen) == (1 if getattr(transform, "p", 0) == 1 else 8 if isinstance(transform, RandomFlip3D) else 30)
    assert torch.equal(RandomFlip3D(1, axes=[0, 2])(VOLUME), VOLUME.flip(0, 2))


def test_intensities_are_drawn_from_their_ranges() -> None:
    values = [RandomIntensity((0.5, 2), (-1, 1))({"a": torch.eye(3)[None], "m": LABELS}) for _ in range(200)]
    shift = torch.stack([value["a"][0, 0, 1] for value in values])
    scale = torch.stack([value["a"][0, 0, 0] for value in values]) - shift
    for drawn, low, high in ((shift, -1, 1), (scale, 0.5, 2)):
        assert low <= float(drawn.min()) < low + 0.1
        assert high - 0.1 < float(drawn.max()) <= high
    assert torch.equal(values[0]["m"], LABELS)
    assert RandomIntensity(2, 1)(torch.ones(1, 2, 2, dtype=torch.int16)).unique().tolist() == [3.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RandomCrop3D((3, 3)), "size must be depth, height and width, got (3, 3)"),
        (lambda: RandomCrop3D((30, 3, 3))(VOLUME), "a volume must be at least as large as the crop, (30, 3, 3), got"),
        (lambda: RandomFlip3D(axes=[3]), "axes must be of 0, 1 and 2, got [3]"),
        (lambda: RandomAffine3D(scale=0), "scale must be a number or a pair (low, high) of at least 1e-06, got 0"),
        (lambda: GaussianBlur3D(5.0)(VOLUME), "sigma=5 blurs 15 voxels far, and a volume must be larger, got (14, 20"),
        (lambda: RandomFlip3D()(torch.zeros(3, 3)), "RandomFlip3D takes volumes (..., D, H, W), got (3, 3)"),
        (
            lambda: RandomRotate3D(3)(VOLUME, tv_tensors.Mask(MASK[:, 1:])),
            "RandomRotate3D takes volumes and masks of one size, got [(13,",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
