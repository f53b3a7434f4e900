"""torchvision's wrapped datasets that are asked for samples: DALI decodes their image files, and no worker does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision import datasets
from torchvision.transforms import v2

from tests.helpers.wrapped import (
    CHAIN,
    SIZES,
    assert_equal,
    load_expected,
    make_celeba,
    make_cityscapes,
    make_coco,
    make_kitti,
    make_pets,
    make_voc_boxes,
    make_voc_masks,
    make_wider_face,
    make_worker_fed,
)
from torchdali import DALILoader, SampleError
from torchdali.workers.unread import UnreadImages, leave_images_unread, take_transforms

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),  # pycocotools
]

MAKERS = [
    *(make_coco, make_voc_boxes, make_voc_masks, make_kitti, make_wider_face),
    *(make_celeba, make_pets, make_cityscapes),
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_samples_are_dataloaders_and_no_worker_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Any]
) -> None:
    wrapped = make(tmp_path)
    expected = load_expected(wrapped)
    assert isinstance(leave_images_unread(wrapped), UnreadImages)
    monkeypatch.setattr(type(wrapped._dataset), "__getitem__", None)
    loader = DALILoader(make_worker_fed(wrapped), 3, device="cpu", transform=CHAIN, collate_fn=list)
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
    image, target = wrapped[0]
    image.close()
    assert_equal(leave_images_unread(wrapped)[0][1], target)


def test_parts_of_datasets_in_workers(tmp_path: Path) -> None:
    first, second = make_coco(tmp_path / "a"), make_coco(tmp_path / "b")
    dataset = ConcatDataset([Subset(first, [2, 0]), second])
    assert isinstance(leave_images_unread(dataset).datasets[0].dataset, UnreadImages)
    assert dataset.datasets[0].dataset is first
    expected = load_expected(dataset)
    whole = make_worker_fed(dataset)
    loader = DALILoader(whole, 2, device="cpu", transform=CHAIN, collate_fn=list, num_workers=2)
    ours = [sample for batch in loader for sample in batch]
    for (image, target), (expected_image, expected_target) in zip(ours, expected, strict=True):
        assert_equal(image, expected_image)
        assert_equal(target, expected_target)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # torchvision's
@pytest.mark.parametrize("workers", [0, 1])
def test_joint_transforms_of_the_dataset_run_in_dali(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """As transform= of the loader does; also without one, and under Subset and ConcatDataset."""
    wrapped = make_kitti(tmp_path)
    Image.open(wrapped.images[0]).convert("L").save(wrapped.images[0])  # so it is not native
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
    wrapped = make_worker_fed(make_coco(tmp_path))
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
