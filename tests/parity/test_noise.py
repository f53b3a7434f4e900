"""Noise: the same integers in the graph as in numpy, and as good as independent."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from torchdali.pipeline.graph import require_dali
from torchdali.pipeline.operators import Operators
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules._noise import (
    INPUTS,
    draw_noise,
    random_normal,
    random_words,
    reference_normal,
    reference_words,
    to_uniform,
)

HEIGHT, WIDTH, CHANNELS = 224, 224, 3


def samples(count, size=(HEIGHT, WIDTH)):
    index = np.arange(count)
    params = draw_noise(Draws(epoch_key(3, 1), index, index * 0), np.tile(size, (count, 1)))
    return params, [{name: values[i] for name, values in params.items()} for i in range(count)]


@pytest.fixture(scope="module")
def in_the_graph():
    """Words and normal numbers for six images of different sizes; for the odd ones in a conditional branch too."""
    dali = require_dali()
    ops = Operators(dali, "cpu", "exact")
    fn, types = dali.fn, dali.types
    sizes = np.array([[1, 1], [2, 300], [5, 7], [64, 33], [301, 2], [80, 81]], np.int32)
    params, each = samples(len(sizes), (301, 301))
    pipeline = dali.Pipeline(batch_size=len(sizes), num_threads=1, device_id=None, exec_dynamic=True)
    with pipeline:
        nodes = {
            name: fn.external_source(name=name, ndim=x.ndim, dtype=types.to_dali_type(x.dtype.__name__))
            for name, x in INPUTS.items()
        }
        nodes["size"] = fn.external_source(name="size", ndim=1, dtype=types.INT32)
        odd = fn.external_source(name="odd", dtype=types.BOOL, ndim=0)

        def noise(image, p):
            return random_normal(ops, p, p["size"][0], p["size"][1], 3)

        drawn = random_words(ops, nodes, nodes["size"][0], nodes["size"][1], 3)
        max_abs = noise(None, nodes)
        pipeline.set_outputs(drawn, max_abs, ops.apply_where(odd, noise, max_abs * 0.0, nodes))
    pipeline.build()
    for name, values in params.items():
        pipeline.feed_input(name, np.ascontiguousarray(values))
    pipeline.feed_input("size", sizes)
    pipeline.feed_input("odd", np.arange(len(sizes)) % 2 == 1)
    outputs = pipeline.run()
    return [(*sizes[i].tolist(), each[i], *(np.array(x.at(i)) for x in outputs)) for i in range(len(sizes))]


def test_words_are_numpys_bit_for_bit(in_the_graph):
    for height, width, sample, drawn, _, _ in in_the_graph:
        assert drawn.dtype == np.uint32
        np.testing.assert_array_equal(drawn, reference_words(sample, height, width, 3))


def test_normal_numbers_are_numpys_but_for_rounding(in_the_graph):
    for i, (height, width, sample, _, numbers, in_a_branch) in enumerate(in_the_graph):
        assert numbers.dtype == np.float32
        expected = reference_normal(sample, height, width, 3)
        assert numbers.shape == expected.shape
        np.testing.assert_allclose(numbers, expected, atol=5e-6)
        np.testing.assert_array_equal(in_a_branch, numbers if i % 2 else numbers * 0)


def test_words_are_the_published_ones():
    """One pixel by Python's integers, from the definition."""
    sample = {"noise_step": np.uint32(0x9E3779B1), "noise_start": np.uint32(0xDEADBEEF)}
    x = ((65536 * 17 + 4 * 23 + 2) * 0x9E3779B1 + 0xDEADBEEF) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    assert reference_words(sample, 18, 24, 3)[17, 23, 2] == x ^ x >> 16


@pytest.mark.parametrize("step", [1, 3, 16385, 65537, 0x80000001, 0xFFFF0001, 0xFFFFFFFF, 0x9E3779B1])
def test_even_with_a_poor_step_numbers_are_as_good_as_independent(step):
    sample = {"noise_step": np.uint32(step), "noise_start": np.uint32(12345)}
    drawn, numbers = reference_words(sample, HEIGHT, WIDTH, CHANNELS), reference_normal(sample, HEIGHT, WIDTH, CHANNELS)
    assert check(drawn, numbers) > 1e-4


def test_numbers_of_drawn_samples_are_as_good_as_independent():
    _, each = samples(4)
    for sample in each:
        drawn, numbers = (
            reference_words(sample, HEIGHT, WIDTH, CHANNELS),
            reference_normal(sample, HEIGHT, WIDTH, CHANNELS),
        )
        assert check(drawn, numbers) > 1e-4


def check(drawn, numbers):
    """Moments, bits and correlations; the smaller p-value of both distributions."""
    uniform = to_uniform(drawn)
    assert len(np.unique(drawn)) == drawn.size  # one to one, so no pixel repeats another
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(numbers.mean()) * numbers.size**0.5 < 4.5
    assert abs((numbers**2).mean() - 1) * (numbers.size / 2) ** 0.5 < 4.5
    assert abs((numbers**4).mean() - 3) * (numbers.size / 96) ** 0.5 < 4.5
    bits = np.array([(drawn >> np.uint32(bit) & np.uint32(1)).mean() for bit in range(32)])
    assert abs(bits - 0.5).max() * 2 * drawn.size**0.5 < 5
    # Rows, columns and channels, near and far; the two halves share their radius, and so their squares must not.
    for x in (uniform, numbers, numbers**2):
        half = (HEIGHT + 1) // 2
        for one, other in [
            (x[1:], x[:-1]),
            (x[:, 1:], x[:, :-1]),
            (x[:, 64:], x[:, :-64]),
            (x[1:, 1:], x[:-1, :-1]),
            (x[..., 0], x[..., 1]),
            (x[..., 0], x[..., 2]),
            (x[half:], x[:-half]),
        ]:
            assert uncorrelated(one, other)
    return min(stats.kstest(uniform.ravel(), "uniform").pvalue, stats.kstest(numbers.ravel(), "norm").pvalue)


def uncorrelated(one, other):
    return abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) * one.size**0.5 < 4.5


def test_samples_have_noise_of_their_own():
    _, each = samples(300)
    assert len({sample["noise_step"] for sample in each}) == 300
    assert all(sample["noise_step"] % 2 == 1 for sample in each)  # else some numbers would come up twice
    near = [reference_normal(sample, 64, 64, 3) for sample in each[:40]]
    assert all(uncorrelated(one, other) for i, one in enumerate(near) for other in near[:i])
    # Keys that differ in one bit of either word.
    sample = each[0]
    for name, bit in [("noise_step", 1), ("noise_step", 31), ("noise_start", 0), ("noise_start", 31)]:
        other = {**sample, name: sample[name] ^ np.uint32(1 << bit)}
        assert uncorrelated(near[0], reference_normal(other, 64, 64, 3))


def test_a_sample_has_the_same_noise_in_any_batch():
    index = np.array([7, 2, 9])
    one = draw_noise(Draws(epoch_key(3, 1), index, index * 0), np.full((3, 2), 50))
    other = draw_noise(Draws(epoch_key(3, 1), index[1:], index[1:] * 0), np.full((2, 2), 900))
    for name in ("noise_step", "noise_start"):
        np.testing.assert_array_equal(one[name][1:], other[name])
