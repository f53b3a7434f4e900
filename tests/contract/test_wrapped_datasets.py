"""torchvision's wrapped datasets: DALI decodes their image files, and the samples are DataLoader's."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import datasets
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.workers.unread import UnreadImages, leave_images_unread, take_transforms

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),  # pycocotools
]

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


MAKERS = [
    *(make_coco, make_voc_boxes, make_voc_masks, make_kitti, make_wider_face),
    *(make_celeba, make_pets, make_cityscapes),
]


class Transformed(torch.utils.data.Dataset):
    """What DataLoader's user would write."""

    def __init__(self, dataset: Any, chain: Any = CHAIN) -> None:
        self.dataset, self.chain = dataset, chain

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.chain(*self.dataset[index])


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


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_samples_are_dataloaders_and_no_worker_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Any]
) -> None:
    wrapped = make(tmp_path)
    expected = [sample for (sample,) in DataLoader(Transformed(wrapped), collate_fn=list)]
    assert isinstance(leave_images_unread(wrapped), UnreadImages)
    monkeypatch.setattr(type(wrapped._dataset), "__getitem__", None)
    loader = DALILoader(wrapped, 3, device="cpu", transform=CHAIN, collate_fn=list)
    loader.explain()
    assert "decoders.image" in capsys.readouterr().out
    ours = [sample for batch in loader for sample in batch]
    assert len(ours) == len(expected) == len(SIZES)
    for (image, target), (expected_image, expected_target) in zip(ours, expected, strict=True):
        assert_equal(image, expected_image)
        assert_equal(target, expected_target)


def test_kitti_needs_no_pycocotools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its targets are lists of objects, as those of COCO, but without masks."""
    make_kitti(tmp_path)
    wrapped = datasets.wrap_dataset_for_transforms_v2(datasets.Kitti(str(tmp_path)), target_keys="all")
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    assert_equal(leave_images_unread(wrapped)[0][1], wrapped[0][1])


def test_parts_of_datasets_in_workers(tmp_path: Path) -> None:
    first, second = make_coco(tmp_path / "a"), make_coco(tmp_path / "b")
    dataset = ConcatDataset([Subset(first, [2, 0]), second])
    assert isinstance(leave_images_unread(dataset).datasets[0].dataset, UnreadImages)
    assert dataset.datasets[0].dataset is first
    expected = [sample for (sample,) in DataLoader(Transformed(dataset), collate_fn=list)]
    loader = DALILoader(dataset, 2, device="cpu", transform=CHAIN, collate_fn=list, num_workers=2)
    ours = [sample for batch in loader for sample in batch]
    for (image, target), (expected_image, expected_target) in zip(ours, expected, strict=True):
        assert_equal(image, expected_image)
        assert_equal(target, expected_target)


@pytest.mark.parametrize("workers", [0, 1])
def test_joint_transforms_of_the_dataset_run_in_dali(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """As transform= of the loader does; also without one, and under Subset and ConcatDataset."""
    wrapped = make_voc_masks(tmp_path)
    expected = [CHAIN(*wrapped[i]) for i in (3, 1)]
    wrapped.transforms = v2.Compose(CHAIN.transforms[:2])
    dataset = ConcatDataset([Subset(wrapped, [3]), Subset(wrapped, [1])])
    options: Any = {"device": "cpu", "collate_fn": list, "num_workers": workers}
    monkeypatch.setattr(type(wrapped._dataset), "__getitem__", None)
    (ours,) = DALILoader(dataset, 2, transform=v2.Compose(CHAIN.transforms[2:]), **options)
    for sample, other in zip(ours, expected, strict=True):
        assert_equal(sample, other)
    wrapped.transforms = CHAIN
    assert_equal(next(iter(DALILoader(dataset, 2, **options)))[1], expected[1])
    assert wrapped.transforms is CHAIN


def test_joint_transforms_that_torchdali_cannot_take_over_stay(tmp_path: Path) -> None:
    first, second = make_pets(tmp_path / "a"), make_pets(tmp_path / "b")
    first.transforms = v2.CenterCrop(20)
    for transforms in (v2.CenterCrop(20), lambda *sample: sample):
        second.transforms = transforms
        dataset = ConcatDataset([first, second])
        assert take_transforms(dataset) == (None, dataset)
        ours = [sample for (sample,) in DALILoader(dataset, device="cpu", collate_fn=list)]
        assert_equal(ours[5][1], dataset[5][1])


def test_others_are_asked(tmp_path: Path) -> None:
    """Those whose own code or transforms would be left out."""

    class Own(datasets.CocoDetection):
        def _load_image(self, number: int) -> Any:
            return super()._load_image(number).rotate(90)

    make_coco(tmp_path)
    own = datasets.wrap_dataset_for_transforms_v2(Own(tmp_path / "images", tmp_path / "all.json"))
    joint = datasets.CocoDetection(tmp_path / "images", tmp_path / "all.json", transforms=v2.ToImage())
    for dataset in (own, datasets.wrap_dataset_for_transforms_v2(joint), joint, Subset(own, [0]), [1, 2], None):
        assert leave_images_unread(dataset) is dataset


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # torchvision's
def test_grey_images_of_a_dataset_that_does_not_convert_stay_grey(tmp_path: Path) -> None:
    wrapped = make_kitti(tmp_path)
    path = wrapped.images[0]
    Image.open(path).convert("L").save(path)
    grey, coloured = (DALILoader(wrapped, device="cpu", transform=CHAIN, collate_fn=list).dataset[i][0] for i in (0, 1))
    assert (grey.mode, coloured.mode) == ("L", "RGB")
    images = [image for ((image, _),) in DALILoader(wrapped, device="cpu", transform=CHAIN, collate_fn=list)]
    assert [len(image) for image in images] == [1, 3, 3, 3]


def test_bad_files_are_named(tmp_path: Path) -> None:
    wrapped = make_coco(tmp_path)
    missing, truncated = sorted((tmp_path / "images").iterdir())[:2]
    missing.unlink()
    truncated.write_bytes(truncated.read_bytes()[:-300])
    batches = iter(DALILoader(wrapped, device="cpu", transform=CHAIN, collate_fn=list))
    with pytest.raises(FileNotFoundError, match=missing.name):
        next(batches)
    with pytest.raises(SampleError, match=truncated.name):
        next(batches)
    (batch,) = DALILoader(wrapped, 4, device="cpu", transform=CHAIN, collate_fn=list, on_error="skip")
    good = [
        image for ((image, _),) in DALILoader(Subset(wrapped, [2, 3]), device="cpu", transform=CHAIN, collate_fn=list)
    ]
    assert all(any(torch.equal(image, other) for other in good) for image, _ in batch)
    with pytest.raises(SampleError, match=rf"the dataset raised FileNotFoundError\(.*{missing.name}"):
        next(iter(DALILoader(wrapped, device="cpu", transform=CHAIN, collate_fn=list, on_error="skip")))
