"""torchvision's wrapped datasets of boxes and mask files: no sample is asked for, and the samples are DataLoader's."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from tests.helpers.wrapped import (
    CHAIN,
    FLOATS,
    SIZES,
    Transformed,
    assert_equal,
    load_expected,
    make_celeba,
    make_cityscapes,
    make_kitti,
    make_pets,
    make_voc,
    make_voc_boxes,
    make_voc_masks,
    make_wider_face,
)
from tests.helpers.wrapped import make_coco_boxes as make_coco
from torchdali import DALILoader, SampleError
from torchdali.sources import from_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

SANITIZED = v2.Compose([*CHAIN.transforms, v2.SanitizeBoundingBoxes(min_size=4)])
wrap = datasets.wrap_dataset_for_transforms_v2


MIXED = [[[3, 4, 20, 25], [30, 20, 2, 30]], [], [[1.0, 2.0, 30.5, 40.0]], [[5, 6, 10, 9.1]]]
INTEGERS = [[[3, 4, 20, 25]], [], [[1, 2, 30, 40]], [[5, 6, 10, 9]]]


def make_all_of_coco(root: Path) -> Any:
    return make_coco(root, keys=["iscrowd", "boxes", "area", "image_id", "labels", "bbox", "category_id"])


def make_mixed_coco(root: Path) -> Any:
    return make_coco(root, MIXED)


def make_integers(root: Path) -> Any:
    return make_coco(root, INTEGERS)


def make_coco_without_labels(root: Path) -> Any:
    return make_coco(root, keys=["boxes"])


def make_all_of_voc(root: Path) -> Any:
    return wrap(datasets.VOCDetection(str(make_voc(root)), image_set="train"), target_keys="all")


WITH_LABELS = [make_all_of_coco, make_mixed_coco, make_integers, make_voc_boxes, make_kitti, make_all_of_voc]


def make_semantic_cityscapes(root: Path) -> Any:
    make_cityscapes(root)
    return wrap(datasets.Cityscapes(str(root), target_type="semantic"))


WITH_MASKS = [make_voc_masks, make_pets, make_semantic_cityscapes]
MAKERS = [*WITH_LABELS, make_coco_without_labels, make_wider_face, make_celeba, *WITH_MASKS]


def load(dataset: Any, chain: Any, **options: Any) -> list[Any]:
    loader = DALILoader(dataset, 3, transform=chain, device="cpu", collate_fn=list, **options)
    return [sample for batch in loader for sample in batch]


def assert_native(dataset: Any) -> None:
    assert from_dataset(dataset).annotations


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_samples_are_dataloaders_and_none_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    wrapped = make(tmp_path)
    calls: Counter[str] = Counter()
    chain = SANITIZED if make in WITH_LABELS else CHAIN
    # torchvision finds no labels in images without boxes.
    dataset = Subset(wrapped, [0, 2, 3]) if make in WITH_LABELS[:3] else wrapped
    expected = load_expected(dataset, chain)
    inner = type(wrapped._dataset)
    monkeypatch.setattr(inner, "__getitem__", lambda *_: calls.update("d"))
    for _ in range(2):  # annotations are read once
        assert_equal(tuple(load(dataset, chain, num_workers=2)), tuple(expected))
    assert not calls
    assert_native(dataset)


@pytest.mark.parametrize(
    ("boxes", "are_columns"), [(FLOATS, True), (INTEGERS, True), (MIXED, False), ([[], [], [], []], False)]
)
def test_boxes_are_taken_together_if_they_are_of_one_type(tmp_path: Path, boxes: Any, are_columns: bool) -> None:
    """Python's integers become int64, so that samples of one dataset may differ in dtype."""
    source = from_dataset(make_coco(tmp_path, boxes))
    columns = source.box_columns(np.arange(4), np.array(SIZES), [None] * 4)
    assert (columns is not None) is are_columns


