"""What torch does to whole batches: conversions after DALI, MixUp and CutMix."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

FLOAT = v2.ToDtype(torch.float32, scale=True)
CROP = [v2.ToImage(), v2.RandomResizedCrop(32)]
pytestmark = pytest.mark.timeout(60)


def loader(root, chain, device, **options):
    return DALILoader(ImageFolder(root, v2.Compose(chain)), device=device, seed=1, **{"batch_size": 6, **options})


@pytest.mark.parametrize(
    "after",
    [
        [v2.ToDtype(torch.bfloat16, scale=True)],
        [v2.ToDtype(torch.float16, scale=True)],
        [v2.ToDtype(torch.float64, scale=True)],
        [v2.ToDtype(torch.int64)],
        [FLOAT, v2.ToDtype(torch.bfloat16)],
        [FLOAT, v2.Normalize([0.5] * 3, [0.2] * 3), v2.ToDtype(torch.bfloat16), v2.ToPureTensor()],
        [v2.ToDtype(torch.float16, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)],
        [v2.ToDtype(torch.bfloat16, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)],
        [FLOAT, v2.LinearTransformation(torch.randn(3072, 3072) / 55, torch.rand(3072))],
    ],
    ids=str,
)
def test_conversions_do_to_a_batch_what_torchvision_does_to_an_image(pictures, after, device):
    plain, ours = loader(pictures, CROP, device), loader(pictures, [*CROP, *after], device)
    for (images, _), (converted, _) in zip(plain, ours, strict=True):
        expected = torch.stack([v2.Compose(after)(image) for image in images.cpu()])
        assert type(converted) is torch.Tensor
        assert converted.dtype == expected.dtype
        # The last bit of float32 differs between the CPU's and the GPU's arithmetic, and half types magnify it.
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(expected.dtype, 2e-5)
        assert torch.allclose(converted.cpu().double(), expected.double(), atol=tolerance, rtol=tolerance)
    assert not ours._session.native_plan.plan.suffix


def test_conversions_follow_where_sizes_differ(pictures, device):
    chain = [v2.ToImage(), v2.ToDtype(torch.bfloat16, scale=True)]
    ours = loader(pictures, chain, device, collate_fn=list)
    for images in ours:
        assert all(image.dtype == torch.bfloat16 for image, _ in images)
        assert len({image.shape for image, _ in images}) > 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize(
    ("after", "mix", "text"),
    [
        ([v2.Normalize([0.5] * 4, [0.5] * 4)], None, "while Normalize ran in torch on a batch of 6"),
        ([], lambda batch: batch, "while batch_transform was called with the parts of a batch: Tensor, Tensor"),
    ],
    ids=["four channels", "takes one argument"],
)
def test_what_fails_on_a_batch_is_named(pictures, after, mix, text):
    with pytest.raises((RuntimeError, TypeError)) as caught:
        next(iter(loader(pictures, [*CROP, FLOAT, *after], "cpu", batch_transform=mix)))
    assert caught.value.__notes__ == [text]


SOFT = [v2.MixUp(num_classes=3, alpha=0.8), v2.CutMix(num_classes=3)]


@pytest.mark.parametrize("mix", [*SOFT, v2.RandomChoice(SOFT)], ids=["MixUp", "CutMix", "either"])
def test_mixing_on_the_device(pictures, mix, device):
    chain = [*CROP, FLOAT]
    plain, ours = loader(pictures, chain, device), loader(pictures, chain, device, batch_transform=mix)
    before, after = iter(plain), iter(ours)
    state = torch.get_rng_state()
    for (images, labels), (mixed, soft) in zip(before, after, strict=True):
        assert mixed.device == images.device == soft.device
        assert soft.shape == (len(labels), 3)
        assert torch.allclose(soft.sum(1).cpu(), torch.ones(len(labels)))
        assert not torch.equal(mixed, images)
    assert torch.equal(state, torch.get_rng_state())
    again = list(loader(pictures, chain, device, batch_transform=mix))
    for (mixed, soft), (same, labels) in zip(loader(pictures, chain, device, batch_transform=mix), again, strict=True):
        assert torch.equal(mixed, same)
        assert torch.equal(soft, labels)


def test_mixing_is_torchvisions_with_the_same_numbers(pictures, device):
    chain, mix = [*CROP, FLOAT], v2.MixUp(num_classes=3)
    plain, ours = loader(pictures, chain, device), loader(pictures, chain, device, batch_transform=mix)
    for (images, labels), (mixed, soft) in zip(plain, ours, strict=True):
        share = soft.gather(1, labels[:, None])[:, 0]
        other = labels.roll(1) != labels
        assert len(share[other].unique()) <= 1
        if other.any():
            weight = float(share[other][0])
            assert torch.allclose(mixed, images * weight + images.roll(1, 0) * (1 - weight), atol=1e-5)


def test_mixing_inside_collate_fn(pictures, device):
    mix = v2.RandomChoice(SOFT)
    ours = loader(pictures, [*CROP, FLOAT], device, collate_fn=lambda samples: mix(*default_collate(samples)))
    for images, soft in ours:
        assert images.device.type == soft.device.type == torch.device(device).type
        assert images.shape[1:] == (3, 32, 32)
        assert soft.shape == (len(images), 3)


def test_batch_transform_is_explained(pictures, capsys):
    loader(pictures, [*CROP, FLOAT], "cpu", batch_transform=SOFT[1]).explain()
    assert "batch      CutMix(" in capsys.readouterr().out


def test_batch_transform_gets_what_collate_fn_made(pictures):
    ours = loader(
        pictures,
        CROP,
        "cpu",
        collate_fn=lambda samples: {"images": samples},
        batch_transform=lambda batch: len(batch["images"]),
    )
    assert set(ours) <= {6, 5, 4, 3, 2, 1}


def test_what_targets_and_collate_fn_draw_follows_from_the_samples(pictures):
    """And differs between samples, and between batches."""
    drawn = ImageFolder(pictures, v2.Compose(CROP), target_transform=lambda label: torch.rand(()))
    targets = [torch.cat([of for _, of in DALILoader(drawn, size, seed=1, device="cpu")]) for size in (5, 24)]
    assert torch.equal(*targets)
    assert len(targets[0].unique()) == 24
    numbers = [torch.cat(list(loader(pictures, CROP, "cpu", collate_fn=lambda _: torch.rand(1)))) for _ in range(2)]
    assert torch.equal(*numbers)
    assert len(numbers[0].unique()) == 4


@pytest.mark.parametrize("kind", [ImageFolder, lambda pictures: list(ImageFolder(pictures))], ids=["read", "asked"])
def test_collate_fn_and_batch_transform_draw_other_numbers(pictures, kind):
    options = {"transform": v2.Compose([*CROP]), "seed": 1, "device": "cpu"}
    dataset, beside = kind(pictures), lambda mine: (mine, torch.rand(1))
    ours = DALILoader(dataset, 6, collate_fn=lambda _: torch.rand(1), batch_transform=beside, **options)
    assert all(one != other for one, other in ours)


def test_epochs_differ_where_workers_persist(pictures):
    """For which DataLoader draws one base seed alone."""
    dataset = ImageFolder(pictures, v2.Compose(CROP))
    persistent = DALILoader(dataset, 24, num_workers=1, persistent_workers=True, device="cpu")
    (one, _), (other, _) = (next(iter(persistent)) for _ in range(2))
    assert not torch.equal(one, other)
