"""What filters and noise refuse, and what they raise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

import torchdali
from torchdali.tools.parity.photographs import photographs
from torchdali.transforms import MultiView, SampleTransformError, Unsupported, find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import Spec

FLOAT = Spec("image", torch.float32)
BYTES = Spec("image")


@pytest.mark.parametrize(
    ("transform", "spec"),
    [
        (v2.GaussianBlur(3), Spec("image", torch.float16)),
        (v2.JPEG(50), FLOAT),
        (v2.JPEG(50), Spec("image", channels=1)),
        (v2.GaussianNoise(), Spec("pil")),
        (v2.GaussianNoise(), Spec("image", torch.float16)),
        (v2.GaussianNoise(sigma=-1.0), FLOAT),
        (v2.GaussianNoise(sigma=30.0), BYTES),
        (v2.RandomErasing(value=(1, 2)), BYTES),
        (v2.RandomErasing(), Spec("image", torch.float16)),
        (v1.RandomErasing(), Spec("pil")),
    ],
    ids=str,
)
def test_what_a_rule_cannot_do_runs_in_torch(transform, spec):
    with pytest.raises(Unsupported):
        find_rule(transform).infer(spec)


@pytest.mark.parametrize("wrong", [{"scale": (0.4, 0.1)}, {"ratio": (3.0, 0.3)}], ids=str)
def test_ranges_the_wrong_way_round_are_left_to_torch_which_raises(wrong):
    with pytest.warns(UserWarning, match="Scale and ratio"):
        transform = v2.RandomErasing(1, **wrong)
    with pytest.raises(Unsupported):
        find_rule(transform).infer(BYTES)
    with pytest.raises(RuntimeError):
        transform(torch.zeros(3, 9, 9))


@pytest.mark.parametrize(("size", "fits"), [((5, 3), True), ((4, 9), False), ((9, 2), False)])
def test_a_blur_needs_an_image_that_torchvision_could_mirror(size, fits):
    transform = v2.GaussianBlur((5, 9))  # width, height
    rule = find_rule(transform)
    rule.infer(BYTES)
    draws = Draws(epoch_key(0, 0), np.arange(2), np.zeros(2, int))
    sizes = np.array([(50, 50), size])
    if fits:
        rule.draw(draws, sizes)
        transform(torch.zeros(3, *size))
        return
    with pytest.raises(SampleTransformError, match=f"{size[1]} x {size[0]}") as raised:
        rule.draw(draws, sizes)
    assert raised.value.row == 1
    with pytest.raises(RuntimeError):
        transform(torch.zeros(3, *size))


@pytest.mark.parametrize(("size", "scale"), [((30, 30), 1.0), ((30, 60), 0.5), ((60, 30), 0.5)])
def test_erasing_gives_up_where_torchvision_does(size, scale):
    """Every box is as high or as wide as the image, which is one pixel too much."""
    transform = v2.RandomErasing(1, (scale, scale), (1.0, 1.0))
    assert transform.make_params([torch.zeros(3, *size)])["v"] is None
    rule = find_rule(transform)
    rule.infer(BYTES)
    index = np.arange(5)
    drawn = rule.draw(Draws(epoch_key(0, 0), index, index * 0), np.tile(size, (5, 1)))
    assert not drawn["erase"].any()
    assert not drawn["shape"].any()


COMPRESSED = v2.JPEG((50, 50))
GREY = v2.Grayscale(3)
PICTURES = [torch.from_numpy(picture[:90, :120].copy()).permute(2, 0, 1) for picture in photographs().values()][:4]


@pytest.mark.parametrize("after", [v2.Resize((20, 30)), COMPRESSED, v2.GaussianBlur(3)], ids=lambda t: type(t).__name__)
def test_no_image_of_a_batch_may_be_compressed(after, device):
    """What comes of no images has the axes of images all the same, for the transform after it."""
    chain = v2.RandomApply([COMPRESSED, after], p=0)
    assert torch.equal(torchdali.compile(chain, device=device)(PICTURES).cpu(), torch.stack(PICTURES))


def test_views_that_begin_alike_and_of_which_one_is_compressed(device):
    views = torchdali.compile(MultiView([GREY, v2.Compose([GREY, COMPRESSED])]), device=device)
    plain, compressed = views(PICTURES)
    assert torch.equal(plain, torchdali.compile(GREY, device=device)(PICTURES))
    assert torch.equal(compressed, torchdali.compile(v2.Compose([GREY, COMPRESSED]), device=device)(PICTURES))
