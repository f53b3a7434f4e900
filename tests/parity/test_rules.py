"""Each rule against torchvision: pixels by replaying the drawn numbers, and their distributions.

The cases and the measuring are those of ``torchdali parity``, which writes docs/parity.md.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import torchdali
from torchdali import SampleError
from torchdali.tools.parity.cases import CASES
from torchdali.tools.parity.compare import compare_chain, compile_chain, find_exceeded_bounds, measure
from torchdali.tools.parity.distributions import (
    compare_distributions,
    draw_params,
    sample_torchvision,
    significance_level,
)
from torchdali.tools.parity.draws import DRAWS
from torchdali.tools.parity.photographs import COUNT
from torchdali.transforms import SampleTransformError, find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules.resize import compute_resized_size


def test_photographs_differ_in_size(photographs):
    images = [ours for ours, _ in compare_chain(photographs, [v2.PILToTensor()])]
    assert len(images) == COUNT
    assert len({image.shape for image in images}) == COUNT


def is_first_of_its_transform(name):
    """Whether no case before this one begins with the same word."""
    word = name.split()[0]
    return next(one for one in CASES if one.split()[0] == word) == name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if is_first_of_its_transform(name) else [pytest.mark.slow]) for name in CASES]
)
def test_pixels_are_torchvisions(name, photographs, device):
    case = CASES[name]
    if device not in case.devices:
        pytest.skip("DALI has no such operator here: torch runs it")
    if case.refused:
        pytest.skip(case.refused)
    assert find_exceeded_bounds(case, measure(case, photographs, device)) == ""


@pytest.mark.parametrize(("height", "width"), [(20, 900), (900, 20), (50, 50)])
def test_the_fallback_of_random_resized_crop_is_torchvisions(height, width):
    transform = v2.RandomResizedCrop(32, scale=(2.0, 3.0))
    window = draw_params(transform, height, width, 2)
    other = sample_torchvision(transform, height, width, 1)[0]
    assert window["start"][0].tolist() == [other["top"], other["left"]]
    assert window["shape"][0].tolist() == [other["height"], other["width"]]


SLOW_DRAWS = ("AugMix: ", "ElasticTransform: a place, not blurred", "ShotNoise: ", "Jitter: ", "SaltAndPepper: ")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(SLOW_DRAWS)) for name in DRAWS]
)
def test_parameters_are_drawn_as_torchvision_draws_them(name):
    assert compare_distributions(DRAWS[name]).p > significance_level()


@pytest.mark.parametrize(("size", "max_size"), [([64], None), ([100], 130), (None, 77), ([30, 40], None)])
def test_sizes_are_torchvisions(size, max_size):
    sizes = np.random.default_rng(1).integers(1, 2000, (3000, 2))
    expected = [F._geometry._compute_resized_output_size((h, w), size, max_size) for h, w in sizes.tolist()]
    assert compute_resized_size(sizes, size, max_size).tolist() == expected


def test_a_crop_larger_than_its_image_names_the_row():
    rule = find_rule(v2.RandomCrop(50))
    rule.infer(compile_chain([]).spec)
    index = np.arange(3)
    with pytest.raises(SampleTransformError, match="pad_if_needed=True") as raised:
        rule.draw(Draws(epoch_key(0, 0), index, index * 0), np.array([[60, 60], [49, 60], [10, 10]]))
    assert raised.value.row == 1


def test_corners_go_as_far_as_torchvisions():
    """Half of an odd side is rounded down before it is multiplied."""
    drawn_here = draw_params(v2.RandomPerspective(0.9, p=1), 7, 9)["corners"]
    drawn_there = np.array([v1.RandomPerspective.get_params(9, 7, 0.9)[1] for _ in range(500)])
    assert drawn_here.min(0).tolist() == drawn_there.min(0).tolist()
    assert drawn_here.max(0).tolist() == drawn_there.max(0).tolist()


def test_boxes_are_torchvisions_for_the_same_random_numbers(monkeypatch):
    """torchvision's own code, run on the numbers that the rule drew: attempts, rounding, positions and fallback."""
    transform = v2.RandomResizedCrop(32, scale=(0.2, 1.4), ratio=(0.4, 3.0))
    sizes = np.random.default_rng(2).integers(3, 700, (1500, 2))
    rule = find_rule(transform)
    rule.infer(compile_chain([]).spec)
    index = np.arange(len(sizes))
    windows = rule.draw(Draws(epoch_key(3, 1), index, index * 0), sizes)
    numbers = Draws(epoch_key(3, 1), index, index * 0).uniform(22)
    stream = iter(())
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, low, high: x.fill_(low + (high - low) * next(stream)))
    monkeypatch.setattr(torch, "randint", lambda low, high, size: torch.tensor([int(next(place) * high)]))
    wrong = 0
    for row, (height, width) in enumerate(sizes.tolist()):
        stream = iter(np.stack((numbers[row, :10], numbers[row, 10:20]), axis=1).ravel().tolist())
        place = iter(numbers[row, 20:].tolist())
        box = transform.make_params([tv_tensors.Image(torch.empty(3, height, width))])
        wrong += [box["top"], box["left"], box["height"], box["width"]] != [
            *windows["start"][row].tolist(),
            *windows["shape"][row].tolist(),
        ]
    assert wrong <= 1  # torchvision works in float32, and a half may round the other way


SIZES = ((1, 1), (1, 30), (2, 3), (5, 2), (7, 40), (20, 20), (60, 9), (61, 64))


@pytest.mark.parametrize("mode", ["reflect", "symmetric"])
@pytest.mark.parametrize("padding", [24, (3, 7, 41, 0), (0, 9)], ids=str)
def test_pil_images_are_reflected_as_often_as_a_border_is_wide(mode, padding, device):
    noise = np.random.default_rng(0)
    images = [Image.fromarray(noise.integers(0, 256, (*size, 3), np.uint8)) for size in SIZES]
    pad = v2.Pad(padding, padding_mode=mode)
    for chain in ([pad], [v2.RandomApply([pad], p=1.0)], [v2.CenterCrop((20, 5)), pad]):
        theirs = v2.Compose([*chain, v2.PILToTensor()])
        for rows in (slice(None), slice(-1, None)):  # all, and only those that are reflected once
            ours = torchdali.compile(v2.Compose([*chain, v2.PILToTensor()]), device=device)(images[rows])
            for one, image in zip(ours, images[rows], strict=True):
                assert torch.equal(one.cpu(), theirs(image))


def test_random_crops_of_wide_borders_are_windows_of_numpys(device):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 9, 3), np.uint8))
    crop = torchdali.compile(
        v2.Compose([v2.RandomCrop(32, padding=24, padding_mode="reflect"), v2.PILToTensor()]), device=device
    )
    padded = v2.PILToTensor()(v2.Pad(24, padding_mode="reflect")(image))
    windows = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4)
    for one in crop([image] * 8):
        assert (windows == one.cpu()).all(dim=(2, 3, 4)).any()


def test_a_border_wider_than_a_tensor_is_refused_as_in_torch():
    pad = torchdali.compile(v2.Pad(24, padding_mode="reflect"), device="cpu")
    with pytest.raises(SampleError, match=r"image 1\b.*a border narrower than the image of \(24, 40\)"):
        pad([torch.zeros(3, 40, 40, dtype=torch.uint8), torch.zeros(3, 24, 40, dtype=torch.uint8)])
