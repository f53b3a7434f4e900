"""Rules that take in the one before them: the same images as without."""

from __future__ import annotations

import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.tools.parity.compare import compile_chain, run, split_indices

FLOAT = v2.ToDtype(torch.float32, scale=True)
FLIP, VERTICAL = v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()
BLENDED = {
    "rotation": ([FLIP, v2.RandomRotation(40, "bilinear", fill=(250, 9, 100))], 1),
    "rotation, expanded": ([VERTICAL, v2.RandomRotation(40, "bilinear", expand=True)], 1),
    "both flips": ([FLIP, VERTICAL, v2.RandomAffine(40, (0.1, 0.2), None, 20, "bilinear", 8, (30, 50))], 1),
    "one flip twice": ([FLIP, FLIP, v2.RandomRotation(40, "bilinear", fill=None)], 1),
    "perspective": ([VERTICAL, v2.RandomPerspective(0.5, 0.5, fill=99)], 1),
    "perspective, always": ([VERTICAL, v2.RandomPerspective(0.5, 1, fill=99)], 1),
    "floating": ([v2.ToImage(), FLOAT, FLIP, v2.RandomRotation(40, "bilinear", fill=0.3)], 1e-4),
}
PICKED = {
    "rotation": [FLIP, v2.RandomRotation(180, fill=(250, 9, 100))],
    "rotation, expanded": [VERTICAL, v2.RandomRotation(180, expand=True, center=(20, 30))],
    "affine": [FLIP, VERTICAL, v2.RandomAffine(40, (0.1, 0.2), (0.5, 2.0), 20, fill=8)],
    "translation": [FLIP, VERTICAL, v2.RandomAffine(0, (0.1, 0.2))],
    "perspective": [VERTICAL, v2.RandomPerspective(0.5, 0.5, "nearest", fill=99)],
}


def both_ways(photographs, chain, device):
    """Each image fused and not, after a check that the fused chain has fewer rules."""
    plans = [compile_chain(chain, device, fused=fused) for fused in (True, False)]
    fused, plain = ([rule for rule in plan.rules if rule.operators] for plan in plans)
    assert len(fused) < len(plain)
    assert any("flip" in rule.operators for rule in plain)
    assert not any("flip" in rule.operators for rule in fused)
    batches = split_indices(len(photographs)) * 3
    for one, other in zip(*(run(photographs, plan, batches) for plan in plans), strict=True):
        for i in range(len(one.rows)):
            yield one.images[i].cpu().double(), other.images[i].cpu().double()


@pytest.mark.parametrize("name", BLENDED)
def test_a_map_takes_in_flips(name, photographs, device):
    chain, step = BLENDED[name]
    means = []
    for fused, plain in both_ways(photographs, chain, device):
        difference = (fused - plain).abs()
        assert difference.max() <= step
        means.append(difference.mean() / step)
    assert len(means) == 36
    assert sum(means) / len(means) < 1e-3


@pytest.mark.parametrize("name", PICKED)
def test_a_map_to_nearest_pixels_takes_in_flips(name, photographs, device):
    shares = [(one != other).any(0).double().mean() for one, other in both_ways(photographs, PICKED[name], device)]
    assert len(shares) == 36
    assert sum(shares) / len(shares) < 1e-3


@pytest.mark.parametrize("scale", [True, False])
def test_a_conversion_takes_in_a_flip(photographs, device, scale):
    chain = [v2.ToImage(), FLIP, v2.ToDtype(torch.float32, scale=scale)]
    for fused, plain in both_ways(photographs, chain, device):
        assert torch.equal(fused, plain)


def test_a_conversion_puts_channels_first_at_no_cost(device):
    image = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).expand(3, 16, 16)
    plan = compile_chain([v2.PILToTensor(), FLOAT], device)
    assert plan.views[0].channels_first
    ((images, _),) = DALILoader([(image, 0)], 1, transform=FLOAT, device=device)
    assert torch.equal(images[0].cpu(), FLOAT(image)), "equal for each of the 256 values"