def test_parts_and_unions_of_datasets_and_their_copies(tmp_path: Path) -> None:
    """VOC of two years is a ConcatDataset; images without boxes are left out by a Subset."""
    coco, voc = make_coco(tmp_path / "coco"), [make_voc_boxes(tmp_path / name) for name in "ab"]
    for dataset in (
        Subset(ConcatDataset(voc), [6, 1, 1, 5, 0]),
        ConcatDataset([Subset(coco, [3, 0]), coco]),
        ConcatDataset([coco, *voc]),
    ):
        assert_native(dataset)
        assert_equal(tuple(load(dataset, CHAIN)), tuple(load_expected(dataset, CHAIN)))
        copy = pickle.loads(pickle.dumps(DALILoader(dataset, 3, transform=CHAIN, device="cpu", collate_fn=list)))
        assert_equal(copy._session.source.target(0), from_dataset(dataset).target(0))
    masks = [make_voc_masks(tmp_path / name) for name in "cd"]
    dataset = Subset(ConcatDataset([*masks, coco]), [6, 1, 8, 5, 0])
    assert_native(dataset)
    assert_equal(tuple(load(dataset, CHAIN)), tuple(load_expected(dataset, CHAIN)))
    assert_equal(from_dataset(dataset).target(0), dataset[0][1])


def test_joint_transforms_of_the_dataset_come_before_the_loaders(tmp_path: Path) -> None:
    flip, crop = v2.RandomHorizontalFlip(1.0), v2.CenterCrop((40, 40))
    expected = load_expected(make_coco(tmp_path / "a"), v2.Compose([v2.ToImage(), flip, crop]))
    dataset = make_coco(tmp_path / "b", transforms=v2.Compose([v2.ToImage(), flip]))
    assert_native(dataset)
    assert_equal(tuple(load(dataset, crop)), tuple(expected))
    alone = make_coco(tmp_path / "c", transforms=v2.Compose([v2.ToImage(), flip, crop]))
    assert_equal(tuple(load(alone, None)), tuple(expected))
    alone.transforms = crop  # the loader sees it
    assert load(alone, v2.ToImage())[0][1]["boxes"].canvas_size == (40, 40)


def count_boxes(target: Any) -> Any:
    noise = torch.rand(())
    return {**target, "count": len(target.get("boxes", ())), "noise": noise}


def test_transforms_of_images_alone_and_of_targets(tmp_path: Path) -> None:
    jitter = v1.Compose([v1.Grayscale(3), v1.ToTensor()])
    dataset = make_coco(tmp_path, transform=jitter, target_transform=count_boxes)
    assert_native(dataset)
    loader = DALILoader(dataset, 3, transform=v2.RandomHorizontalFlip(1.0), device="cpu", collate_fn=list, seed=3)
    (ours,) = [batch[0] for batch in loader][:1]
    image, target = Transformed(dataset, v2.RandomHorizontalFlip(1.0))[0]
    assert torch.allclose(ours[0], image, atol=2 / 255)
    noise, _ = ours[1].pop("noise"), target.pop("noise")
    assert_equal(ours[1], target)
    again = DALILoader(dataset, 3, transform=v2.RandomHorizontalFlip(1.0), device="cpu", collate_fn=list, seed=3)
    assert torch.equal(next(iter(again))[0][1]["noise"], noise)
    loader.explain(text := io.StringIO())
    assert "transform= of the dataset is for images alone" in " ".join(text.getvalue().split())


def test_a_transform_that_would_leave_boxes_behind_stays_in_the_workers(tmp_path: Path) -> None:
    for name, arguments, reason in (
        ("a", {"transform": v2.CenterCrop(30)}, "leaves boxes where they are"),
        ("b", {"transforms": lambda image, target: (image, target)}, "not all of torchvision.transforms.v2"),
    ):
        dataset = make_coco(tmp_path / name, **arguments)
        loader = DALILoader(dataset, 3, transform=v2.ToImage(), device="cpu", collate_fn=list)
        loader.explain(text := io.StringIO())
        assert reason in " ".join(text.getvalue().split())
        assert_equal(next(iter(loader))[0][1], dataset[0][1])


