"""Augmentations of DALI that look at neighbours: what they return without DALI, and CLAHE with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import skimage.data
import torch
from torchvision import tv_tensors

import torchdali
from torchdali.transforms import CLAHE, Dilate, Erode, Jitter, MedianBlur

PICTURE = torch.from_numpy(skimage.data.astronaut()[60:150, 150:271].copy()).permute(2, 0, 1)


@pytest.mark.parametrize("size", [3, 5, (1, 7)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int32])
def test_windows_are_scipys(size: Any, dtype: torch.dtype) -> None:
    window = (1, size, size) if isinstance(size, int) else (1, *size)
    image = PICTURE.to(dtype) * (1 if dtype == torch.uint8 else 101) - (0 if dtype == torch.uint8 else 50)
    for transform, filtered in (
        (Dilate(size), scipy.ndimage.maximum_filter),
        (Erode(size), scipy.ndimage.minimum_filter),
        (MedianBlur(size), scipy.ndimage.median_filter),
    ):
        ours = transform(image)
        assert ours.dtype == dtype
        assert (ours.numpy() == filtered(image.numpy(), window, mode="nearest")).all()


@pytest.mark.parametrize(("tiles", "clip"), [(8, 2.0), ((4, 5), 3.0), (2, 40.0), ((7, 3), 0.001)])
@pytest.mark.parametrize("crop", [(64, 64), (90, 121), (60, 81), (37, 50)])
def test_clahe_is_dalis(tiles: Any, clip: float, crop: tuple[int, int]) -> None:
    """Also if the tiles divide one side, both or none."""
    image, transform = PICTURE[:, : crop[0], : crop[1]], CLAHE(tiles, clip)
    run = torchdali.compile(transform, device="cpu")
    for part in (image, image[:1]):
        expected = run(part[None])[0]
        assert (transform(part) == expected).all()
        assert (expected != part).any()


def test_jitter_takes_pixels_from_nearby() -> None:
    places = torch.arange(40 * 50, dtype=torch.int32).reshape(1, 40, 50)
    moved = Jitter(5, fill=-1)(places)
    inside = moved >= 0
    down, across = (part.abs() for part in (moved // 50 - places // 50, moved % 50 - places % 50))
    assert down[inside].unique().tolist() == across[inside].unique().tolist() == [0, 1, 2]
    assert inside[:, 2:-2, 2:-2].all()
    assert not inside.all()
    assert (Jitter(1)(places) == places).all()
    video = Jitter(4)(tv_tensors.Video(torch.stack([PICTURE, PICTURE])))
    assert (video[0] == video[1]).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Dilate(4), ValueError, "size must be odd numbers of pixels, got 4"),
        (lambda: Jitter(-1), ValueError, "degree must be 0 or more, got -1"),
        (lambda: CLAHE(0), ValueError, "tiles must be 1 or more and clip above 0, got 0 and 2.0"),
        (lambda: CLAHE()(PICTURE / 255), TypeError, "an image must be uint8, got torch.float32"),
        (lambda: CLAHE()(PICTURE[:, :8]), ValueError, "larger than the number of CLAHE's tiles, (8, 8), got (8, 121)"),
        (
            lambda: torchdali.compile(CLAHE(), device="cpu")([PICTURE, PICTURE[:, :8]]),
            torchdali.SampleError,
            "larger than the number of CLAHE's tiles, (8, 8), got (8, 121)",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_both_ways_of_the_median_are_one() -> None:
    """On whole batches it is the same, also with the chain around it in DALI."""
    run = torchdali.compile(torchdali.Batched(MedianBlur(3)), device="cpu")
    assert np.array_equal(run(PICTURE[None])[0].numpy(), MedianBlur(3)(PICTURE).numpy())
