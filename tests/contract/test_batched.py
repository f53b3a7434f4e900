"""A torch transform in the middle of a chain: it gets whole batches, and DALI runs what follows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import torchdali
from torchdali import BatchShapeError, DALILoader, TransformError
from torchdali.transforms import BGR, Batched

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
CROP, FLIP, IMAGE = v2.RandomCrop(64), v2.RandomHorizontalFlip(), v2.ToImage()
FLOAT = v2.ToDtype(torch.float32, scale=True)


class Swap(nn.Module):
    """Reverses the channels of an image or a batch, and remembers the shapes that it got."""

    batchable = True

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(images.shape))
        return images.flip(-3)


def half(images: torch.Tensor) -> torch.Tensor:
    """Return floats of half the size."""
    return nn.functional.avg_pool2d(images.float() / 255, 2)


def noise(images: torch.Tensor) -> torch.Tensor:
    """Return the same noise for all images of a batch."""
    return images + torch.rand(images.shape[1:], device=images.device)


class Pictures(Dataset[Any]):
    """PIL images, which the loader's workers read."""

    def __init__(self, folder: ImageFolder) -> None:
        self.paths = [path for path, _ in folder.samples]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        with PIL.Image.open(self.paths[index]) as image:
            return image.convert("RGB"), index


def batches(dataset: Any, chain: list[Any], device: str = "cpu", **options: Any) -> list[Any]:
    """Return the images of all batches of four."""
    loader = DALILoader(dataset, 4, transform=v2.Compose(chain), device=device, seed=3, **options)
    return [images for images, _ in loader]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("source", ["native", "cache", "worker-fed", "two workers"])
def test_dali_goes_on_after_a_batchable_transform(photographs: ImageFolder, source: str, device: str) -> None:
    """The random numbers after it are those of a chain with a rule in its place."""
    swap = Swap()
    options: dict[str, Any] = {"cache": "device"} if source == "cache" else {}
    options |= {"num_workers": 2} if source == "two workers" else {}
    dataset = photographs if source in ("native", "cache") else Pictures(photographs)
    ours = batches(dataset, [CROP, IMAGE, swap, FLIP, FLOAT], device, **options)
    assert equal(ours, batches(dataset, [CROP, IMAGE, BGR(), FLIP, FLOAT], device, **options))
    assert swap.shapes == [(4, 3, 64, 64)] * 3


def test_it_may_change_size_and_type(photographs: ImageFolder, device: str) -> None:
    """What follows is planned for the images that it returns: views, a part in torch, a second such transform."""
    chain = [v2.CenterCrop(64), IMAGE, Batched(half), v2.FiveCrop(20)]
    dataset = photographs if device == "cpu" else Pictures(photographs)  # a GPU decodes JPEGs otherwise than PIL
    for views, expected in zip(
        batches(dataset, chain, device),
        DataLoader(ImageFolder(photographs.root, v2.Compose(chain)), 4),
        strict=True,
    ):
        assert len(views) == 5
        for ours, theirs in zip(views, expected[0], strict=True):
            assert (ours.cpu() - theirs).abs().max() <= (0 if device == "cpu" else 1e-6)  # a GPU divides otherwise
    twice = [v2.CenterCrop(64), IMAGE, Batched(half), v2.Grayscale(), Batched(lambda x: x[..., 1:, :]), v2.Pad(1), id]
    twice[-1] = lambda image: image * 2
    for ours, theirs in zip(
        batches(dataset, twice, device),
        DataLoader(ImageFolder(photographs.root, v2.Compose(twice)), 4),
        strict=True,
    ):
        assert ours.shape == (4, 1, 33, 34)
        assert (ours.cpu() - theirs[0]).abs().max() < 1e-5


def test_it_draws_what_the_seed_says(photographs: ImageFolder) -> None:
    chain = [v2.CenterCrop(64), IMAGE, FLOAT, Batched(noise), v2.Pad(0)]
    torch.manual_seed(0)
    first = batches(photographs, chain)
    state = torch.get_rng_state()
    assert equal(first, batches(photographs, chain))
    torch.manual_seed(0)
    plain = batches(photographs, chain[:3])
    assert torch.equal(state, torch.get_rng_state())
    assert (first[0] - plain[0] - (first[1] - plain[1])).abs().max() > 0.1


