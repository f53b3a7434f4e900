"""Pictures with made-up boxes and masks, and the chains of torchvision's detection and segmentation references."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

_FILL = {tv_tensors.Image: (123, 117, 104), tv_tensors.Mask: 0, "others": 0}
_SEGMENTATION_FILL = {tv_tensors.Image: 0, tv_tensors.Mask: 255}

CHAINS: dict[str, list[v2.Transform]] = {
    "lsj": [
        v2.ScaleJitter((1024, 1024), antialias=True),
        v2.RandomCrop((1024, 1024), pad_if_needed=True, fill=_FILL),
        v2.RandomHorizontalFlip(),
        v2.SanitizeBoundingBoxes(),
    ],
    "multiscale": [
        v2.RandomShortestSize(list(range(480, 801, 32)), max_size=1333, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.SanitizeBoundingBoxes(),
    ],
    "ssd300": [
        v2.RandomPhotometricDistort(),
        v2.RandomZoomOut(fill=_FILL),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(),
        v2.Resize((300, 300), antialias=True),
        v2.SanitizeBoundingBoxes(),
    ],
    "segmentation": [
        v2.RandomResize(260, 1040, antialias=True),
        v2.RandomCrop((480, 480), pad_if_needed=True, fill=_SEGMENTATION_FILL),
        v2.RandomHorizontalFlip(),
    ],
}
"""Transforms by the name of a case, between ``ToImage`` and the conversion to float32."""


def make_chain(case: str) -> v2.Transform:
    """Return all transforms of a case."""
    return v2.Compose([v2.ToImage(), *CHAINS[case], v2.ToDtype(torch.float32, scale=True)])


class AnnotatedPictures(Dataset[Any]):
    """Pictures with 1 to 20 boxes, 7 on the average, as dictionaries beside an image.

    Masks are kept as run lengths, as in COCO: ellipses in the boxes. With the case ``segmentation`` there is one mask
    of 21 classes instead, of the same ellipses.

    Args:
        folder: Folder with the pictures.
        case: Name of a case.
        masks: Whether there are masks beside the boxes.
        transform: What each sample goes through, or None to return paths instead of images, for a loader that decodes.
    """

    def __init__(self, folder: Path, case: str, masks: bool, transform: v2.Transform | None) -> None:
        self.paths = sorted(folder.rglob("*.jpg"))
        self.case, self.masks, self.transform = case, masks, transform
        rng = np.random.default_rng(0)
        self.sizes = [Image.open(path).size for path in self.paths]
        self.boxes: list[np.ndarray] = []
        self.runs: list[list[np.ndarray]] = []
        for width, height in self.sizes:
            count = int(np.clip(rng.geometric(1 / 7), 1, 20))
            corner = rng.uniform(0, 0.7, (count, 2)) * (width, height)
            side = np.exp(rng.uniform(np.log(16), np.log(200), (count, 2)))
            boxes = np.concatenate((corner, np.minimum(corner + side, (width, height))), axis=1)
            self.boxes.append(boxes.astype(np.float32))
            with_masks = masks or case == "segmentation"
            self.runs.append([_encode(box, width, height) for box in boxes] if with_masks else [])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        width, height = self.sizes[index]
        target: dict[str, Any] = {}
        masks = [_decode(runs, width, height) for runs in self.runs[index]]
        if self.case == "segmentation":
            classes = np.zeros((1, height, width), np.uint8)
            for number, mask in enumerate(masks):
                classes[0][mask.astype(bool)] = number % 20 + 1
            target["mask"] = tv_tensors.Mask(torch.from_numpy(classes))
        else:
            values = torch.from_numpy(self.boxes[index].copy())
            target["boxes"] = tv_tensors.BoundingBoxes(values, format="XYXY", canvas_size=(height, width))
            target["labels"] = torch.arange(len(values)) % 90 + 1
            if self.masks:
                target["masks"] = tv_tensors.Mask(torch.from_numpy(np.stack(masks)))
        if self.transform is None:
            return self.paths[index], target
        with Image.open(self.paths[index]) as file:
            return self.transform(file.convert("RGB"), target)


def _encode(box: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return the run lengths of an ellipse, column after column, as COCO has them: zeros, ones, zeros, and so on."""
    y, x = np.mgrid[:height, :width]
    middle, half = (box[:2] + box[2:]) / 2, np.maximum((box[2:] - box[:2]) / 2, 1)
    inside = (((x - middle[0]) / half[0]) ** 2 + ((y - middle[1]) / half[1]) ** 2 <= 1).T.reshape(-1)
    ends = np.flatnonzero(np.diff(inside)) + 1
    runs = np.diff(ends, prepend=0, append=inside.size)
    return np.insert(runs, 0, 0) if inside[0] else runs


def _decode(runs: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return a mask, ``(height, width)`` of 0 and 1."""
    values = np.repeat(np.arange(len(runs), dtype=np.uint8) & 1, runs)
    return np.ascontiguousarray(values.reshape(width, height).T)


def collate(samples: list[Any]) -> Any:
    """Return the parts of a batch as tuples: sizes and numbers of boxes differ."""
    return tuple(zip(*samples, strict=True))
