"""Samples with boxes, masks or key points, in every way that a loader can load them."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from tests.conftest import same
from tests.helpers.annotated import SEED, Annotated, Given, load_expected
from torchdali import DALILoader
from torchdali.errors import SampleError, TransformError

LABELS = v2.SanitizeBoundingBoxes(min_size=5)
CHAIN = [v2.RandomHorizontalFlip(), v2.RandomCrop((40, 44)), v2.ClampBoundingBoxes(), LABELS]


def as_lists(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


@pytest.fixture(scope="module")
def images(photographs: Any) -> list[torch.Tensor]:
    return [F.pil_to_tensor(photographs[i][0]) for i in range(len(photographs))]


class Segmented(Annotated):
    """A photograph and its semantic mask."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image, target["semantic"]


class Cut(v2.Transform):
    """A transform without a rule."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.crop(inpt, 3, 4, 20, 21)


def number(image: Any, target: dict[str, Any]) -> Any:
    """Count boxes, as a function in the chain of a dataset."""
    return image, {**target, "count": len(target["boxes"])}


def load(dataset: Any, chain: list[Any], batch_size: Any = 4, collate_fn: Any = as_lists, **options: Any) -> list[Any]:
    options = {"device": "cpu", "seed": SEED, **options}
    return list(DALILoader(dataset, batch_size, transform=v2.Compose(chain), collate_fn=collate_fn, **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_lists_of_samples(images: Any, workers: int) -> None:
    dataset = Annotated(images, 10)
    assert same(load(dataset, CHAIN, num_workers=workers), load_expected(dataset, CHAIN, 4, as_lists))


@pytest.mark.parametrize("workers", [0, 2])
def test_masks_are_stacked_with_their_images(images: Any, workers: int) -> None:
    chain = [
        v2.RandomHorizontalFlip(),
        v2.RandomCrop((48, 50), pad_if_needed=True, fill={tv_tensors.Image: 0, tv_tensors.Mask: 255}),
        v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
        v2.ToPureTensor(),
    ]
    dataset = Segmented(images, 10)
    ours = load(dataset, chain, collate_fn=None, num_workers=workers)
    assert same(ours, load_expected(dataset, chain, 4, None))
    assert [type(part) for part in ours[0]] == [torch.Tensor] * 2


def test_masks_that_nothing_moves_outlive_the_memory_of_workers(images: Any) -> None:
    dataset, chain = Annotated(images, 24, points=False), [v2.ToDtype(torch.float32, scale=True)]
    ours, expected = load(dataset, chain, 2, num_workers=1), load_expected(dataset, chain, 2, as_lists)
    assert same([batch[1] for batch in ours], [batch[1] for batch in expected])


def test_single_samples(images: Any) -> None:
    dataset = Annotated(images, 5)
    ours = load(dataset, CHAIN, None, None)
    assert same(ours, list(DataLoader(Given(dataset, CHAIN), None)))


def test_torch_transforms_whole_samples_from_the_first_transform_without_a_rule(images: Any) -> None:
    dataset = Annotated(images, 6)
    for rest in ([Cut(), LABELS], [number], [Cut(), v2.Resize((10, 12)), number, v2.ToPureTensor()]):
        chain = [v2.RandomHorizontalFlip(), v2.RandomCrop(40), *rest]
        ours, expected = load(dataset, chain), load_expected(dataset, chain, 4, as_lists)
        assert same([batch[1] for batch in ours], [batch[1] for batch in expected])
        assert [[x.shape for x in batch[0]] for batch in ours] == [[x.shape for x in batch[0]] for batch in expected]


def test_elastic_transforms_move_whole_samples(images: Any, device: str) -> None:
    corner = torch.tensor([[0.0, 0.0, 8.0, 8.0]])
    try:
        F.elastic_bounding_boxes(corner, tv_tensors.BoundingBoxFormat.XYXY, (8, 8), torch.zeros(1, 8, 8, 2))
    except IndexError:
        pytest.skip("the installed torchvision refuses a box at the edge")
    dataset = Annotated(images, 4, masks=False)
    (batch,) = load(dataset, [v2.Resize((40, 40)), v2.ElasticTransform(2000.0)], device=device)
    still = load_expected(dataset, [v2.Resize((40, 40))], 4, as_lists)[0]
    assert not any(torch.equal(a["boxes"].cpu(), b["boxes"]) for a, b in zip(batch[1], still[1], strict=True))


class Pairs(Annotated):
    """Two images of a sample, of which one may be grey, and boxes beside them."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        other: Any = F.rgb_to_grayscale(image) if index % 3 == 0 else image
        return {"left": image, "right": tv_tensors.Image(other), **target}


