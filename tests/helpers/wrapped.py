"""torchvision's wrapped datasets of a few photographs, and their samples as DataLoader returns them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import skimage.data
import skimage.segmentation
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader
from torchvision import datasets
from torchvision.transforms import v2

SIZES = [(60, 90), (70, 50), (64, 64), (41, 83)]
CHAIN = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(1.0), v2.CenterCrop((40, 40)), v2.ClampBoundingBoxes()])


def write_images(folder: Path, suffix: str) -> list[str]:
    folder.mkdir(parents=True)
    picture = skimage.data.astronaut()
    for i, (height, width) in enumerate(SIZES):
        Image.fromarray(picture[i * 30 :, i * 40 :][:height, :width]).save(folder / f"{i:03}{suffix}", quality=90)
    return [f"{i:03}" for i in range(len(SIZES))]


def make_coco(root: Path) -> Any:
    names = write_images(root / "images", ".jpg")
    images = [{"id": 10 + i, "file_name": f"{name}.jpg"} for i, name in enumerate(names)]
    polygon = [[4, 4, 30, 4, 30, 30, 4, 30]]
    objects = [
        {"id": i, "image_id": 10 + i, "category_id": 1 + i, "bbox": [3 + i, 4, 20, 25], "area": 9, "iscrowd": 0}
        | {"segmentation": polygon}
        for i in range(3)  # the last image has no objects
    ]
    content = {"images": images, "annotations": objects, "categories": [{"id": i, "name": str(i)} for i in range(5)]}
    (root / "all.json").write_text(json.dumps(content))
    return datasets.wrap_dataset_for_transforms_v2(
        datasets.CocoDetection(root / "images", root / "all.json"), target_keys=("image_id", "boxes", "masks", "labels")
    )


def write_coco(root: Path, boxes: list[list[list[float]]]) -> Path:
    """Write a file of annotations with these boxes of each image."""
    names = write_images(root / "images", ".jpg")
    images = [{"id": 10 + i, "file_name": f"{name}.jpg"} for i, name in enumerate(names)]
    each = [(10 + i, box) for i, of_image in enumerate(boxes) for box in of_image]
    objects = [
        {"id": i, "image_id": image, "category_id": 3 + i, "bbox": box, "area": 9.5 + i, "iscrowd": i % 2}
        for i, (image, box) in enumerate(each)
    ]
    categories = [{"id": i, "name": str(i)} for i in range(20)]
    content = {"images": images, "annotations": objects, "categories": categories}
    (root / "all.json").write_text(json.dumps(content))
    return root


def make_objects(root: Path) -> Any:
    """Return a wrapped CocoDetection of polygons and run lengths, some of a crowd, and an object beside the image."""
    make_coco(root)
    content = json.loads((root / "all.json").read_text())
    height, width = SIZES[0]
    plain = {"size": [height, width], "counts": [600, 500, 40, 7, height * width - 1147]}
    two_parts = [[4.5, 4, 30, 9, 22, 40.2], [50, 20, 70, 25, 60, 44, 51, 40]]
    for number, (box, segmentation) in enumerate([([3, 4, 0, 2], plain), ([9, 1, 30, 44], two_parts)]):
        content["annotations"].append(
            {"id": 90 + number, "image_id": 10, "category_id": 3, "bbox": box, "area": 9, "iscrowd": 1 - number}
            | {"segmentation": segmentation}
        )
    (root / "all.json").write_text(json.dumps(content))
    return open_objects(root, ["iscrowd", "masks", "labels", "boxes"])


def open_objects(root: Path, keys: Any, **arguments: Any) -> Any:
    """Return the dataset that was written in a folder."""
    dataset = datasets.CocoDetection(root / "images", root / "all.json", **arguments)
    return datasets.wrap_dataset_for_transforms_v2(dataset, target_keys=keys)


FLOATS = [[[3.5, 4.25, 20.1, 25.7], [30.3, 20.6, 1.5, 30.0]], [], [[1.0, 2.0, 30.5, 40.0]], [[5.0, 6.0, 10.0, 9.1]]]


def make_coco_boxes(root: Path, boxes: Any = FLOATS, keys: Any = None, **arguments: Any) -> Any:
    write_coco(root, boxes)
    return datasets.wrap_dataset_for_transforms_v2(
        datasets.CocoDetection(root / "images", root / "all.json", **arguments), target_keys=keys
    )


def make_voc(root: Path) -> Path:
    voc = root / "VOCdevkit" / "VOC2012"
    names = write_images(voc / "JPEGImages", ".jpg")
    for folder in ("Annotations", "SegmentationClass", "ImageSets/Main", "ImageSets/Segmentation"):
        (voc / folder).mkdir(parents=True)
    for i, name in enumerate(names):
        box = f"<bndbox><xmin>{i}</xmin><ymin>5</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
        text = f"<annotation><object><name>cat</name>{box}</object></annotation>"
        (voc / "Annotations" / f"{name}.xml").write_text(text)
        mask = Image.fromarray((np.indices(SIZES[i]).sum(0) // 9 % 21).astype(np.uint8), "L").convert("P")
        mask.save(voc / "SegmentationClass" / f"{name}.png")
    for kind in ("Main", "Segmentation"):
        (voc / "ImageSets" / kind / "train.txt").write_text("\n".join(names))
    return root


def make_voc_boxes(root: Path) -> Any:
    dataset = datasets.VOCDetection(str(make_voc(root)), image_set="train")
    return datasets.wrap_dataset_for_transforms_v2(dataset)


def make_voc_masks(root: Path) -> Any:
    dataset = datasets.VOCSegmentation(str(make_voc(root)), image_set="train")
    return datasets.wrap_dataset_for_transforms_v2(dataset)


def make_kitti(root: Path) -> Any:
    training = root / "Kitti" / "raw" / "training"
    for i, name in enumerate(write_images(training / "image_2", ".png")):
        (training / "label_2").mkdir(exist_ok=True)
        with (training / "label_2" / f"{name}.txt").open("w", newline="") as file:
            csv.writer(file, delimiter=" ").writerow(["Car", 0.0, 0, 0.1, i, 2.5, 30, 33, *[1.0] * 7])
    return datasets.wrap_dataset_for_transforms_v2(datasets.Kitti(str(root), train=True))


def make_wider_face(root: Path) -> Any:
    wider = root / "widerface"
    names = write_images(wider / "WIDER_train" / "images", ".jpg")
    (wider / "wider_face_split").mkdir()
    lines = [f"{name}.jpg\n1\n{i} 3 20 22 0 0 0 0 0 0 \n" for i, name in enumerate(names)]
    (wider / "wider_face_split" / "wider_face_train_bbx_gt.txt").write_text("".join(lines))
    for other in ("WIDER_val", "WIDER_test"):
        (wider / other).mkdir()
    return datasets.wrap_dataset_for_transforms_v2(datasets.WIDERFace(str(root), split="train"))


def make_celeba(root: Path) -> Any:
    celeba = datasets.CelebA.__new__(datasets.CelebA)  # its constructor checks the sums of the original files
    datasets.VisionDataset.__init__(celeba, str(root))
    names = write_images(root / "celeba" / "img_align_celeba", ".jpg")
    celeba.target_type = ["bbox", "identity"]
    celeba.filename = [f"{name}.jpg" for name in names]
    celeba.bbox = torch.tensor([[i, 3, 20, 30] for i in range(len(names))])
    celeba.identity = celeba.attr = torch.arange(len(names))[:, None]
    return datasets.wrap_dataset_for_transforms_v2(celeba)


def write_mask(path: Path, size: tuple[int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.indices(size).sum(0) // 30).astype(np.uint8)).save(path)


def make_pets(root: Path) -> Any:
    pets = root / "oxford-iiit-pet"
    names = write_images(pets / "images", ".jpg")
    for name, size in zip(names, SIZES, strict=True):
        write_mask(pets / "annotations" / "trimaps" / f"{name}.png", size)
    lines = [f"{name} {i + 1} {1 + i % 2} 1\n" for i, name in enumerate(names)]
    (pets / "annotations" / "trainval.txt").write_text("".join(lines))
    dataset = datasets.OxfordIIITPet(root, target_types=["category", "segmentation", "binary-category"])
    return datasets.wrap_dataset_for_transforms_v2(dataset)


def make_cityscapes(root: Path) -> Any:
    for i, name in enumerate(write_images(root / "images", ".png")):
        folder = root / "leftImg8bit" / "train" / "aachen"
        folder.mkdir(parents=True, exist_ok=True)
        (root / "images" / f"{name}.png").rename(folder / f"{name}_leftImg8bit.png")
        targets = root / "gtFine" / "train" / "aachen"
        for kind in ("labelIds", "instanceIds"):
            write_mask(targets / f"{name}_gtFine_{kind}.png", SIZES[i])
    return datasets.wrap_dataset_for_transforms_v2(datasets.Cityscapes(str(root), target_type=["semantic", "instance"]))


def make_instances(root: Path) -> Any:
    """Return a wrapped Cityscapes of instances: superpixels of the photographs, 16 bits a pixel."""
    make_cityscapes(root)
    inner = datasets.Cityscapes(str(root), target_type=["instance", "semantic"])
    for path, (file, _) in zip(inner.images, inner.targets, strict=True):
        with Image.open(path) as image:
            segments = skimage.segmentation.slic(np.asarray(image), n_segments=20)
        numbers = np.where(segments % 3, 24_000 + segments, segments)
        Image.fromarray(numbers.astype(np.uint16)).save(file)
    return datasets.wrap_dataset_for_transforms_v2(inner)


def make_sbd(root: Path) -> Any:
    """Return a wrapped SBDataset, in its MATLAB files."""
    names = write_images(root / "img", ".jpg")
    (root / "cls").mkdir()
    for name, size in zip(names, SIZES, strict=True):
        mask = (np.indices(size).sum(0) // 9 % 21).astype(np.uint8)
        scipy.io.savemat(root / "cls" / f"{name}.mat", {"GTcls": {"Segmentation": mask}})
    (root / "train.txt").write_text("\n".join(names))
    return datasets.wrap_dataset_for_transforms_v2(datasets.SBDataset(str(root), mode="segmentation"))


def make_worker_fed(dataset: Any) -> Any:
    """Return a dataset of the same samples that is asked for each of them."""
    return ConcatDataset([dataset, []])


class Transformed(torch.utils.data.Dataset):
    """What DataLoader's user would write."""

    def __init__(self, dataset: Any, chain: Any = CHAIN) -> None:
        self.dataset, self.chain = dataset, chain

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.chain(*self.dataset[index])


def load_expected(dataset: Any, chain: Any = CHAIN) -> list[Any]:
    """Return DataLoader's samples, with a chain that draws nothing."""
    return [sample for (sample,) in DataLoader(Transformed(dataset, chain), collate_fn=list)]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, tuple):
        for x, y in zip(ours, theirs, strict=True):
            assert_equal(x, y)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for name in theirs:
            assert_equal(ours[name], theirs[name])
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs
