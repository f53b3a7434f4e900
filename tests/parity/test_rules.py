"""Each rule against torchvision: pixels by replaying the drawn numbers, and their distributions.

The cases and the measuring are those of ``torchdali parity``, which writes docs/parity.md.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.tools.parity.cases import CASES
from torchdali.tools.parity.compare import compare_chain, compile_chain, exceeded_bounds, measure
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


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_torchvisions(name, photographs, device):
    case = CASES[name]
    if device not in case.devices:
        pytest.skip("DALI has no such operator here: torch runs it")
    if case.refused:
        pytest.skip(case.refused)
    assert exceeded_bounds(case, measure(case, photographs, device)) == ""


@pytest.mark.parametrize(("height", "width"), [(20, 900), (900, 20), (50, 50)])
def test_the_fallback_of_random_resized_crop_is_torchvisions(height, width):
    transform = v2.RandomResizedCrop(32, scale=(2.0, 3.0))
    window = draw_params(transform, height, width, 2)
    other = sample_torchvision(transform, height, width, 1)[0]
    assert window["start"][0].tolist() == [other["top"], other["left"]]
    assert window["shape"][0].tolist() == [other["height"], other["width"]]


@pytest.mark.parametrize("name", DRAWS)
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