NORMALIZE = v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.25, 0.3])
HALF = v2.ToDtype(torch.float16)
CROP = v2.RandomCrop(60)
SHORTER = {
    "conversion and normalize": ([v2.ToImage(), FLOAT, NORMALIZE], 1, 2e-6),
    "conversion without scale": ([v2.ToImage(), v2.ToDtype(torch.float32), NORMALIZE], 1, 2e-4),
    "normalize twice": ([v2.ToImage(), FLOAT, NORMALIZE, v2.Normalize([0.1], [0.5])], 1, 1e-5),
    "flip, conversion, normalize": ([v2.ToImage(), FLIP, FLOAT, NORMALIZE], 1, 2e-6),
    "flip twice, conversion, normalize": ([v2.ToImage(), FLIP, FLIP, FLOAT, NORMALIZE], 2, 2e-6),
    "normalize to half": ([v2.ToImage(), FLIP, FLOAT, NORMALIZE, HALF], 1, 2e-3),
    "both flips": ([VERTICAL, FLIP], 1, 0),
    "padding and crop": ([v2.Pad((30, 10), fill=(9, 8, 7)), CROP], 1, 0),
    "three windows": ([v2.CenterCrop(110), v2.CenterCrop(90), CROP], 1, 0),
    "window and resized crop": ([v2.Pad(9, fill=5), v2.RandomResizedCrop(48)], 1, 0),
    "a window that leaves the one before": ([v2.CenterCrop(50), v2.CenterCrop(80)], 2, 0),
    "a window that is wider than the one before": ([v2.CenterCrop((90, 50)), v2.CenterCrop(80)], 2, 0),
}


@pytest.mark.parametrize("name", SHORTER)
def test_neighbours_become_one_operator(name, photographs, device):
    chain, left, bound = SHORTER[name]
    plans = [compile_chain(chain, device, fused=fused) for fused in (True, False)]
    assert len(plans[0].rules) == left
    batches = split_indices(len(photographs))
    for one, other in zip(*(run(photographs, plan, batches) for plan in plans), strict=True):
        for fused, plain in zip(one.images, other.images, strict=True):
            assert fused.dtype == plain.dtype
            assert (fused.double() - plain.double()).abs().max() <= bound


MODES = ("constant", "edge", "reflect", "symmetric")
OUTER = {
    "CenterCrop": v2.CenterCrop(90),
    "RandomResizedCrop": v2.RandomResizedCrop(90),
    "TenCrop": v2.TenCrop(90),
    **{f"Pad {mode}": v2.Pad((3, 12, 5, 1), padding_mode=mode) for mode in MODES},
    **{f"RandomCrop {mode}": v2.RandomCrop(100, padding=(3, 12, 5, 1), padding_mode=mode) for mode in MODES},
    "v1 RandomCrop reflect": v1.RandomCrop(100, padding=9, padding_mode="reflect"),
}
INNER = {
    "CenterCrop": v2.CenterCrop(80),
    "RandomCrop": v2.RandomCrop(80),
    "RandomCrop reflect": v2.RandomCrop(80, padding=7, padding_mode="reflect"),
    "RandomResizedCrop": v2.RandomResizedCrop(80),
    "FiveCrop": v2.FiveCrop(80),
}


@pytest.mark.parametrize(
    ("outer", "inner"), [(outer, [*INNER][(i + j) % len(INNER)]) for i, outer in enumerate(OUTER) for j in (0, 2)]
)
def test_a_window_of_a_window(outer, inner, photographs, device):
    plans = [compile_chain([OUTER[outer], INNER[inner]], device, fused=fused) for fused in (True, False)]
    batches = split_indices(len(photographs))
    for one, other in zip(*(run(photographs, plan, batches) for plan in plans), strict=True):
        views = zip(one.views, other.views, strict=True)
        for fused, plain in (pair for both in views for pair in zip(*both, strict=True)):
            # A window that is decoded alone may begin within one of a JPEG's blocks.
            assert (fused.double() - plain.double()).abs().mean() <= (0.02 if "Resized" in outer + inner else 0)