def test_several_images_of_a_sample_and_of_several_kinds(images: Any) -> None:
    dataset = Pairs(images, 8, points=False)
    chain = [v2.RandomHorizontalFlip(), v2.RandomCrop(40), v2.ClampBoundingBoxes()]
    ours = [sample for batch in load(dataset, chain, collate_fn=list) for sample in batch]
    single = [sample for batch in load(Annotated(images, 8, points=False), chain, collate_fn=list) for sample in batch]
    for index, sample in enumerate(ours):
        assert sample["left"].shape == (3, 40, 40)
        assert sample["right"].shape == (3 if index % 3 else 1, 40, 40)
        assert same({name: sample[name] for name in single[index][1]}, single[index][1])
        if index % 3:
            assert torch.equal(sample["left"], sample["right"])


def test_a_resumed_epoch_goes_on_with_the_same_annotations(images: Any) -> None:
    dataset = Annotated(images, 12)
    make = lambda: DALILoader(  # noqa: E731
        dataset, 4, transform=v2.Compose(CHAIN), seed=SEED, device="cpu", collate_fn=as_lists, shuffle=True
    )
    torch.manual_seed(3)
    first = make()
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    expected = list(batches)
    resumed = make()
    resumed.load_state_dict(state)
    assert same(list(resumed), expected)


def image_size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.height, image.width


