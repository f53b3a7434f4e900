"""Paste gives the pixels of DALI's own ``paste``, in torch and in DALI, and moves boxes, masks and key points along."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

import torchdali
from torchdali.transforms import Paste, find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import Spec

dali = pytest.importorskip("nvidia.dali")

FILL = (9, 80, 255)
COUNT = 64
RNG = np.random.default_rng(0)
# In float64, 45 * 1.4 is less than 63, and in float32 no less; so is 20 * 1.15 if 1.15 alone is rounded to float32.
SIZES = [(45, 50), (20, 40), *RNG.integers(1, 70, (COUNT - 2, 2)).tolist()]
IMAGES = [torch.from_numpy(RNG.integers(0, 256, (3, *size), np.uint8)) for size in SIZES]
NUMBERS = {
    # The ends of the ranges are among them.
    "ratio": np.array([1.4, 1.15, 1.0, 2.0, 2.5, *RNG.uniform(1, 4, COUNT - 5)]),
    "x": np.clip(RNG.uniform(-0.3, 1.3, COUNT), 0, 1),
    "y": np.clip(RNG.uniform(-0.3, 1.3, COUNT), 0, 1),
}


def run_dali(images: list[torch.Tensor], numbers: Any, min_size: int, device: str) -> list[torch.Tensor]:
    """Return what ``fn.paste`` makes of images."""
    count, where = len(images), "gpu" if device == "cuda" else "cpu"
    pipeline = dali.Pipeline(count, 1, 0 if device == "cuda" else None, exec_dynamic=True, prefetch_queue_depth=1)
    with pipeline:
        fed: Any = dali.fn.external_source(name="images", layout="HWC", ndim=3)
        ratio, x, y = (dali.fn.external_source(name=name, ndim=0) for name in ("ratio", "x", "y"))
        fed = fed.gpu() if where == "gpu" else fed
        out = dali.fn.paste(fed, ratio=ratio, paste_x=x, paste_y=y, fill_value=FILL, min_canvas_size=min_size)
        pipeline.set_outputs(out.cpu())
    pipeline.build()
    pipeline.feed_input("images", [image.permute(1, 2, 0).contiguous().numpy() for image in images])
    for name, values in numbers.items():
        pipeline.feed_input(name, values.astype(np.float32))
    (made,) = pipeline.run()
    return [torch.from_numpy(np.array(made.at(i))).permute(2, 0, 1) for i in range(count)]


@pytest.mark.parametrize("min_size", [0, 50])
def test_the_torch_body_is_dalis_paste(min_size: int, device: str) -> None:
    made = run_dali(IMAGES, NUMBERS, min_size, device)
    for i, (image, expected) in enumerate(zip(IMAGES, made, strict=True)):
        paste = Paste(*(NUMBERS[name][i] for name in ("ratio", "x", "y")), fill=FILL, min_size=min_size)
        assert torch.equal(paste(image), expected), (i, image.shape)
        assert torch.equal(v2.functional.pil_to_tensor(paste(v2.functional.to_pil_image(image))), expected)


@pytest.mark.parametrize("kind", ["pil", "tensor"])
def test_dali_makes_what_the_torch_body_makes_with_the_same_numbers(kind: str, device: str) -> None:
    """The numbers of a sample are those that its key gives, one for each range."""
    images: Any = [v2.functional.to_pil_image(image) if kind == "pil" else image for image in IMAGES[:12]]
    paste = Paste((1, 3), (0, 0.7), (0.2, 1), fill=FILL, min_size=40)
    rule: Any = find_rule(paste)
    rule.infer(Spec(kind="pil" if kind == "pil" else "tensor"))
    index = np.arange(len(images))
    drawn = rule.draw(Draws(epoch_key(5, 0), index, index * 0), np.array(SIZES[:12]))
    samples: Any = [(image, i) for i, image in enumerate(images)]
    loader = torchdali.DALILoader(samples, 4, transform=paste, device=device, seed=5, collate_fn=list)
    made = [image for batch in loader for image, _ in batch]
    for i, ours in enumerate(made):
        fixed = Paste(*(drawn[name][i] for name in ("ratio", "x", "y")), fill=FILL, min_size=40)
        expected = fixed(images[i])
        expected = v2.functional.pil_to_tensor(expected) if kind == "pil" else expected
        ours = v2.functional.pil_to_tensor(ours) if kind == "pil" and not isinstance(ours, torch.Tensor) else ours
        assert torch.equal(ours.cpu(), expected), i
    for name in ("ratio", "x", "y"):
        assert len(set(drawn[name].tolist())) == len(images)


def test_boxes_masks_and_points_move_with_the_image() -> None:
    image = tv_tensors.Image(torch.full((3, 20, 30), 7, dtype=torch.uint8))
    boxes: Any = tv_tensors.BoundingBoxes([[2.0, 3.0, 10.0, 20.0]], format="XYXY", canvas_size=(20, 30))  # pyright: ignore
    points = tv_tensors.KeyPoints([[2.0, 3.0]], canvas_size=(20, 30))  # pyright: ignore
    mask = tv_tensors.Mask(torch.ones(1, 20, 30, dtype=torch.int64))
    out, moved, place, masks, label = Paste(2, 0.5, 1.0, fill=FILL)(image, boxes, points, mask, torch.tensor(4))
    assert (moved.tolist(), moved.canvas_size) == ([[17.0, 23.0, 25.0, 40.0]], (40, 60))
    assert (place.tolist(), place.canvas_size) == ([[17.0, 23.0]], (40, 60))
    assert masks.equal(v2.functional.pad(mask, [15, 20, 15, 0]))  # around it are zeros, not the fill
    assert out[:, 0, 0].tolist() == list(FILL)
    assert (out[:, 20:, 15:45] == 7).all()
    assert label == 4


def test_a_fill_that_does_not_fit_runs_in_torch(capsys: pytest.CaptureFixture[str]) -> None:
    loader = torchdali.DALILoader([(IMAGES[0][:1], 0)], transform=Paste(2, fill=(1, 2)), device="cpu")  # type: ignore[arg-type]
    loader.explain()
    assert "2 fill values for 1 channels" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Paste(0.9), "ratio must be a number or a pair (low, high) of at least 1, got 0.9"),
        (lambda: Paste((3, 2)), "ratio must be a number or a pair (low, high) of at least 1, got (3, 2)"),
        (lambda: Paste(x=1.1), "x must be a number or a pair (low, high) of at least 0 and at most 1, got 1.1"),
        (lambda: Paste(y=(-1, 0)), "y must be a number or a pair (low, high) of at least 0 and at most 1, got (-1, 0)"),
        (lambda: Paste(fill="red"), "fill must be a number, or a number for each channel, got 'red'"),  # type: ignore[arg-type]
        (lambda: Paste(fill=()), "fill must be a number, or a number for each channel, got ()"),
        (lambda: Paste(min_size=-1), "min_size must be 0 or more, got -1"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
