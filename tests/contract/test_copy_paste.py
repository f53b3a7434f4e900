"""CopyPaste: objects of other samples, with their boxes, masks and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.crops import PHOTOGRAPH
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.transforms import CopyPaste

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Objects(Dataset[Any]):
    """Pieces of a photograph below 200, and in each two boxes of one brightness above it, which is their label."""

    def __init__(self, sizes: list[tuple[int, int]], form: str = "XYXY") -> None:
        self.sizes, self.form = sizes, form

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        height, width = size = self.sizes[index]
        image = (torch.from_numpy(PHOTOGRAPH[50 + index : 50 + index + height, 60 : 60 + width]) // 2).permute(2, 0, 1)
        rng = np.random.default_rng(index)
        masks = torch.zeros(2, *size, dtype=torch.uint8)
        corners = []
        for number in range(2):
            top, left = (int(rng.integers(0, side - 14)) for side in size)
            masks[:, top : top + 12, left : left + 9] = 0
            masks[number, top : top + 12, left : left + 9] = 1
            corners.append([left, top, left + 9, top + 12])
        labels = torch.tensor([200 + 2 * index, 201 + 2 * index])
        for mask, label in zip(masks, labels, strict=True):
            image[:, mask.bool()] = int(label)
        boxes = tv_tensors.BoundingBoxes(find_boxes(masks), format="XYXY", canvas_size=size)
        target = {
            "boxes": v2.ConvertBoundingBoxFormat(self.form)(boxes),
            "masks": tv_tensors.Mask(masks),
            "labels": labels,
            "area": masks.flatten(1).sum(1).float(),
            "image_id": index,
        }
        return tv_tensors.Image(image), target


def find_boxes(masks: torch.Tensor) -> torch.Tensor:
    """What the corners around each mask are, pixel by pixel."""
    boxes = []
    for mask in masks:
        rows, columns = np.nonzero(mask.numpy())
        boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return torch.tensor(np.array(boxes), dtype=torch.float32)


def lists(samples: Any) -> Any:
    return tuple(zip(*samples, strict=True))


def check(images: Any, targets: Any, form: str = "XYXY") -> int:
    """Compare boxes, masks and labels with the brightness of images; return how many objects were pasted."""
    pasted = 0
    for image, target in zip(images, targets, strict=True):
        image, masks = image.cpu().as_subclass(torch.Tensor), target["masks"].cpu().as_subclass(torch.Tensor)
        labels = target["labels"].tolist()
        assert len(labels) == len(masks) == len(target["boxes"]) == len(target["area"]) > 0
        assert target["area"].tolist() == masks.flatten(1).sum(1).tolist()
        for mask, label in zip(masks, labels, strict=True):
            assert torch.equal(mask.bool(), (image == label).all(0))
        assert sorted(labels) == sorted(image[image >= 200].unique().tolist())
        boxes = tv_tensors.wrap(target["boxes"].cpu(), like=target["boxes"])
        assert str(boxes.format.value) == form
        assert torch.equal(v2.ConvertBoundingBoxFormat("XYXY")(boxes).as_subclass(torch.Tensor), find_boxes(masks))
        pasted += sum(label // 2 - 100 != target["image_id"] for label in labels)
    return pasted


@pytest.mark.parametrize("form", ["XYXY", "XYWH", "CXCYWH"])
def test_objects_masks_boxes_and_labels_agree(form: str) -> None:
    torch.manual_seed(0)
    samples = lists([Objects([(40, 50)] * 6, form)[i] for i in range(6)])
    copy_paste = CopyPaste(p=0.8)
    counts = [check(*copy_paste(*samples), form) for _ in range(30)]
    assert 30 * 12 * 0.8 * 0.5 * 0.8 < sum(counts) < 30 * 12 * 0.8 * 0.5 * 1.2
    assert all(torch.equal(image, Objects([(40, 50)] * 6)[i][0]) for i, image in enumerate(samples[0]))  # unchanged
    assert check(*CopyPaste(p=0)(*samples), form) == 0
    assert check(*CopyPaste(p=1, share=1)(torch.stack(samples[0]), samples[1]), form) == 12
    assert check(*CopyPaste(p=1, share=1)(samples[0][:1], samples[1][:1]), form) == 0


def test_other_sizes_and_hidden_objects() -> None:
    dataset = Objects([(40, 50), (80, 100)])
    images, targets = lists([dataset[0], dataset[1]])
    (small, large), (first, second) = CopyPaste(1, 1)(list(images), targets)
    assert (small.shape, large.shape) == ((3, 40, 50), (3, 80, 100))
    assert torch.equal(first["masks"][-2:].as_subclass(torch.Tensor), targets[1]["masks"][:, ::2, ::2])
    assert torch.equal(first["boxes"].as_subclass(torch.Tensor), find_boxes(first["masks"].as_subclass(torch.Tensor)))
    assert (large[:, second["masks"][-1].bool()].float() - 201).abs().max() < 60  # resized colours
    image, target = dataset[0]
    whole = {**target, "masks": tv_tensors.Mask(torch.ones(1, 40, 50, dtype=torch.uint8)), "labels": torch.tensor([9])}
    whole |= {"boxes": target["boxes"][:1], "area": torch.tensor([2000.0])}
    other = {**dataset[1][1], "boxes": v2.ConvertBoundingBoxFormat("XYWH")(dataset[1][1]["boxes"])}
    _, (mixed, _) = CopyPaste(1, 1)([large, large], [{**other, "boxes": targets[1]["boxes"]}, other])
    assert torch.equal(mixed["boxes"].as_subclass(torch.Tensor), targets[1]["boxes"].as_subclass(torch.Tensor))
    _, (covered, _) = CopyPaste(1, 1)([image, image], [target, whole])
    assert covered["labels"].tolist() == [9]
    _, (_, left) = CopyPaste(1, 1, min_pixels=1900)([image, image], [target, whole])
    assert left["labels"].tolist() == []


def test_both_loaders(device: str) -> None:
    dataset = Objects([(40, 50)] * 4)
    copy_paste = CopyPaste(p=1, share=1)
    loader = DALILoader(
        dataset, 4, transform=v2.RandomHorizontalFlip(), collate_fn=lists, batch_transform=copy_paste, device=device
    )
    assert sum(check(*batch) for batch in loader) == 8
    assert sum(check(*copy_paste(*batch)) for batch in DataLoader(dataset, 4, collate_fn=lists)) == 8


def test_refused() -> None:
    image, target = Objects([(40, 50)])[0]
    assert repr(CopyPaste()) == "CopyPaste(p=0.5, share=0.5, min_pixels=1)"
    for options in ({"p": 2}, {"share": -1}):
        with pytest.raises(ValueError, match="p and share must be probabilities"):
            CopyPaste(**options)
    with pytest.raises(ValueError, match="min_pixels must be at least 1, got 0"):
        CopyPaste(min_pixels=0)
    with pytest.raises(ValueError, match="takes a target for each image, got 1 images, 2 targets"):
        CopyPaste()([image], [target, target])
    with pytest.raises(TypeError, match="needs masks and boxes in each target, and one has no masks"):
        CopyPaste()([image], [{"boxes": target["boxes"]}])
    with pytest.raises(TypeError, match="does not take rotated boxes"):
        CopyPaste()([image], [{**target, "boxes": torch.zeros(2, 5)}])
