"""Random sizes: torchvision's own code, run on the numbers that the rules drew, gives the same to the last pixel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali.tools.parity.compare import compile_chain
from torchdali.transforms import SampleTransformError, find_rule
from torchdali.transforms.rng import Draws, epoch_key

SIZES = np.random.default_rng(0).integers(1, 700, (800, 2))


def rule_of(transform):
    rule = find_rule(transform)
    rule.infer(compile_chain([]).spec)
    return rule


def draws():
    index = np.arange(len(SIZES))
    return Draws(epoch_key(3, 1), index, index * 0)


def played(monkeypatch, transform, words):
    """torchvision's parameters for each size, from these words, of which ``torch.rand`` takes 24 bits."""
    stream = iter(())
    monkeypatch.setattr(torch, "rand", lambda n: torch.tensor([(int(next(stream)) >> 8) * 2.0**-24 for _ in range(n)]))
    monkeypatch.setattr(torch, "randint", lambda *limits: torch.tensor(pick(next(stream), *limits)))
    for (height, width), row in zip(SIZES.tolist(), words, strict=True):
        stream = iter(row)
        yield transform.make_params([tv_tensors.Image(torch.empty(1, height, width))])


def pick(word, *limits):
    low, high = (0, *limits[:-1])[-2:]
    return low + int(int(word) * 2.0**-32 * (high - low))


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        v2.ScaleJitter((1024, 700)),
        v2.ScaleJitter((900, 900), (1.1, 1.1)),
        v2.RandomShortestSize([480, 512, 800], max_size=1333),
        v2.RandomShortestSize(37),
        v2.RandomResize(90, 200),
    ],
    ids=str,
)
def test_sizes_are_torchvisions(monkeypatch, transform):
    ours = rule_of(transform).sizes(draws(), SIZES)
    for size, given, params in zip(ours, SIZES.tolist(), played(monkeypatch, transform, draws().words(8)), strict=True):
        expected = params["size"]
        if len(expected) == 1:
            image = torch.empty(1, *given, device="meta")
            expected = v2.functional.resize(image, expected, v2.InterpolationMode.NEAREST).shape[-2:]
        assert size.tolist() == list(expected)


@pytest.mark.parametrize("side_range", [(1.0, 4.0), (1.3, 1.3)])
def test_canvases_are_torchvisions(monkeypatch, side_range):
    transform = v2.RandomZoomOut(side_range=side_range, p=1)
    drawn = rule_of(transform).draw(draws(), SIZES)
    start, shape = drawn["start"], drawn["shape"]
    # A coin, the factor, and then, as the rule takes them, top and left.
    for (top, left), (height, width), given, params in zip(
        start, shape, SIZES, played(monkeypatch, transform, draws().words(4)[:, [1, 3, 2]]), strict=True
    ):
        below, right = height - given[0] + top, width - given[1] + left
        assert [-left, -top, right, below] == params["padding"]


def test_a_size_of_nothing_names_the_row():
    with pytest.raises(SampleTransformError, match="would become"):
        rule_of(v2.ScaleJitter((10, 10), (0.01, 0.01))).draw(draws(), SIZES)


@pytest.mark.parametrize("limits", [(90, 90), (90, 80), (90.5, 100)])
def test_an_empty_range_of_sizes_is_left_to_torch(limits):
    plan = compile_chain([v2.RandomResize(*limits)])
    assert "no whole number" in str(plan)
    assert plan.suffix


@pytest.mark.parametrize("fill", [(1, 2), {v2.Resize: 3}], ids=str)
def test_a_fill_that_does_not_fit_is_left_to_torch(fill):
    assert compile_chain([v2.ToImage(), v2.RandomZoomOut(fill=fill)]).suffix
