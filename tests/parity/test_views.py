"""Transforms that make several images of one: which views, in what container, with which random numbers."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.transforms import MultiView

FLOAT = v2.ToDtype(torch.float32, scale=True)
NORMALIZE = v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.2, 0.3])
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def lossless(pictures, tmp_path):
    """The pictures as PNG, in their classes."""
    for path in pictures.glob("*/*"):
        target = tmp_path / path.parent.name / f"{path.stem}.png"
        target.parent.mkdir(exist_ok=True)
        with Image.open(path) as image:
            image.convert("RGB").save(target)
    return tmp_path


def both(root, chain, device, **options):
    dataset = ImageFolder(root, v2.Compose(chain))
    return DALILoader(dataset, device=device, seed=1, **options), DataLoader(dataset, **options)


@pytest.mark.parametrize(
    "chain",
    [
        [v2.ToImage(), v2.FiveCrop((30, 40))],
        [v2.ToImage(), v2.TenCrop(33)],
        [v2.TenCrop(32, vertical_flip=True), v2.ToImage(), FLOAT, NORMALIZE],
        [v2.Pad(3), v2.FiveCrop(32), v2.ToImage(), v2.CenterCrop(20)],
        [v2.ToImage(), MultiView([v2.CenterCrop(40), v2.Compose([v2.CenterCrop(50), v2.Pad(1)])])],
    ],
    ids=str,
)
def test_views_are_torchvisions(lossless, chain, device):
    ours, theirs = both(lossless, chain, device, batch_size=5)
    for (views, labels), (expected, classes) in zip(ours, theirs, strict=True):
        assert torch.equal(labels.cpu(), classes)
        assert type(views) is type(expected)
        assert len(views) == len(expected)
        for view, wanted in zip(views, expected, strict=True):
            assert view.dtype == wanted.dtype
            assert torch.allclose(view.cpu(), wanted, atol=0 if view.dtype == torch.uint8 else 1e-6)
    assert all(step.library != "torch" for step in ours._session.native_plan.plan.steps)


def test_each_view_draws_its_own_numbers(lossless, device):
    crop = v2.RandomCrop(24)
    ours, _ = both(lossless, [v2.ToImage(), MultiView([crop, crop])], device, batch_size=8)
    (first, second), _ = next(iter(ours))
    assert not torch.equal(first, second)


def test_what_follows_draws_once_for_all_views(lossless, device):
    chain = [v2.ToImage(), MultiView([v2.CenterCrop(24), v2.CenterCrop(24)])]
    ours, _ = both(lossless, [*chain, v2.RandomHorizontalFlip()], device, batch_size=8)
    plain, _ = both(lossless, chain, device, batch_size=8)
    ((first, second), _), ((straight, _), _) = next(iter(ours)), next(iter(plain))
    assert torch.equal(first, second)
    assert not torch.equal(first, straight)


def test_multi_crop_sizes(lossless, device):
    big = v2.Compose([v2.RandomResizedCrop(48, (0.3, 1)), v2.RandomHorizontalFlip(), v2.ToImage(), FLOAT, NORMALIZE])
    small = v2.Compose([v2.RandomResizedCrop(24, (0.1, 0.3)), v2.ToImage(), FLOAT, NORMALIZE])
    ours, theirs = both(lossless, [MultiView([big] * 2 + [small] * 3)], device, batch_size=4)
    for (views, _), (expected, _) in zip(ours, theirs, strict=True):
        assert [view.shape for view in views] == [view.shape for view in expected]
        assert all(view.dtype == torch.float32 for view in views)
        assert all(view.is_contiguous() for view in views)


def test_the_image_is_decoded_once(lossless):
    ours, _ = both(lossless, [MultiView([v2.RandomResizedCrop(24)] * 3), v2.ToImage()], "cpu", batch_size=4)
    ours._session.build_native_plan(ours._options, ours)
    assert not ours._session.native_plan.plan.decode_window
    assert str(ours._session.native_plan.plan).count("decoders") == 1


def test_explain_shows_the_views(lossless, capsys):
    ours, _ = both(lossless, [MultiView([v2.RandomCrop(24), v2.CenterCrop(32)]), v2.ToImage()], "cpu", batch_size=4)
    ours.explain()
    text = capsys.readouterr().out
    assert "view 1     uint8 (3, 24, 24): slice" in text
    assert "view 2     uint8 (3, 32, 32): slice" in text
    assert "draws view 1: top, left" in text


@pytest.mark.parametrize("later", [v2.Lambda(lambda views: torch.stack(list(views)))], ids=["Lambda"])
def test_torch_gets_the_container(lossless, later, device):
    ours, theirs = both(lossless, [v2.ToImage(), v2.TenCrop(32), later], device, batch_size=4)
    if isinstance(later, v2.Lambda):
        # v2.Lambda would be called with each crop; the documented idiom is v1's.
        ours, theirs = both(lossless, [v2.ToImage(), v2.TenCrop(32), v1.Lambda(later.lambd)], device, batch_size=4)
    for (crops, _), (expected, _) in zip(ours, theirs, strict=True):
        assert torch.equal(crops.cpu(), expected)


@pytest.mark.parametrize(("one", "what"), [(v2.ToImage(), "kind"), (v2.Grayscale(), "channels"), (FLOAT, "dtype")])
def test_views_that_differ_run_in_torch(lossless, one, what):
    before = [v2.ToImage()] if what == "dtype" else []
    ours, _ = both(lossless, [*before, MultiView([v2.CenterCrop(24), one])], "cpu", batch_size=4)
    ours._session.build_native_plan(ours._options, ours)
    assert f"its views differ in {what}" in ours._session.native_plan.plan.steps[-1].note


def test_views_that_cannot_be_one_plan_run_in_torch(lossless):
    mixed = MultiView([v2.CenterCrop(24), v2.Lambda(lambda image: image)])
    ours, _ = both(lossless, [mixed], "cpu", batch_size=4)
    ours._session.build_native_plan(ours._options, ours)
    assert "no rule for Lambda" in ours._session.native_plan.plan.steps[0].note


def test_a_crop_larger_than_the_image_names_the_file(lossless):
    ours, _ = both(lossless, [v2.ToImage(), v2.FiveCrop(4000)], "cpu", batch_size=4)
    with pytest.raises(SampleError, match=r"FiveCrop.*larger than the image"):
        next(iter(ours))


def test_a_view_of_uneven_sizes_is_named(lossless):
    ours, _ = both(lossless, [v2.ToImage(), MultiView([v2.CenterCrop(24), v2.Identity()])], "cpu", batch_size=4)
    with pytest.raises(RuntimeError, match="differ in shape"):
        next(iter(ours))


def test_multi_view_needs_a_transform():
    with pytest.raises(ValueError, match="at least one"):
        MultiView([])


def test_multi_view_on_one_image():
    image = Image.new("RGB", (40, 40))
    views = MultiView([v2.CenterCrop(10), v2.CenterCrop(20)])(image)
    assert [view.size for view in views] == [(10, 10), (20, 20)]


def test_multi_view_takes_a_list_of_transforms():
    with pytest.raises(TypeError, match="MultiView needs a list of transforms, one for each view, got Compose"):
        MultiView(v2.Compose([v2.CenterCrop(10)]))
    with pytest.raises(TypeError, match="got 'ab'"):
        MultiView("ab")
    with pytest.raises(TypeError, match="CenterCrop is a class of transforms"):
        MultiView([v2.CenterCrop])
    assert len(MultiView(v2.CenterCrop(size) for size in (10, 20)).transforms) == 2