class Files(Annotated):
    """Paths of images, some of which are damaged, with a box of the image's size."""

    def __init__(self, paths: list[Path], sizes: list[tuple[int, int]]) -> None:
        super().__init__([], len(paths))
        self.paths, self.sizes = paths, sizes

    def __getitem__(self, index: int) -> Any:
        height, width = self.sizes[index]
        box: Any = [[0, 0, width, height]]
        boxes: Any = tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=(height, width))  # pyright: ignore
        return self.paths[index], {"boxes": boxes, "labels": torch.tensor([index])}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_substitute_comes_with_its_own_boxes(fresh_pictures: Path, workers: int) -> None:
    paths = sorted(fresh_pictures.glob("*/*.jpg"))[:6]
    sizes = [image_size(path) for path in paths]
    dataset = Files(paths, sizes)
    good = paths[1].read_bytes()
    for damaged in (b"no image", good[: len(good) // 2]):  # found in the worker; found by DALI
        paths[1].write_bytes(damaged)
        (batch,) = load(dataset, [v2.ToImage(), v2.RandomHorizontalFlip()], 6, on_error="skip", num_workers=workers)
        assert [target["labels"].item() for target in batch[1]] == [0, 2, 2, 3, 4, 5]
        for picture, target in zip(*batch, strict=True):
            assert target["boxes"].canvas_size == tuple(picture.shape[-2:])
            assert target["boxes"].tolist() == [[0, 0, picture.shape[-1], picture.shape[-2]]]


def test_a_black_image_takes_the_size_of_its_boxes(fresh_pictures: Path) -> None:
    paths = sorted(fresh_pictures.glob("*/*.jpg"))[:3]
    dataset = Files([paths[0], fresh_pictures / "missing.jpg", paths[2]], [image_size(path) for path in paths])
    (batch,) = load(dataset, [v2.ToImage(), v2.RandomHorizontalFlip()], on_error="replace")
    assert [tuple(image.shape[-2:]) for image in batch[0]] == dataset.sizes
    assert not batch[0][1].any()


class Decoded(Files):
    """The same with images that are decoded already."""

    def __getitem__(self, index: int) -> Any:
        path, target = super().__getitem__(index)
        with Image.open(path) as image:
            return tv_tensors.Image(F.pil_to_tensor(image.convert("RGB"))), target


def test_a_crop_by_boxes_is_decoded_alone(pictures: Path) -> None:
    paths = sorted(pictures.glob("*/*.jpg"))[:6]
    sizes = [image_size(path) for path in paths]
    chain = [v2.ToImage(), v2.RandomIoUCrop(), v2.RandomHorizontalFlip()]
    loader = DALILoader(Files(paths, sizes), 6, transform=v2.Compose(chain), device="cpu")
    loader.explain(text := io.StringIO())
    assert "the window of the first crop alone" in " ".join(text.getvalue().split())
    assert same(load(Files(paths, sizes), chain), load(Decoded(paths, sizes), chain))


class Changed(Annotated):
    """Samples whose target is changed by a function."""

    def __init__(self, images: Any, change: Any) -> None:
        super().__init__(images, 4)
        self.change = change

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image, self.change(target) if index == 2 else target


def other_canvas(target: Any) -> Any:
    return {**target, "boxes": tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(3, 4))}


FLIP = v2.RandomHorizontalFlip()


@pytest.mark.parametrize(
    ("change", "transform", "error", "text"),
    [
        (other_canvas, FLIP, SampleError, "sample 2 .*Found multiple HxW dimensions in the sample"),
        (lambda x: {"image_id": 3}, LABELS, SampleError, "sample 2.*one tensor of bounding boxes, got 0"),
        (lambda x: {**x, "labels": x["labels"][:0]}, LABELS, SampleError, "sample 2.*must match the number of labels"),
        (lambda x: {"boxes": x["boxes"]}, LABELS, SampleError, "sample 2.*Could not infer where the labels are"),
        (dict, v1.RandomHorizontalFlip(), TransformError, "transform 1, RandomHorizontalFlip: it takes images alone"),
        (dict, v2.AutoAugment(), TransformError, "are not supported by AutoAugment"),
        (dict, v2.RandomApply([v2.TenCrop(3)]), TransformError, "are not supported by TenCrop"),
        (dict, v2.ToDtype({tv_tensors.Image: torch.float32}), TransformError, "No dtype was specified for type"),
    ],
    ids=["canvas", "no boxes", "labels", "no labels", "v1", "AutoAugment", "TenCrop", "ToDtype"],
)
def test_what_torchvision_refuses_is_refused(images: Any, change: Any, transform: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=re.compile(text, re.DOTALL)):
        load(Changed(images, change), [transform])


def test_samples_without_boxes_raise_what_torchvision_raises(images: Any) -> None:
    dataset: Any = [(tv_tensors.Image(images[0]), 1)] * 4
    with pytest.raises(SampleError, match=r"SanitizeBoundingBoxes.*No bounding boxes were found in the sample"):
        load(dataset, [v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()])


def test_explain_says_what_moves_before_and_after_the_first_batch(images: Any, wide: None) -> None:
    dataset = Annotated(images, 4, points=False)
    loader = DALILoader(dataset, 2, transform=v2.Compose([*CHAIN, Cut()]), device="cpu", collate_fn=as_lists)
    loader.explain(before := io.StringIO())
    next(iter(loader))
    loader.explain(after := io.StringIO())
    expected = (
        "targets    BoundingBoxes XYXY float32 at [1]['boxes'], Mask uint8 at [1]['masks'], Mask int64 at "
        "[1]['semantic'], with the rows of [1]['labels']: they move with the image, on the host, then in torch, as "
        "whole samples\n"
    )
    assert expected in before.getvalue()
    assert expected in after.getvalue()
