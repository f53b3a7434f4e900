"""Test whether random parameters are drawn as torchvision's own sampler draws them."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision import tv_tensors

from torchdali.tools.parity.draws import DRAWS, Draw
from torchdali.transforms import find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import Params, Spec

HEIGHT, WIDTH = 180, 240
SAMPLES = 3000
"""Number of samples on each side."""

LEVEL = 1e-3
"""Probability that correct code fails at least one of all tests. The seeds are fixed, so runs do not differ."""

_FEW = 24
"""Greatest number of distinct values of a parameter that is tested value by value."""

_stats: Any = importlib.import_module("scipy.stats")


@dataclass(frozen=True)
class DistributionTest:
    """Result of the test of one parameter.

    Attributes:
        kind: Name of the test.
        p: Probability of samples that are at least so far apart, if the distributions are equal.
    """

    kind: str
    p: float


def significance_level() -> float:
    """Return the p-value below which a test fails: :data:`LEVEL`, divided by the number of tests."""
    return LEVEL / max(1, len(DRAWS))


def draw_params(
    transform: Any, height: int = HEIGHT, width: int = WIDTH, count: int = SAMPLES, dtype: torch.dtype = torch.uint8
) -> Params:
    """Draw parameters by a transform's rule for images of one size."""
    rule = find_rule(transform)
    if rule is None:
        raise ValueError(f"no rule for {transform}")
    rule.infer(Spec("image", dtype, device="gpu"))
    rule.assign_positions(0)
    index = np.arange(count)
    draws = Draws(epoch_key(3, 1), index, np.zeros_like(index))
    return rule.draw(draws, np.tile([height, width], (count, 1)))


@functools.lru_cache(1)  # parameters as large as images take gigabytes
def sample_torchvision(transform: Any, height: int = HEIGHT, width: int = WIDTH, count: int = SAMPLES) -> list[Any]:
    """Return results of torchvision's ``make_params`` for images of one size."""
    image = [tv_tensors.Image(torch.empty(3, height, width))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return [transform.make_params(image) for _ in range(count)]


def p_value(actual: Any, expected: Any) -> DistributionTest:
    """Test whether two samples come from one distribution."""
    # Round, so that float32 and float64 numbers that differ in their last bits count as one value.
    both: list[npt.NDArray[np.float64]] = [np.round(np.asarray(x, np.float64), 6) for x in (actual, expected)]
    values, where = np.unique(np.concatenate(both), return_inverse=True)
    if len(values) > _FEW:
        return DistributionTest("Kolmogorov-Smirnov, two samples", float(_stats.ks_2samp(*both).pvalue))
    if len(values) == 1:
        return DistributionTest("one value on both sides", 1.0)
    counts = np.stack([np.bincount(part, minlength=len(values)) for part in np.split(where, [len(both[0])])])
    return DistributionTest(
        "chi-square, two samples", float(_stats.chi2_contingency(_merge_rare(counts), correction=False).pvalue)
    )


def _merge_rare(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Merge rare values in the table, because the test needs expected counts of at least 5."""
    rare = counts.sum(0) < 10
    return np.column_stack((counts[:, ~rare], counts[:, rare].sum(1))) if rare.sum() > 1 else counts


def compare_distributions(draw: Draw) -> DistributionTest:
    """Test one random parameter."""
    actual = np.asarray(draw.actual(draw_params(draw.transform, dtype=draw.dtype)), np.float64)
    expected = draw.expected
    if callable(expected):
        return p_value(actual, [expected(params) for params in sample_torchvision(draw.noting or draw.transform)])
    if isinstance(expected, (int, float)):
        coin = _stats.binomtest(int(actual.sum()), len(actual), expected)
        return DistributionTest(f"binomial, p = {expected:g}", float(coin.pvalue))
    counts = np.bincount(actual.astype(np.int64), minlength=len(expected))
    return DistributionTest("chi-square", float(_stats.chisquare(counts, np.asarray(expected) * len(actual)).pvalue))
