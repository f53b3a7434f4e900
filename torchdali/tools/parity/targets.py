"""Boxes, key points and masks in the certificate: how far torchdali's are from torchvision's, with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2 as annotated_v2
from torchvision.transforms.v2 import functional as F

from torchdali import DALILoader
from torchdali.samples.annotations import is_annotation
from torchdali.tools.parity.compare import describe_exceeded
from torchdali.tools.parity.replay import Replayed, list_leaves
from torchdali.transforms import Jitter, Sphere, Water

__all__ = [
    "TARGETS",
    "TargetCase",
    "TargetDifferences",
    "compare_targets",
    "find_exceeded_target_bounds",
    "measure_targets",
]

v2 = cast("Any", annotated_v2)  # torchvision's transforms accept more than their annotations tell

_SEED = 7
_BATCH = 4
_COARSE = 8
"""Cells of a mask along each side."""


class TargetCase(NamedTuple):
    """A chain and its bounds.

    Attributes:
        chain: The transforms.
        pixels: Bound of the distance of a coordinate of boxes and key points, in pixels.
        masks: Bound of the share of the pixels of masks that differ.
        why: Reason, in one line, if a bound is not 0.
    """

    chain: list[Any]
    pixels: float = 0.0
    masks: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class TargetDifferences:
    """Differences of one chain's boxes, key points and masks from torchvision's, on one device.

    Attributes:
        boxes: Largest difference of a coordinate of a box, in pixels.
        points: The same of key points.
        masks: Share of the pixels of masks that differ.
        error: Why nothing was measured, or empty.
    """

    boxes: float = 0.0
    points: float = 0.0
    masks: float = 0.0
    error: str = ""


_WARP = (2e-4, 1e-4, "products of float32 matrices in another order")
_FILL: Any = {tv_tensors.Mask: 3, "others": 0}

TARGETS: dict[str, TargetCase] = {
    "targets RandomHorizontalFlip": TargetCase([v2.RandomHorizontalFlip()]),
    "targets RandomVerticalFlip": TargetCase([v2.RandomVerticalFlip()]),
    "targets Resize": TargetCase([v2.Resize((70, 110))]),
    "targets Resize max_size": TargetCase([v2.Resize(None, max_size=90)]),
    "targets RandomResize": TargetCase([v2.RandomResize(60, 140)]),
    "targets RandomShortestSize": TargetCase([v2.RandomShortestSize([64, 80, 96], max_size=110)]),
    "targets ScaleJitter": TargetCase([v2.ScaleJitter((130, 150), (0.4, 1.5))]),
    "targets RandomZoomOut": TargetCase([v2.RandomZoomOut(fill=_FILL)]),
    "targets CenterCrop": TargetCase([v2.CenterCrop((101, 190))]),
    "targets RandomCrop": TargetCase([v2.RandomCrop(150, padding=(3, 5, 7, 9), pad_if_needed=True, fill=_FILL)]),
    "targets RandomResizedCrop": TargetCase([v2.RandomResizedCrop((90, 80))]),
    "targets RandomIoUCrop": TargetCase([v2.RandomIoUCrop()]),
    "targets Pad": TargetCase([v2.Pad((3, 0, 5, 7), fill=_FILL)]),
    "targets RandomRotation": TargetCase([v2.RandomRotation((-40, 40), fill=_FILL)], *_WARP),
    "targets RandomAffine": TargetCase(
        [v2.RandomAffine((-30, 30), (0.1, 0.2), (0.7, 1.3), (-10, 10, -5, 5), fill=_FILL)], *_WARP
    ),
    "targets RandomPerspective": TargetCase([v2.RandomPerspective(0.4, p=0.7, fill=_FILL)], *_WARP),
    "targets Water": TargetCase([Water(phase=(0, 6.3))]),
    "targets Water fixed": TargetCase([Water((5, 8), (0.1, 0.06), phase=1.0)]),
    "targets Sphere": TargetCase([Sphere()]),
    "targets Jitter": TargetCase([Jitter(8)]),
    "targets RandomApply": TargetCase([v2.RandomApply([v2.RandomResizedCrop(90), v2.RandomHorizontalFlip()])]),
    "targets RandomChoice": TargetCase([v2.RandomChoice([v2.RandomCrop(90), v2.Resize((80, 100))])]),
    "targets RandomOrder": TargetCase([v2.RandomOrder([v2.Resize((150, 140)), v2.RandomCrop(86)])]),
    "targets of boxes": TargetCase(
        [
            v2.ClampBoundingBoxes(),
            v2.ConvertBoundingBoxFormat("CXCYWH"),
            v2.RandomCrop(90),
            v2.SanitizeBoundingBoxes(min_size=4),
        ]
    ),
    "targets of key points": TargetCase(
        [v2.SetClampingMode("hard"), v2.RandomRotation((-40, 40)), v2.ClampKeyPoints()]
    ),
    "targets ToDtype": TargetCase(
        [v2.ToDtype({tv_tensors.Mask: torch.int64, tv_tensors.BoundingBoxes: torch.float64, "others": None})]
    ),
    "targets of SSD": TargetCase(
        [v2.RandomZoomOut(fill=_FILL), v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()]
    ),
    "targets of large scale jitter": TargetCase(
        [
            v2.ScaleJitter((160, 160)),
            v2.RandomCrop((160, 160), pad_if_needed=True, fill=_FILL),
            v2.RandomHorizontalFlip(),
            v2.SanitizeBoundingBoxes(),
        ]
    ),
}
"""Cases of the certificate. Each rule that moves boxes, key points or masks is in one of them."""


class _Annotated(Dataset[Any]):
    """The images of a folder with boxes, key points and masks that are made up."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        image = tv_tensors.Image(F.pil_to_tensor(self.images[index][0]))
        rng = np.random.default_rng(index)
        height, width = size = cast("tuple[int, int]", tuple(image.shape[-2:]))
        count = int(rng.integers(2, 6))
        low = rng.uniform(-0.05, 0.8, (count, 2))
        corners = np.concatenate((low, low + rng.uniform(0.05, 0.6, (count, 2))), axis=1) * (
            width,
            height,
            width,
            height,
        )
        points = rng.random((count, 3, 2)) * (width, height)
        rows, columns = (np.arange(side) * _COARSE // side for side in size)
        masks = (rng.random((count, _COARSE, _COARSE)) < 0.4)[:, rows][..., columns]
        labels = rng.integers(1, 91, count)
        return image, {
            "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(corners).float(), format="XYXY", canvas_size=size),  # pyright: ignore
            "points": tv_tensors.KeyPoints(torch.from_numpy(points).float(), canvas_size=size),  # pyright: ignore
            "masks": tv_tensors.Mask(torch.from_numpy(masks.astype(np.uint8))),
            "labels": torch.from_numpy(labels),
        }


def measure_targets(case: TargetCase, images: Any, device: str | torch.device) -> TargetDifferences:
    """Measure how far boxes, key points and masks beside images are from torchvision's.

    Args:
        case: The chain.
        images: A dataset of images, with other values behind them.
        device: Where the images and masks are transformed.
    """
    dataset = _Annotated(images)
    chain = v2.Compose(case.chain)
    with DALILoader[Any](dataset, _BATCH, transform=chain, seed=_SEED, device=device, collate_fn=list) as loader:
        ours = [sample for batch in loader for sample in batch]
    differences, total = compare_targets(ours, Replayed(dataset, case.chain, _SEED))
    if not total and not differences.error:
        return TargetDifferences(error="there is no mask to compare")
    return differences


def compare_targets(ours: Sequence[Any], theirs: Any) -> tuple[TargetDifferences, int]:
    """Compare the boxes, key points and masks of samples. Return the differences, and the number of masks' pixels."""
    largest, off, total = {"BoundingBoxes": 0.0, "KeyPoints": 0.0}, 0, 0
    for actual, expected in _pair_leaves(ours, theirs):
        if (type(actual), actual.dtype, actual.shape) != (type(expected), expected.dtype, expected.shape):
            return TargetDifferences(error=f"{_describe(actual)}, expected {_describe(expected)}"), total
        difference = (actual.cpu().double() - expected.double()).abs().nan_to_num(nan=float("inf"))
        if isinstance(expected, tv_tensors.Mask):
            off, total = off + int(difference.count_nonzero()), total + difference.numel()
        elif difference.numel():
            name = type(expected).__name__
            largest[name] = max(largest[name], float(difference.max()))
    return TargetDifferences(largest["BoundingBoxes"], largest["KeyPoints"], off / max(total, 1)), total


def _pair_leaves(ours: Sequence[Any], expected: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the boxes, key points and masks of both sides."""
    for i, sample in enumerate(ours):
        pairs = zip(list_leaves(sample), list_leaves(expected[i]), strict=True)
        yield from (pair for pair in pairs if is_annotation(pair[1]))


def _describe(leaf: torch.Tensor) -> str:
    return f"{type(leaf).__name__} {tuple(leaf.shape)} of {leaf.dtype}"


def find_exceeded_target_bounds(case: TargetCase, measured: TargetDifferences) -> str:
    """Return which bounds of a case are exceeded, in words, or an empty string."""
    return measured.error or describe_exceeded(
        ("boxes", measured.boxes, case.pixels),
        ("points", measured.points, case.pixels),
        ("masks", measured.masks, case.masks),
    )
