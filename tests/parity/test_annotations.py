"""Boxes, masks and key points move with the image, as torchvision moves them with the same parameters."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from tests.helpers.annotated import SEED, Annotated, load_expected
from torchdali import DALILoader
from torchdali.transforms import Jitter, Paste, Sphere, Water
from torchdali.transforms.targets import Boxes

FILL: Any = {tv_tensors.Mask: 3, "others": [123.0, 117.0, 104.0]}
END = [
    v2.ToDtype(torch.float32, scale=True),
    v2.ConvertBoundingBoxFormat("XYXY"),
    v2.SanitizeBoundingBoxes(labels_getter=lambda sample: (sample[1]["labels"], sample[1]["area"])),
    v2.ToPureTensor(),
]
PRESETS: dict[str, list[Any]] = {
    "ssdlite": [v2.RandomIoUCrop(), v2.RandomHorizontalFlip()],
    "ssd": [
        v2.RandomPhotometricDistort(),
        v2.RandomZoomOut(fill=FILL),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(),
        v2.Resize((60, 60)),
    ],
    "hflip": [v2.RandomHorizontalFlip()],
    "multiscale": [v2.RandomShortestSize([48, 56, 64, 72], max_size=100), v2.RandomHorizontalFlip()],
    "lsj": [
        v2.ScaleJitter((96, 96)),
        v2.RandomCrop((96, 96), pad_if_needed=True, fill=FILL),
        v2.RandomHorizontalFlip(),
    ],
}
CHAINS: dict[str, list[Any]] = {
    "both flips": [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()],
    "resize": [v2.Resize(40), v2.CenterCrop(36)],
    "resize both": [v2.Resize((40, 61))],
    "longest side": [v2.Resize(None, max_size=50)],
    "center crop, padded": [v2.CenterCrop((81, 60))],
    "crop with padding": [v2.RandomCrop(48, padding=(3, 5, 7, 9), pad_if_needed=True, fill=FILL)],
    "crop": [v2.RandomCrop((40, 30)), v2.RandomVerticalFlip()],
    "resized crop": [v2.RandomResizedCrop((40, 30))],
    "pad": [v2.Pad((3, 0, 5, 7), fill=FILL), v2.RandomHorizontalFlip()],
    "zoom out": [v2.RandomZoomOut(fill=FILL), v2.RandomHorizontalFlip()],
    "random resize": [v2.RandomResize(30, 60)],
    "rotation": [v2.RandomRotation([-40, 40], fill=FILL)],
    "affine": [v2.RandomAffine([-30, 30], (0.1, 0.2), (0.7, 1.3), (-10, 10, -5, 5), fill=FILL)],
    "perspective": [v2.RandomPerspective(0.4, p=0.7, fill=FILL)],
    "water": [Water(phase=(0, 6.3)), v2.RandomHorizontalFlip()],
    "water of one phase": [v2.RandomCrop(50), Water((5, 8), (0.1, 0.06), phase=1.0, fill=9)],
    "sphere": [v2.RandomHorizontalFlip(), Sphere(), v2.Pad(3)],
    "paste": [Paste(fill=(9, 8, 7)), v2.RandomHorizontalFlip()],
    "jitter": [Jitter(8), v2.Resize((40, 30))],
    "water or sphere": [v2.RandomApply([Water(phase=(0, 6.3))], p=0.5), v2.RandomChoice([Sphere(), Jitter(4)])],
    "flip and affine": [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.RandomAffine([-20, 20])],
    "apply": [v2.RandomApply([v2.RandomResizedCrop((40, 40)), v2.RandomHorizontalFlip()], p=0.5)],
    "choice": [v2.RandomChoice([v2.RandomCrop(30), v2.Resize((20, 50)), v2.RandomRotation([-20, 20])])],
    "order": [v2.RandomOrder([v2.Resize((50, 40)), v2.RandomCrop(16), v2.RandomHorizontalFlip()])],
    "iou crop": [v2.RandomApply([v2.RandomIoUCrop(), v2.Resize((50, 50))], p=0.7), v2.RandomIoUCrop()],
    "iou crop in any order": [v2.RandomOrder([v2.RandomIoUCrop(), v2.RandomZoomOut(), v2.RandomHorizontalFlip()])],
    "annotations": [
        v2.ClampBoundingBoxes(),
        v2.ConvertBoundingBoxFormat("CXCYWH"),
        v2.ToDtype({tv_tensors.BoundingBoxes: torch.float64, "others": None}),
        v2.Pad(4),
        v2.SanitizeBoundingBoxes(min_size=4, min_area=30),
    ],
    "photometric": [v2.RandomPhotometricDistort(p=1), v2.RandomCrop(40)],
}
WARPS = ("rotation", "affine", "perspective", "flip and affine", "choice")
COUNT = 20
"""Samples of a chain."""


def as_lists(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


def assert_same(ours: Any, expected: Any, tolerance: float, place: str = "") -> None:
    """Both are equal in structure, type, dtype, shape and value. Images may differ a little."""
    assert type(ours) is type(expected), place
    if isinstance(expected, (list, tuple)):
        assert_parts_same(dict(enumerate(ours)), dict(enumerate(cast("list[Any]", expected))), tolerance, place)
    elif isinstance(expected, dict):
        assert_parts_same(ours, cast("dict[Any, Any]", expected), tolerance, place)
    elif isinstance(expected, torch.Tensor):
        ours = ours.to("cpu")
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), place
        for name in ("canvas_size", "format", "clamping_mode"):
            assert getattr(ours, name, None) == getattr(expected, name, None), (place, name)
        if place.split("]")[1] == "[0":  # an image: batch, first part
            difference = (ours.float() - expected.float()).abs() / (1 if expected.is_floating_point() else 255)
            assert difference.mean() < 0.01, place
        else:
            torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance, msg=lambda text: f"{place}: {text}")
    else:
        assert ours == expected, place


def assert_parts_same(ours: dict[Any, Any], expected: dict[Any, Any], tolerance: float, place: str) -> None:
    assert list(ours) == list(expected), place
    for key, value in expected.items():
        assert_same(ours[key], value, tolerance, f"{place}[{key!r}]")


def assert_equals_torchvision(
    images: Any, chain: list[Any], device: str, tolerance: float = 0.0, count: int = COUNT, **form: Any
) -> None:
    dataset = Annotated(images, count, **form)
    loader = DALILoader(dataset, 4, transform=v2.Compose(chain), seed=SEED, device=device, collate_fn=as_lists)
    assert_same(list(loader), load_expected(dataset, chain, 4, as_lists), tolerance)


@pytest.fixture(scope="module")
def images(photographs: Any) -> list[torch.Tensor]:
    return [v2.functional.pil_to_tensor(photographs[i][0]) for i in range(len(photographs))]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_the_detection_reference(images: Any, device: str, name: str) -> None:
    assert_equals_torchvision(images, [*PRESETS[name], *END], device)


@pytest.mark.parametrize("name", CHAINS)
def test_chains(images: Any, device: str, name: str) -> None:
    assert_equals_torchvision(images, CHAINS[name], device, 2e-4 if name in WARPS else 0.0)


@pytest.mark.parametrize(("form", "dtype"), [("XYWH", torch.float32), ("CXCYWH", torch.float64), ("XYXY", torch.int64)])
def test_formats(images: Any, form: str, dtype: torch.dtype) -> None:
    chain = [v2.RandomZoomOut(), v2.RandomResizedCrop((40, 50)), v2.RandomHorizontalFlip(), v2.ClampBoundingBoxes()]
    assert_equals_torchvision(images, chain, "cpu", box_format=form, dtype=dtype)


SEGMENTATION = [
    v2.RandomResize(30, 90),
    v2.RandomHorizontalFlip(),
    v2.RandomCrop(48, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
    v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
    v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    v2.ToPureTensor(),
]


def test_the_preset_of_the_segmentation_reference(images: Any, device: str) -> None:
    assert_equals_torchvision(images, SEGMENTATION, device)


def test_a_thousandth_of_a_pixel_is_seen(images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flip = Boxes.flip
    monkeypatch.setattr(
        Boxes, "flip", lambda self, *args: (flip(self, *args), setattr(self, "values", self.values + 1e-3))
    )
    with pytest.raises(AssertionError, match="boxes"):
        assert_equals_torchvision(images, [v2.RandomHorizontalFlip()], "cpu")