def test_explain_names_what_moves(tmp_path: Path) -> None:
    for keys, kinds in ((None, "BoundingBoxes"), (["masks", "boxes"], "BoundingBoxes, Mask")):
        DALILoader(make_coco(tmp_path / str(keys), keys=keys), transform=CHAIN, device="cpu").explain(
            text := io.StringIO()
        )
        words = " ".join(text.getvalue().split())
        assert "4 files (CocoDetection)" in words
        assert f"{kinds}: they move with the image, on the host" in words


def test_bad_files_are_named_and_left_out(tmp_path: Path) -> None:
    dataset = make_voc_boxes(tmp_path)
    Path(dataset.images[0]).unlink()
    Path(dataset.annotations[1]).write_text("<annotation>")
    batches = iter(DALILoader(dataset, device="cpu", transform=CHAIN, collate_fn=list))
    with pytest.raises(SampleError, match=r"000\.jpg.*there is no such file"):
        next(batches)
    with pytest.raises(SampleError, match=r"001\.jpg.*the dataset raised ParseError") as caught:
        next(batches)
    assert type(caught.value.__cause__).__name__ == "ParseError"
    loader = DALILoader(dataset, 4, device="cpu", transform=CHAIN, collate_fn=list, on_error="skip")
    (batch,) = loader
    good = load_expected(Subset(dataset, [2, 3]), CHAIN)
    assert_equal(tuple(batch), (good[0], good[0], *good))
    assert len(loader.errors) == 2


def test_sizes_of_labels_that_do_not_fit_are_an_error_of_the_sample(tmp_path: Path) -> None:
    dataset = make_coco(tmp_path, target_transform=lambda target: {**target, "labels": torch.arange(5)})
    with pytest.raises(SampleError, match=r"000\.jpg.*must match the number of labels"):
        load(dataset, SANITIZED)


def test_caches(tmp_path: Path) -> None:
    dataset = make_coco(tmp_path)
    with pytest.raises(ValueError, match="cache must be None or 'host' for a dataset whose boxes"):
        DALILoader(dataset, cache="device", transform=CHAIN, device="cpu")
    loader = DALILoader(dataset, 3, cache="host", transform=CHAIN, device="cpu", collate_fn=list)
    for _ in range(2):
        assert_equal(tuple(sample for batch in loader for sample in batch), tuple(load_expected(dataset, CHAIN)))


def test_default_collate_stacks_images_and_targets(tmp_path: Path) -> None:
    dataset = Subset(make_coco(tmp_path, INTEGERS), [0, 2, 3])
    chain = v2.Compose([*CHAIN.transforms, v2.ToPureTensor()])
    (ours,), (expected,) = (
        DALILoader(dataset, 3, transform=chain, device="cpu"),
        DataLoader(Transformed(dataset, chain), 3),
    )
    assert_equal(tuple(ours), tuple(expected))
    assert [type(part) for part in ours] == [torch.Tensor, dict]


@pytest.mark.parametrize("make", [make_all_of_coco, make_mixed_coco, make_wider_face], ids=lambda make: make.__name__)
def test_targets_are_on_the_device_of_the_images(tmp_path: Path, make: Any, device: str) -> None:
    """Boxes and labels of a batch, and what else is a tensor, in one piece or each alone."""
    dataset = make(tmp_path)
    loader = DALILoader(dataset, 3, transform=CHAIN, device=device, collate_fn=list)
    ours = [sample for batch in loader for sample in batch]
    for (image, target), (_, expected) in zip(ours, load_expected(dataset, CHAIN), strict=True):
        tensors = {name: part for name, part in target.items() if isinstance(part, torch.Tensor)}
        assert {part.device for part in (image, *tensors.values())} == {image.device}
        assert image.device.type == device
        with tv_tensors.set_return_type("TVTensor"):
            assert_equal(target | {name: part.cpu() for name, part in tensors.items()}, expected)
