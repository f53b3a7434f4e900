"""Masks of objects: no sample is asked for, threads read what takes time, and the samples are DataLoader's."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision import datasets, tv_tensors
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

from tests.helpers.wrapped import (
    CHAIN,
    SIZES,
    assert_equal,
    load_expected,
    make_cityscapes,
    make_coco_boxes,
    make_instances,
    make_objects,
    make_sbd,
    make_voc_masks,
    make_worker_fed,
    open_objects,
)
from torchdali import DALILoader, SampleError
from torchdali.sources import from_dataset, wrapped, wrapped_classes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),  # pycocotools
]

FILLS: Any = {tv_tensors.Mask: 3, "others": 0}
PADDED = v2.Compose([v2.ToImage(), v2.Pad(5, fill=FILLS), v2.Resize((50, 45)), v2.RandomHorizontalFlip(1.0)])
TURNED = v2.Compose([v2.ToImage(), v2.RandomRotation((20, 20)), v2.Resize((50, 45))])


def make_all_of_coco(root: Path) -> Any:
    make_objects(root)
    return open_objects(root, "all")


def make_masks_alone(root: Path) -> Any:
    make_objects(root)
    return open_objects(root, ["masks"])


def make_instances_alone(root: Path) -> Any:
    make_cityscapes(root)
    return datasets.wrap_dataset_for_transforms_v2(datasets.Cityscapes(str(root), target_type="instance"))


MAKERS = [make_objects, make_all_of_coco, make_masks_alone, make_sbd, make_cityscapes, make_instances_alone]


def load(dataset: Any, chain: Any, **options: Any) -> list[Any]:
    loader = DALILoader(dataset, 3, transform=chain, **{"device": "cpu"} | options, collate_fn=list)
    return [sample for batch in loader for sample in batch]


def sort_keys(part: Any) -> Any:
    """Return a sample whose dictionaries are sorted. The wrapper of COCO has a set of keys."""
    if isinstance(part, dict):
        return {name: sort_keys(part[name]) for name in sorted(part)}
    return tuple(map(sort_keys, part)) if isinstance(part, tuple) else part


def move(part: Any) -> Any:
    """Return a part of a sample on the CPU."""
    if isinstance(part, dict):
        return {name: move(value) for name, value in part.items()}
    if isinstance(part, torch.Tensor):
        return tv_tensors.wrap(part.cpu(), like=part) if isinstance(part, tv_tensors.TVTensor) else part.cpu()
    return tuple(map(move, part)) if isinstance(part, tuple) else part


@pytest.mark.parametrize("chain", [CHAIN, PADDED, TURNED], ids=["crop", "fill", "rotation"])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_samples_are_dataloaders_and_none_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, make: Callable[[Path], Any], chain: Any
) -> None:
    dataset = make(tmp_path)
    expected, first = load_expected(dataset, chain), dataset[0][1]
    calls: Counter[str] = Counter()
    monkeypatch.setattr(type(dataset._dataset), "__getitem__", lambda *_: calls.update("d"))
    ours = load(dataset, chain, device=device, num_workers=2)
    assert len(ours) == len(expected)
    for (_, target), (_, expected_target) in zip(ours, expected, strict=True):
        target, expected_target = sort_keys(move(target)), sort_keys(expected_target)
        if chain is TURNED and isinstance(target, dict) and "boxes" in target:  # equal to 0.0002 pixels
            assert (target.pop("boxes") - expected_target.pop("boxes")).abs().max() < 1e-3
        assert_equal(target, expected_target)
    assert not calls
    assert tv_tensors.Mask in from_dataset(dataset).annotations
    assert_equal(sort_keys(from_dataset(dataset).target(0)), sort_keys(first))


@pytest.mark.parametrize("workers", [0, 1])
def test_instances_of_16_bits_are_those_of_images_of_32_bits(tmp_path: Path, workers: int) -> None:
    """torchvision cannot compare their numbers as uint16. It can if PIL opens them as int32."""
    dataset = make_instances(tmp_path)
    ours = load(make_worker_fed(dataset) if workers else dataset, CHAIN, num_workers=workers)
    for i, (image, target) in enumerate(ours):
        with Image.open(dataset.images[i]) as picture, Image.open(dataset.targets[i][0]) as numbers:
            assert numbers.mode == "I;16"
            semantic = Image.open(dataset.targets[i][1])
            expected = CHAIN(*dataset._wrapper(i, (picture.convert("RGB"), (numbers.convert("I"), semantic))))
        assert_equal((image, target), expected)
        assert 9 < len(target[0]["masks"]) < 30
        assert target[0]["labels"].max() == 24


@pytest.mark.parametrize(
    ("make", "module", "name"),
    [(make_objects, wrapped, "read_objects"), (make_cityscapes, wrapped_classes, "read_instances")],
    ids=["objects", "instances"],
)
def test_threads_make_the_masks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, module: Any, name: str
) -> None:
    dataset, function = make(tmp_path), getattr(module, name)
    names: list[str] = []

    def read(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return function(*arguments)

    monkeypatch.setattr(module, name, read)
    load(dataset, CHAIN)
    assert len(names) == len(SIZES)
    assert all(name.startswith("torchdali-scan") for name in names)


@pytest.mark.parametrize("keys", [["masks", "boxes", "labels"], ["masks", "boxes"]])
def test_sizes_are_those_of_the_files_and_not_of_the_annotations(tmp_path: Path, keys: list[str]) -> None:
    make_objects(tmp_path)
    file = tmp_path / "all.json"
    content = json.loads(file.read_text())
    for image, (height, width) in zip(content["images"], SIZES, strict=True):
        is_right = image["id"] != 11
        image |= {"height": height if is_right else width, "width": width if is_right else height}
    file.write_text(json.dumps(content))
    dataset = open_objects(tmp_path, keys)
    assert_equal(tuple(load(dataset, CHAIN)), tuple(load_expected(dataset, CHAIN)))


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        (None, "ValueError"),
        ([], "IndexError"),
        ([[3, 4]], "Exception"),
        ({"size": [9, 9], "counts": [81]}, "Found multiple HxW"),
    ],
)
def test_masks_that_torchvision_refuses_name_their_file(tmp_path: Path, segmentation: Any, reason: str) -> None:
    """Or masks that it makes, of another size than the image."""
    make_objects(tmp_path)
    file = tmp_path / "all.json"
    content = json.loads(file.read_text())
    content["annotations"][1]["segmentation"] = segmentation
    file.write_text(json.dumps(content))
    dataset = open_objects(tmp_path, ["masks", "boxes", "labels"])
    with pytest.raises(Exception, match=r".*") as theirs:
        dataset[1][1]["masks"].reshape(SIZES[1])
    with pytest.raises(SampleError, match=rf"001\.jpg.*{reason}"):
        load(dataset, CHAIN)
    assert "HxW" in reason or type(theirs.value).__name__ == reason


def count_pixels(target: Any) -> Any:
    masks = target["masks"] if isinstance(target, dict) else target
    return target, type(masks).__name__, masks.sum().item(), torch.rand(()).item() < 2


@pytest.mark.parametrize("make", [make_objects, make_sbd, make_voc_masks, make_instances])
def test_a_target_transform_gets_tensors(tmp_path: Path, make: Any) -> None:
    dataset = make(tmp_path)
    function = (lambda target: count_pixels(target[0])) if make is make_instances else count_pixels
    part = Subset(dataset, [0, 1, 2])  # the last one has no objects
    expected = None if make is make_instances else load_expected(part, v2.ToImage())
    dataset.transforms = StandardTransform(None, function)
    ours = load(part, v2.ToImage())
    for i, (_, (target, name, pixels, is_drawn)) in enumerate(ours):
        assert (name, is_drawn) == ("Mask", True)
        if expected:
            assert_equal(target, expected[i][1])
            assert pixels == count_pixels(expected[i][1])[2]


def count_up(target: Any) -> Any:
    target["labels"] += 1
    return target


def test_a_sample_that_comes_twice_in_a_batch_has_two_targets(tmp_path: Path) -> None:
    dataset, order = make_instances_alone(tmp_path), [0, 0, 1, 0]
    expected = [count_up(target) for _, target in load_expected(Subset(dataset, order), v2.ToImage())]
    dataset.transforms = StandardTransform(None, count_up)
    ours = [target for _, target in load(dataset, v2.ToImage(), sampler=order)]
    assert_equal(tuple(ours), tuple(expected))


def test_parts_and_unions(tmp_path: Path) -> None:
    objects, boxes, sbd = make_objects(tmp_path / "a"), make_coco_boxes(tmp_path / "b"), make_sbd(tmp_path / "c")
    with_labels = make_all_of_coco(tmp_path / "d")
    for dataset in (
        Subset(ConcatDataset([objects, boxes]), [6, 0, 0, 3, 5, 1]),
        ConcatDataset([sbd, objects]),
        Subset(ConcatDataset([with_labels, objects]), [4, 0, 2, 2, 6]),
    ):
        assert from_dataset(dataset).annotations
        ours, expected = load(dataset, CHAIN), load_expected(dataset, CHAIN)
        assert_equal(sort_keys(tuple(ours)), sort_keys(tuple(expected)))


def test_masks_follow_their_boxes(tmp_path: Path) -> None:
    chain = v2.Compose([CHAIN, v2.SanitizeBoundingBoxes(min_size=15)])
    dataset = Subset(make_objects(tmp_path), [0, 1, 2])
    expected = load_expected(dataset, chain)
    assert len(expected[0][1]["masks"]) < 3
    assert_equal(tuple(load(dataset, chain)), tuple(expected))


@pytest.mark.parametrize("make", [make_objects, make_sbd, make_cityscapes], ids=lambda make: make.__name__)
def test_a_bad_sample_is_left_out(tmp_path: Path, make: Any) -> None:
    dataset = make(tmp_path)
    path = Path(sorted(tmp_path.rglob("000*.jpg"))[0]) if make is not make_cityscapes else Path(dataset.images[0])
    path.write_bytes(path.read_bytes()[:-300])
    loader = DALILoader(dataset, 4, device="cpu", transform=CHAIN, collate_fn=list, on_error="skip")
    (batch,) = loader
    bad = next(i for i in range(4) if str(path).endswith(Path(from_dataset(dataset).name(i)).name))
    others = [i for i in range(4) if i != bad]
    expected = load_expected(Subset(dataset, [others[0] if i == bad else i for i in range(4)]), CHAIN)
    assert_equal(sort_keys(tuple(batch)), sort_keys(tuple(expected)))


def test_numbers_that_are_no_numbers_of_objects(tmp_path: Path) -> None:
    """torchvision makes a mask for each value, whatever it means."""
    dataset = make_cityscapes(tmp_path)
    for i, image in enumerate(dataset.images):
        height, width = np.asarray(Image.open(image)).shape[:2]
        values = np.full((height, width), -5, np.int32) if i else np.arange(height * width, dtype=np.int32)
        Image.fromarray(values.reshape(height, width)[:, :2]).resize((width, height), 0).save(
            dataset.targets[i][1].replace(".png", ".tif")
        )
        dataset.targets[i][1] = dataset.targets[i][1].replace(".png", ".tif")
    assert_equal(tuple(load(dataset, CHAIN)), tuple(load_expected(dataset, CHAIN)))
