"""ElasticTransform, whose last operator DALI has on the GPU only: everything else is tried on the CPU as well."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali.pipeline.graph import require_dali
from torchdali.pipeline.operators import Operators
from torchdali.tools.parity.bounds import FLOAT
from torchdali.tools.parity.cases import CASES as ALL
from torchdali.tools.parity.compare import compile_chain
from torchdali.tools.parity.distributions import p_value
from torchdali.transforms import SampleTransformError, Unsupported, find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules import elastic
from torchdali.transforms.spec import Spec

CASES = {name: case for name, case in ALL.items() if name.startswith("ElasticTransform")}


def taken(image, x, y, nearest):
    """What remap is documented to do, where the maps stay in the image."""
    height, width = image.shape[:2]
    assert x.min() >= 0
    assert x.max() <= width - 1
    assert y.min() >= 0
    assert y.max() <= height - 1
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    if nearest:
        assert (left == x).all()
        assert (top == y).all()
        return image[top, left]
    x, y = (x - left)[..., None], (y - top)[..., None]
    right, below = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
    upper = image[top, left] * (1 - x) + image[top, right] * x
    lower = image[below, left] * (1 - x) + image[below, right] * x
    return (upper * (1 - y) + lower * y).astype(np.float32)


class Fn:
    """DALI's CPU operators, with a remap."""

    def __init__(self, dali):
        self.dali = dali
        self.experimental = SimpleNamespace(remap=self.remap)

    def __getattr__(self, name):
        return getattr(self.dali.fn, name)

    def remap(self, image, x, y, interp, pixel_origin):
        assert pixel_origin == "center"
        nearest = interp == self.dali.types.INTERP_NN
        return self.dali.fn.python_function(
            image, x, y, function=lambda *args: taken(*args, nearest), output_layouts="HWC"
        )


@pytest.mark.parametrize("name", CASES)
def test_all_but_remap_is_torchvisions(name):
    case, count = CASES[name], 4
    rule = find_rule(case.chain[-1])
    kind, dtype = ("pil", torch.uint8) if len(case.chain) == 1 else ("image", torch.uint8)
    dtype = torch.float32 if FLOAT in case.chain else dtype
    assert rule.infer(Spec(kind, dtype, device="gpu")) == Spec(kind, dtype, device="gpu")
    images = [
        torch.rand(3, 90 + i, 80 - i) if dtype == torch.float32 else torch.randint(256, (3, 90 + i, 80 - i)).to(dtype)
        for i in range(count)
    ]
    smooth = v2.GaussianBlur(9, 2.0)
    images = [smooth(image) for image in images]
    index = np.arange(count)
    params = rule.draw(
        Draws(epoch_key(0, 0), index, index * 0), np.array([image.shape[1:] for image in images], np.int64)
    )
    dali = require_dali()
    ops = Operators(dali, "cpu", "exact")
    ops.fn = Fn(dali)
    pipeline = dali.Pipeline(count, 1, None, exec_dynamic=True, prefetch_queue_depth=1)
    types = {np.dtype(np.uint32): dali.types.UINT32}
    with pipeline:
        kind = dali.types.FLOAT if dtype == torch.float32 else dali.types.UINT8
        image = dali.fn.external_source(name="image", ndim=3, dtype=kind, layout="HWC")
        nodes = {
            name: dali.fn.external_source(name=name, ndim=x.ndim, dtype=types[np.dtype(x.dtype)])
            for name, x in rule.inputs.items()
        }
        pipeline.set_outputs(rule.lower(ops, image, nodes))
    pipeline.build()
    pipeline.feed_input("image", [image.permute(1, 2, 0).contiguous().numpy() for image in images])
    for key in rule.inputs:
        pipeline.feed_input(key, np.ascontiguousarray(params[key]))
    (out,) = pipeline.run()
    means = []
    for i, image in enumerate(images):
        ours = torch.from_numpy(np.array(out[i])).permute(2, 0, 1)
        expected = rule.reference(image, {key: value[i] for key, value in params.items()})
        assert ours.dtype == expected.dtype
        difference = (ours.double() - expected.double()).abs()
        assert difference.max() <= case.max_abs
        means.append(difference.mean())
    assert sum(means) / count <= case.mean_abs


def test_the_cpu_leaves_it_to_torch():
    plan = compile_chain([v2.ElasticTransform()], "cpu")
    assert len(plan.suffix) == 1
    assert "remap on the GPU only" in str(plan)


def test_places_are_moved_as_torchvision_moves_them():
    transform = v2.ElasticTransform([40.0, 90.0], [2.0, 3.0])
    rule = find_rule(transform)
    rule.infer(Spec(device="gpu"))
    index = np.arange(60)
    params = rule.draw(Draws(epoch_key(0, 0), index, index * 0), np.tile([40, 120], (60, 1)))
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic.F, "elastic", lambda image, displacement, **_: drawn.append(displacement))
        for i in index:
            rule.reference(torch.empty(3, 40, 120), {key: value[i] for key, value in params.items()})
    torch.manual_seed(0)
    image = [tv_tensors.Image(torch.empty(3, 40, 120))]
    theirs = [transform.make_params(image)["displacement"] for _ in index]
    for axis in (0, 1):
        # Far enough apart that the blur does not connect them.
        ours, other = (torch.stack(x)[:, 0, ::24, ::24, axis].flatten() for x in (drawn, theirs))
        assert p_value(ours, other).p > 1e-3


def test_an_image_smaller_than_the_blur_is_named():
    rule = find_rule(v2.ElasticTransform())
    rule.infer(Spec(device="gpu"))
    index = np.arange(2)
    with pytest.raises(SampleTransformError, match="41 x 41") as raised:
        rule.draw(Draws(epoch_key(0, 0), index, index * 0), np.array([[21, 21], [20, 40]]))
    assert raised.value.row == 1


@pytest.mark.parametrize("sigma", [[0.0, 5.0], [64.0, 64.0]], ids=str)
def test_a_blur_that_there_is_not_is_left_to_torch(sigma):
    with pytest.raises(Unsupported):
        find_rule(v2.ElasticTransform(sigma=sigma)).infer(Spec(device="gpu"))


@pytest.mark.parametrize("sigma", [0.3, 0.9, 1.7, 2.45])
def test_windows_are_torchvisions(sigma, monkeypatch):
    transform, windows = v2.ElasticTransform(sigma=sigma), []

    def blurred(_, noise, window, sigma):
        windows.append(window)
        return noise

    monkeypatch.setattr(transform, "_call_kernel", blurred)
    transform.make_params([tv_tensors.Image(torch.empty(3, 40, 40))])
    assert windows == [[elastic.blur_window(sigma)] * 2] * 2
