"""Graphs that rules build for a GPU alone, here on the CPU: they equal what torch runs there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import skimage.data
import torch
from scipy import stats
from torchvision.transforms import v2

from torchdali.pipeline.graph import require_dali
from torchdali.pipeline.operators import Operators
from torchdali.transforms import Jitter, Rule, ShotNoise, Water, find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import Spec

PICTURES = [torch.from_numpy(skimage.data.astronaut()[60:150, a : a + 97].copy()).permute(2, 0, 1) for a in (90, 130)]
UINT8, FLOAT = torch.uint8, torch.float32
LINEAR = v2.InterpolationMode.BILINEAR


def remap(pixels: Any, x: Any, y: Any, *, linear: bool) -> Any:
    """DALI's remap, which has no CPU backend."""
    if not linear:
        return np.ascontiguousarray(pixels[y.astype(int), x.astype(int)])
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    right, bottom = np.minimum(left + 1, pixels.shape[1] - 1), np.minimum(top + 1, pixels.shape[0] - 1)
    across, down = (x - left)[..., None], (y - top)[..., None]
    upper = pixels[top, left] * (1 - across) + pixels[top, right] * across
    lower = pixels[bottom, left] * (1 - across) + pixels[bottom, right] * across
    return (upper * (1 - down) + lower * down).astype(np.float32)


class _Functions:
    """``nvidia.dali.fn`` with a remap."""

    def __init__(self, ops: Operators) -> None:
        self._ops, self._fn, self.experimental = ops, ops.fn, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fn, name)

    def remap(self, image: Any, *maps: Any, interp: Any, pixel_origin: str) -> Any:
        assert pixel_origin == "center"
        linear = interp == self._ops.types.INTERP_LINEAR
        return self._ops.call(lambda *arrays: remap(*arrays, linear=linear), image, *maps, layout="HWC")


def run_graph(rule: Rule, images: list[torch.Tensor], params: dict[str, Any]) -> list[torch.Tensor]:
    dali = require_dali()
    fn, types, count = dali.fn, dali.types, len(images)
    pipeline = dali.Pipeline(count, 1, None, exec_dynamic=True, prefetch_queue_depth=1)
    with pipeline:
        ops = Operators(dali, "cpu", "exact")
        ops.fn = _Functions(ops)
        if not hasattr(rule, "is_on_host"):
            ops.device = "gpu"  # a function of the rule asks for it
        nodes = {
            name: fn.external_source(name=name, ndim=x.ndim, dtype=types.to_dali_type(x.dtype.__name__))
            for name, x in rule.inputs.items()
        }
        pipeline.set_outputs(rule.lower(ops, fn.external_source(name="images", layout="HWC", ndim=3), nodes))
    pipeline.build()
    pipeline.feed_input("images", [image.permute(1, 2, 0).contiguous().numpy() for image in images])
    for name, x in rule.inputs.items():
        pipeline.feed_input(name, np.ascontiguousarray(params[name].astype(x.dtype)))
    (output,) = pipeline.run()
    return [torch.from_numpy(np.array(output.at(i))).permute(2, 0, 1) for i in range(count)]


def draw(transform: Any, images: list[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    rule: Any = find_rule(transform)
    rule.infer(Spec(kind="image", dtype=images[0].dtype, channels=len(images[0])))
    assert "by torch" in rule.operators
    if hasattr(rule, "is_on_host"):
        rule.is_on_host = False  # as on a GPU
    index = np.arange(len(images))
    return rule, rule.draw(Draws(epoch_key(1, 0), index, index * 0), np.array([image.shape[1:] for image in images]))


CASES: dict[str, tuple[Any, torch.dtype, float, float]] = {
    "colours": (v2.ColorJitter(0.4, 0.4, 0.4), UINT8, 1, 0.02),
    "colours float": (v2.ColorJitter(0.4, 0.4, 0.4), FLOAT, 1e-6, 1e-7),
    "hue": (v2.ColorJitter(0.4, 0.4, 0.4, 0.3), UINT8, 2, 0.05),
    "equalize": (v2.RandomEqualize(1.0), UINT8, 1, 0.3),
    "shot noise": (ShotNoise((5, 40)), UINT8, 40, 1e-3),
    "little shot noise": (ShotNoise((0, 1e-3)), FLOAT, 1e-3, 1e-6),
    "no shot noise": (ShotNoise(0.0), UINT8, 0, 0),
    "jitter": (Jitter(7, fill=9), UINT8, 0, 0),
    "jitter float": (Jitter(6, fill=0.4), FLOAT, 1e-6, 1e-7),
    "water": (Water(phase=(0, 6.3), fill=7), UINT8, 255, 0.02),
    "water bilinear": (Water((9, 6), phase=(0, 6.3), interpolation=LINEAR, fill=7), UINT8, 1, 1e-3),
    "water bilinear float": (Water((9, 6), phase=(0, 6.3), interpolation=LINEAR, fill=0.2), FLOAT, 2e-3, 1e-5),
}


@pytest.mark.parametrize("name", CASES)
def test_the_graph_equals_torch(name: str) -> None:
    transform, dtype, most, mean = CASES[name]
    images = [image if dtype == UINT8 else image / 255 for image in PICTURES]
    rule, params = draw(transform, images)
    for i, ours in enumerate(run_graph(rule, images, params)):
        expected = rule.reference(images[i], {key: values[i] for key, values in params.items()})
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        difference = (ours.double() - expected.double()).abs()
        assert difference.max() <= most
        assert difference.mean() <= mean
        assert name == "no shot noise" or (ours != images[i]).any()


@pytest.mark.parametrize("mean", [0.0, 0.02, 0.7, 3.0, 4.99, 5.01, 9.0, 40.0, 1e4])
def test_photons_are_counted_as_poisson_says(mean: float) -> None:
    image = torch.full((3, 200, 300), mean)
    rule, params = draw(ShotNoise(1.0), [image])
    counts = rule.reference(image, {key: values[0] for key, values in params.items()}).numpy().ravel()
    assert (counts == counts.round()).all()
    if not mean:
        assert not counts.any()
        return
    edges = np.unique(stats.poisson.ppf(np.linspace(0.02, 0.98, 25), mean))
    expected = np.diff(stats.poisson.cdf(np.concatenate(([-1], edges, [np.inf])), mean)) * counts.size
    seen = np.diff(np.searchsorted(np.sort(counts), np.concatenate(([-1], edges, [np.inf])), side="right"))
    assert stats.chisquare(seen, expected).pvalue > 1e-4