def test_boxes_take_the_way_of_samples(photographs: ImageFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """With boxes, what follows runs in torch on each sample, and the boxes move with the image."""

    class Boxes(Pictures):
        def __getitem__(self, index: int) -> Any:
            image, _ = super().__getitem__(index)
            box = tv_tensors.BoundingBoxes([[0, 0, 10, 20]], format="XYXY", canvas_size=image.size[::-1])
            return tv_tensors.Image(v2.functional.pil_to_tensor(image)), box

    chain = [v2.Resize((64, 64)), Batched(lambda images: images.flip(1)), v2.RandomHorizontalFlip(p=1)]
    loader = DALILoader(Boxes(photographs), 4, transform=v2.Compose(chain), device="cpu", seed=0)
    for (images, boxes), (expected, moved) in zip(
        loader, DataLoader([v2.Compose(chain)(*sample) for sample in Boxes(photographs)], 4), strict=True
    ):
        assert (images.int() - expected.int()).abs().max() <= 24  # the resize
        assert torch.equal(boxes, moved)
    loader.explain()
    assert "1 of 3 transforms runs in DALI" in capsys.readouterr().out.replace("run in", "runs in")


def test_it_is_named_by_explain(photographs: ImageFolder, wide: None, capsys: pytest.CaptureFixture[str]) -> None:
    chain = [CROP, IMAGE, nn.Sequential(nn.Identity()), FLIP]
    chain[2].batchable = True  # type: ignore[union-attr]
    DALILoader(photographs, 4, transform=v2.Compose(chain), device="cpu").explain()
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("3 of 4 transforms run in DALI on cpu device")
    assert "3 torch Sequential((0): Identity()) on the whole batch, then DALI runs the rest" in out
    assert "decoders.image_slice then torch transform 3, on the whole batch operators flip" in out


def test_compiled_transforms_have_it_too(photographs: ImageFolder, device: str) -> None:
    paths = [path for path, _ in photographs.samples]
    chain = [v2.CenterCrop(64), IMAGE, Swap(), v2.RandomHorizontalFlip(p=1)]
    ours = torchdali.compile(v2.Compose(chain), device=device)([*paths[:3], PIL.Image.open(paths[3]).convert("RGB")])
    expected = torch.stack([v2.Compose(chain)(PIL.Image.open(path).convert("RGB")) for path in paths[:4]])
    assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize(
    ("chain", "error", "message"),
    [
        ([v2.Resize(64), IMAGE, Swap(), v2.CenterCrop(20)], BatchShapeError, "the images of a batch differ in shape: "),
        ([CROP, IMAGE, Batched(lambda x: x[0]), FLIP], TransformError, "of 4 images, got (3, 64, 64); it was called"),
        (
            [CROP, IMAGE, Batched(lambda x: [*x]), FLIP],
            TransformError,
            "transform 3, <lambda>, must return a tensor (N, C, H, W) of",
        ),
        ([CROP, Batched(half), IMAGE], TypeError, "Batched takes tensors: put v2.ToImage() or v2.PILToTensor() before"),
        (
            [CROP, IMAGE, Batched(half), v2.RandomCrop(40)],
            torchdali.SampleError,
            ": transform 4, RandomCrop(size=(40, 40)",
        ),
        (
            [CROP, IMAGE, Batched(lambda x: x.bfloat16()), v2.CenterCrop(9)],
            TransformError,
            "must return a type that DALI takes (",
        ),
    ],
)
def test_errors_name_what_is_wrong(photographs: ImageFolder, chain: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        batches(photographs, chain)


def test_a_class_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"^module must be a function or module that takes a batch, got <class"):
        Batched(nn.Identity)


def test_each_image_is_a_batch_of_one_in_dataloader(photographs: ImageFolder) -> None:
    chain = v2.Compose([v2.CenterCrop(64), IMAGE, Batched(Swap()), FLOAT])
    image = chain(PIL.Image.open(Path(photographs.samples[0][0])).convert("RGB"))
    assert isinstance(image, tv_tensors.Image)
    assert image.shape == (3, 64, 64)
    pixels = np.asarray(image)
    assert pixels.max() <= 1
