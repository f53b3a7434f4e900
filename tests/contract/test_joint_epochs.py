"""Seeds, resuming, ranks, bad files and pictures, with boxes and masks: native, and with workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchvision.transforms import v2

from tests.conftest import same
from tests.helpers.wrapped import make_coco as make_masks
from tests.helpers.wrapped import make_coco_boxes as make_boxes
from tests.helpers.wrapped import make_voc_boxes
from torchdali import DALILoader
from torchdali.loader import pictures

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),  # pycocotools
]

CHAIN = v2.Compose(
    [v2.ToImage(), v2.RandomHorizontalFlip(), v2.ScaleJitter((60, 60)), v2.RandomCrop(32, pad_if_needed=True)]
)


@pytest.fixture(params=[make_boxes, make_masks], ids=["boxes", "masks"], scope="module")
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param(tmp_path_factory.mktemp("coco"))


def make(dataset: Any, batch_size: int = 1, **options: Any) -> DALILoader[Any]:
    return DALILoader(dataset, batch_size, transform=CHAIN, device="cpu", seed=5, collate_fn=list, **options)


def list_ids(batches: Any) -> list[int]:
    return [target["image_id"] for batch in batches for _, target in batch]


def sort_samples(batches: Any) -> list[Any]:
    return sorted((sample for batch in batches for sample in batch), key=lambda sample: sample[1]["image_id"])


def test_seeds(dataset: Any) -> None:
    """The numbers of a sample depend on its index, not on its batch, its order or workers."""
    first, other = sort_samples(make(dataset)), make(dataset, 3, shuffle=True, num_workers=2)
    assert same(sort_samples(other), first)
    assert not same(sort_samples(other), first), "the next epoch has other numbers"


def test_an_epoch_resumes_and_iterators_do_not_disturb_each_other(dataset: Any) -> None:
    torch.manual_seed(1)
    loader = make(dataset, shuffle=True)
    batches = iter(loader)
    begin = [next(batches), next(batches)]
    state = loader.state_dict()
    resumed = make(dataset, shuffle=True)
    resumed.load_state_dict(state)
    between = iter(resumed)
    ours, theirs = [], []
    for batch, again in zip(batches, between, strict=True):
        ours.append(batch)
        theirs.append(again)
    assert same(ours, theirs)
    assert sorted(list_ids(begin + ours)) == [10, 11, 12, 13]


def test_ranks_share_an_epoch(dataset: Any) -> None:
    shares = [
        [
            sample
            for batch in make(dataset, sampler=DistributedSampler(dataset, 2, rank, shuffle=False))
            for sample in batch
        ]
        for rank in range(2)
    ]
    whole = [sample for batch in make(dataset) for sample in batch]
    assert same([sample for pair in zip(*shares, strict=True) for sample in pair], whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_is_replaced_with_its_boxes(tmp_path: Path, workers: int) -> None:
    """A truncated file has a size, so its boxes stay; a substitute comes with its own."""
    for name, maker in (("boxes", make_boxes), ("masks", make_masks)):
        dataset = maker(tmp_path / name)
        good = [sample for batch in make(dataset) for sample in batch]
        bad = tmp_path / name / "images" / "001.jpg"
        bad.write_bytes(bad.read_bytes()[:-300])
        (replaced,) = make(dataset, 4, on_error="replace", num_workers=workers)
        assert same([target for _, target in replaced], [target for _, target in good])
        assert not replaced[1][0].any()
        (skipped,) = make(dataset, 4, on_error="skip", num_workers=workers)
        assert list_ids([skipped]) == [10, 12, 12, 13]
        assert same(skipped[0][1], good[0][1])
        assert same(skipped[2:], good[2:])


def test_a_missing_file_is_replaced_by_an_image_of_another_ones_size(tmp_path: Path) -> None:
    dataset = make_voc_boxes(tmp_path)
    Path(dataset.images[2]).unlink()
    flip = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip()])
    loader = DALILoader(dataset, 4, transform=flip, device="cpu", collate_fn=list, on_error="replace")
    for image, target in next(iter(loader)):
        assert target["boxes"].canvas_size == tuple(image.shape[-2:])
    assert len(loader.errors) == 1


def test_pictures_have_boxes_and_masks_and_change_nothing(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loader = make(dataset, 2)
    batches = iter(loader)
    next(batches)
    drawn: list[Any] = []
    split = pictures.split_batch
    monkeypatch.setattr(pictures, "split_batch", lambda batch: drawn.append(batch) or split(batch))
    loader.show_batch(file=tmp_path / "batch.png")
    assert (tmp_path / "batch.png").stat().st_size
    assert same(drawn, list(batches))
