"""DALI's augmentations as transforms: what they take and return without DALI."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import skimage.data
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, transforms
from torchdali.tools.parity.photographs import write_photographs

PICTURE = torch.from_numpy(skimage.data.astronaut()[100:220, 150:310].copy()).permute(2, 0, 1)
INVERT = transforms.LookupTable(torch.arange(255, -1, -1, dtype=torch.uint8))
ALL = [
    transforms.ColorTwist(hue=(-40, 40)),
    transforms.HSV(saturation=0.5),
    transforms.ColorSpace("YCbCr"),
    transforms.BGR(),
    INVERT,
    transforms.GridMask(20),
    transforms.SaltAndPepper(0.2),
    transforms.ShotNoise(10),
    transforms.Water(),
    transforms.Sphere(),
]


@pytest.mark.parametrize("transform", ALL, ids=lambda transform: type(transform).__name__)
def test_all_types_of_images_get_the_same_pixels(transform: Any) -> None:
    kinds: list[Callable[[torch.Tensor], Any]] = [
        torch.Tensor.clone,
        tv_tensors.Image,
        lambda image: tv_tensors.Video(image[None]),
        v2.functional.to_pil_image,
    ]
    pixels = []
    for kind in kinds:
        torch.manual_seed(0)
        given = kind(PICTURE)
        out = transform(given)
        assert type(out) is (Image.Image if isinstance(given, Image.Image) else type(given))
        image = v2.functional.pil_to_tensor(out) if isinstance(out, Image.Image) else out.as_subclass(torch.Tensor)
        pixels.append(image.reshape(PICTURE.shape).numpy())
    assert all((one == pixels[0]).all() for one in pixels[1:])
    assert (pixels[0] != PICTURE.numpy()).any()
    assert (torch.from_numpy(skimage.data.astronaut()[100:220, 150:310]).permute(2, 0, 1) == PICTURE).all()


def test_the_frames_of_a_video_share_the_numbers() -> None:
    video = tv_tensors.Video(torch.stack([PICTURE] * 3))
    for transform in (transforms.SaltAndPepper(0.3), transforms.ColorTwist(hue=(-180, 180)), transforms.GridMask(20)):
        frames = transform(video)
        assert (frames[0] == frames[1]).all()
        assert (frames[0] == frames[2]).all()


def test_targets_stay_as_they_are() -> None:
    boxes = tv_tensors.BoundingBoxes([[1, 2, 30, 40]], format="XYXY", canvas_size=(120, 160))
    image = tv_tensors.Image(PICTURE)
    assert transforms.ColorTwist(hue=90)({"image": image, "boxes": boxes})["boxes"] is boxes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.ColorTwist(contrast=-1), "contrast must be a number or a pair (low, high) of at least 0, "),
        (lambda: transforms.HSV(hue=(5, 1)), "hue must be a number or a pair (low, high), got (5, 1)"),
        (lambda: transforms.SaltAndPepper(1.5), "of at least 0 and at most 1, got 1.5"),
        (lambda: transforms.ColorSpace("Lab"), "space must be 'YCbCr' or 'BGR', got 'Lab'; for grey images use v2.G"),
        (lambda: transforms.LookupTable([1, 2]), "values must be 256 numbers of uint8 or float32, got torch.int64 of"),
        (lambda: transforms.Water(interpolation="cubic"), "interpolation must be NEAREST or BILINEAR, got 'cubic'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_one_script_runs_with_both_loaders(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Transforms without random numbers give DataLoader's batches."""
    folder = write_photographs(tmp_path)
    chain = [v2.ToImage(), v2.Resize((64, 64), v2.InterpolationMode.NEAREST_EXACT), INVERT, transforms.BGR()]
    chain += [transforms.Sphere(), transforms.Water(phase=1.0)]
    chain += [transforms.Dilate(), transforms.Erode((5, 3)), transforms.MedianBlur(), transforms.MedianBlur((1, 5))]
    chain += [transforms.Paste(1.3, 0.2, 1, fill=(9, 8, 7))]
    dataset = ImageFolder(str(folder.root), v2.Compose(chain))
    loader = DALILoader(dataset, 4, device="cpu")
    for (images, labels), (expected, expected_labels) in zip(loader, DataLoader(dataset, 4), strict=True):
        assert (images == expected).all()
        assert (labels == expected_labels).all()
    loader.explain()
    text = " ".join(capsys.readouterr().out.split())
    assert "sphere; water" in text
    assert "11 of 11 transforms run in DALI" in text
