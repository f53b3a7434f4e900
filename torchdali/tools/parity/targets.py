"""Boxes, key points and masks in the certificate: how far torchdali's are from torchvision's, with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2 as annotated_v2
from torchvision.transforms.v2 import functional as F

from torchdali import DALILoader
from torchdali.samples.annotations import is_annotation
from torchdali.tools.parity.case import GroupCase, GroupDifferences
from torchdali.tools.parity.compare import describe_mismatch, subtract
from torchdali.tools.parity.replay import Replayed, list_leaves
from torchdali.transforms import Jitter, Paste, Sphere, Water

__all__ = ["TARGETS", "compare_targets", "measure_targets"]

v2 = cast("Any", annotated_v2)  # torchvision's transforms accept more than their annotations tell

_SEED = 7
_BATCH = 4
_COARSE = 8
"""Cells of a mask along each side."""


_WARP = ((2e-4, 2e-4, 1e-4), "products of float32 matrices in another order")
_FILL: Any = {tv_tensors.Mask: 3, "others": 0}

TARGETS: dict[str, GroupCase] = {
    "targets RandomHorizontalFlip": GroupCase([v2.RandomHorizontalFlip()]),
    "targets RandomVerticalFlip": GroupCase([v2.RandomVerticalFlip()]),
    "targets Resize": GroupCase([v2.Resize((70, 110))]),
    "targets Resize max_size": GroupCase([v2.Resize(None, max_size=90)]),
    "targets RandomResize": GroupCase([v2.RandomResize(60, 140)]),
    "targets RandomShortestSize": GroupCase([v2.RandomShortestSize([64, 80, 96], max_size=110)]),
    "targets ScaleJitter": GroupCase([v2.ScaleJitter((130, 150), (0.4, 1.5))]),
    "targets RandomZoomOut": GroupCase([v2.RandomZoomOut(fill=_FILL)]),
    "targets CenterCrop": GroupCase([v2.CenterCrop((101, 190))]),
    "targets RandomCrop": GroupCase([v2.RandomCrop(150, padding=(3, 5, 7, 9), pad_if_needed=True, fill=_FILL)]),
    "targets RandomResizedCrop": GroupCase([v2.RandomResizedCrop((90, 80))]),
    "targets RandomIoUCrop": GroupCase([v2.RandomIoUCrop()]),
    "targets Pad": GroupCase([v2.Pad((3, 0, 5, 7), fill=_FILL)]),
    "targets RandomRotation": GroupCase([v2.RandomRotation((-40, 40), fill=_FILL)], *_WARP),
    "targets RandomAffine": GroupCase(
        [v2.RandomAffine((-30, 30), (0.1, 0.2), (0.7, 1.3), (-10, 10, -5, 5), fill=_FILL)], *_WARP
    ),
    "targets RandomPerspective": GroupCase([v2.RandomPerspective(0.4, p=0.7, fill=_FILL)], *_WARP),
    "targets Water": GroupCase([Water(phase=(0, 6.3))]),
    "targets Water fixed": GroupCase([Water((5, 8), (0.1, 0.06), phase=1.0)]),
    "targets Sphere": GroupCase([Sphere()]),
    "targets Jitter": GroupCase([Jitter(8)]),
    "targets Paste": GroupCase([Paste(fill=(9, 8, 7))]),
    "targets RandomApply": GroupCase([v2.RandomApply([v2.RandomResizedCrop(90), v2.RandomHorizontalFlip()])]),
    "targets RandomChoice": GroupCase([v2.RandomChoice([v2.RandomCrop(90), v2.Resize((80, 100))])]),
    "targets RandomOrder": GroupCase([v2.RandomOrder([v2.Resize((150, 140)), v2.RandomCrop(86)])]),
    "targets of boxes": GroupCase(
        [
            v2.ClampBoundingBoxes(),
            v2.ConvertBoundingBoxFormat("CXCYWH"),
            v2.RandomCrop(90),
            v2.SanitizeBoundingBoxes(min_size=4),
        ]
    ),
    "targets of key points": GroupCase([v2.SetClampingMode("hard"), v2.RandomRotation((-40, 40)), v2.ClampKeyPoints()]),
    "targets ToDtype": GroupCase(
        [v2.ToDtype({tv_tensors.Mask: torch.int64, tv_tensors.BoundingBoxes: torch.float64, "others": None})]
    ),
    "targets of SSD": GroupCase(
        [v2.RandomZoomOut(fill=_FILL), v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()]
    ),
    "targets of large scale jitter": GroupCase(
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


def measure_targets(case: GroupCase, images: Any, device: str | torch.device) -> GroupDifferences:
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
    differences = compare_targets(ours, Replayed(dataset, case.chain, _SEED))
    if not differences.error and len(differences.figures) < 3:
        return GroupDifferences(error="there is no box, no key point or no mask to compare")
    return differences


def compare_targets(ours: Sequence[Any], theirs: Any) -> GroupDifferences:
    """Compare the boxes, key points and masks of samples. A kind that no sample has is left out.

    Figures of boxes and key points are the largest difference of a coordinate, in pixels. That of masks is the share of
    their pixels that differ.
    """
    figures: dict[str, float] = {}
    off = total = 0
    for actual, expected in _pair_leaves(ours, theirs):
        if mismatch := describe_mismatch(actual, expected):
            return GroupDifferences(error=mismatch)
        difference = subtract(actual, expected)
        if isinstance(expected, tv_tensors.Mask):
            off, total = off + int(difference.count_nonzero()), total + difference.numel()
            figures["masks"] = off / max(total, 1)
        else:
            name = "boxes" if isinstance(expected, tv_tensors.BoundingBoxes) else "points"
            figures[name] = max(figures.get(name, 0.0), float(difference.max()) if difference.numel() else 0.0)
    return GroupDifferences(figures)


def _pair_leaves(ours: Sequence[Any], expected: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the boxes, key points and masks of both sides."""
    for i, sample in enumerate(ours):
        pairs = zip(list_leaves(sample), list_leaves(expected[i]), strict=True)
        yield from (pair for pair in pairs if is_annotation(pair[1]))
