"""Samples with boxes, key points and masks, and torchvision's transforms with the parameters that torchdali drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors

from torchdali.tools.parity.replay import Replayed

SEED = 7


def make_boxes(rng: np.random.Generator, size: tuple[int, int], count: int) -> torch.Tensor:
    """Return boxes XYXY of all sizes, most of them inside of the image."""
    height, width = size
    low = rng.uniform(-0.05, 0.9, (count, 2)) * (width, height)
    high = low + rng.uniform(0.02, 0.6, (count, 2)) * (width, height)
    return torch.from_numpy(np.concatenate((low, high), axis=1).astype(np.float32))


class Annotated(Dataset[Any]):
    """Photographs with made-up annotations, as a detection dataset returns them."""

    def __init__(
        self,
        images: Sequence[Any],
        count: int,
        box_format: str = "XYXY",
        dtype: torch.dtype = torch.float32,
        masks: bool = True,
        points: bool = True,
    ) -> None:
        self.images, self.count, self.format, self.dtype = images, count, box_format, dtype
        self.masks, self.points = masks, points

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        rng = np.random.default_rng(index)
        image = tv_tensors.Image(self.images[index % len(self.images)])
        size = cast("tuple[int, int]", tuple(image.shape[-2:]))
        count = int(rng.integers(1, 6))
        boxes: Any = tv_tensors.BoundingBoxes(make_boxes(rng, size, count), format="XYXY", canvas_size=size)  # pyright: ignore
        boxes = tv_tensors.BoundingBoxes(  # pyright: ignore
            _convert(boxes, self.format).to(self.dtype), format=self.format, canvas_size=size
        )
        target = {
            "boxes": boxes,
            "labels": torch.from_numpy(rng.integers(1, 91, count)),
            "area": torch.from_numpy(rng.random(count).astype(np.float32)),
            "image_id": index,
            "names": [f"thing {i}" for i in range(count)],
        }
        if self.masks:
            coarse = rng.random((count, 8, 8)) < 0.4
            target["masks"] = tv_tensors.Mask(torch.from_numpy(_enlarge(coarse, size).astype(np.uint8)))
            target["semantic"] = tv_tensors.Mask(torch.from_numpy(_enlarge(rng.integers(0, 9, (8, 8)), size)))
        if self.points:
            places = rng.random((count, 4, 2)) * size[::-1]
            target["points"] = tv_tensors.KeyPoints(torch.from_numpy(places.astype(np.float32)), canvas_size=size)
        return image, target


def _enlarge(values: Any, size: tuple[int, int]) -> Any:
    """Return ``(..., 8, 8)`` values as ``(..., height, width)`` with ragged edges."""
    rows, columns = (np.arange(side) * 8 // side for side in size)
    return values[..., rows, :][..., columns]


def _convert(boxes: Any, box_format: str) -> torch.Tensor:
    from torchvision.transforms.v2 import functional as F

    new = tv_tensors.BoundingBoxFormat[box_format]
    return F.convert_bounding_box_format(boxes, new_format=new).as_subclass(torch.Tensor)


class Given(Replayed):
    """A dataset with torchvision's own transforms, each with the parameters that torchdali draws for the sample."""

    def __init__(self, dataset: Any, chain: Sequence[Any]) -> None:
        super().__init__(dataset, chain, SEED)


def load_expected(dataset: Any, chain: Sequence[Any], batch_size: int, collate_fn: Any) -> list[Any]:
    """Return the batches that DataLoader makes with the parameters that torchdali draws."""
    return list(DataLoader(Given(dataset, chain), batch_size, collate_fn=collate_fn))
