"""``torchdali.transforms.Operator``: an operator of DALI by its name, in both loaders."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, PipelineError, TransformError
from torchdali.transforms import HSV, Operator

CROP = [v2.CenterCrop(48), v2.ToImage()]


def batches(folder: ImageFolder, *transforms: Any, device: str = "cpu") -> list[torch.Tensor]:
    loader = DALILoader(folder, 6, transform=v2.Compose([*CROP, *transforms]), device=device, seed=5)
    return [images.cpu() for images, _ in loader]


def test_drawn_arguments_are_those_of_a_rule(photographs: ImageFolder, device: str) -> None:
    ours = batches(photographs, Operator("hsv", hue=(-40.0, 40.0), saturation=0.5), device=device)
    theirs = batches(photographs, HSV(hue=(-40, 40), saturation=0.5), device=device)
    assert all((one.int() - other.int()).abs().max() <= 1 for one, other in zip(ours, theirs, strict=True))
    assert len({tuple(image.flatten().tolist()) for image in torch.cat(ours)}) == 12


def test_both_loaders_give_the_same(photographs: ImageFolder) -> None:
    chain = v2.Compose([*CROP, Operator("brightness_contrast", brightness=1.5, contrast=0.5), v2.Pad(1)])
    dataset = ImageFolder(photographs.root, chain)
    for ours, theirs in zip(DALILoader(dataset, 6, device="cpu"), DataLoader(dataset, 6), strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_integers_and_lists(photographs: ImageFolder) -> None:
    """A range of integers has both ends. A list is one argument."""
    ours = torch.cat(batches(photographs, Operator("jpeg_compression_distortion", quality=(30, 31))))
    low, high = (
        torch.cat(batches(photographs, Operator("jpeg_compression_distortion", quality=quality)))
        for quality in (30, 31)
    )
    is_low, is_high = ((ours == other).flatten(1).all(1) for other in (low, high))
    assert (is_low ^ is_high).all()
    assert is_low.any()
    assert is_high.any()
    erased = batches(photographs, Operator("erase", anchor=[0, 0], shape=[4, 48], axis_names="HW"))
    assert all((images[:, :, :4] == 0).all() for images in erased)


def test_images_of_a_sample_share_the_numbers() -> None:
    operator = pickle.loads(pickle.dumps(Operator("hue", hue=(-90.0, 90.0))))
    image = torch.randint(0, 255, (3, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    one, other = operator({"a": tv_tensors.Image(image), "b": v2.functional.to_pil_image(image)}).values()
    assert torch.equal(one, v2.functional.pil_to_tensor(other))
    video = operator(tv_tensors.Video(torch.stack([image, image])))
    assert torch.equal(video[0], video[1])
    assert not torch.equal(video[0], one)
    assert repr(operator) == "Operator(hue, hue=(-90.0, 90.0))"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Operator("noise.gaussian", stddev=3.0), "noise.gaussian draws random numbers of its own, which"),
        (lambda: Operator("hue", hue=(3, 1)), "hue must be a value or a range (low, high) of two numbers, got (3, 1)"),
        (lambda: Operator("resize", size=(1, 2, 3)), "size must be a value or a range (low, high) of two numbers"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_what_it_does_not_take(photographs: ImageFolder) -> None:
    image = torch.zeros(3, 8, 8)
    hue = Operator("hue", hue=3.0)
    box = tv_tensors.BoundingBoxes([[0, 0, 1, 1]], format="XYXY", canvas_size=(8, 8))
    with pytest.raises(TypeError, match=r"^Operator does not move BoundingBoxes; leave it out of this chain$"):
        hue(image, box)
    with pytest.raises(TypeError, match=r"^Operator does not take float16; convert images to float32 before it$"):
        hue(image.half())
    with pytest.raises(TypeError, match=r"^Operator takes PIL images of mode RGB and L, got RGBA; convert it before$"):
        hue(v2.functional.to_pil_image(torch.zeros(4, 8, 8)))
    with pytest.raises(TransformError, match=r"nvidia.dali.fn has no operator 'huge'"):
        batches(photographs, Operator("huge"))
    for operator in (Operator("resize", size=[20, 20]), Operator("transpose", perm=[1, 0, 2])):
        with pytest.raises(PipelineError):
            batches(photographs, v2.CenterCrop((20, 30)), operator)
