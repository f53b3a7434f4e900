"""torchvision's datasets in memory give DataLoader's batches without being asked for samples, on a GPU from a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same
from helpers.in_memory import COUNT, MAKERS, Make, identity, maker, numbers, on_host
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as v1
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.pipeline.compile import compile_plan, fuse
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import open_reader
from torchdali.pipeline.tuning import Threads
from torchdali.sources import from_dataset
from torchdali.sources.arrays import Arrays, ArraySource
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import InputKind

pytestmark = pytest.mark.timeout(60)

ORDER = [3, 19, 0, 0, 7, -1, 12, 5, 18, 1, 2]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes one of the datasets, by its name."""
    return maker(tmp_path, monkeypatch)


# Batches


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_batches_are_dataloaders(make: Make, name: str, batch_size: int | None, device: str) -> None:
    dataset = make(name)
    assert isinstance(from_dataset(dataset), ArraySource)
    options: dict[str, Any] = {"batch_size": batch_size, "sampler": ORDER}
    ours = list(DALILoader(dataset, device=device, **options))
    assert ours[0][0].device.type == device
    assert same(on_host(ours), list(DataLoader(dataset, **options)))


@pytest.mark.parametrize("name", ["CIFAR10", "MNIST", "SVHN", "STL10"])
@pytest.mark.parametrize("chain", [None, v2.Lambda(np.asarray), v2.ToImage()], ids=["PIL", "numpy", "ToImage"])
def test_collate_fn_gets_samples_as_torchvision_gives_them(make: Make, name: str, chain: Any) -> None:
    dataset = make(name, chain)
    theirs = list(DataLoader(dataset, 6, collate_fn=identity))
    ours = list(DALILoader(dataset, 6, collate_fn=identity, device="cpu"))
    for batch, true in zip(ours, theirs, strict=True):
        for (image, target), (true_image, true_target) in zip(batch, true, strict=True):
            assert (type(target), target) == (type(true_target), true_target)
            assert isinstance(image, Image.Image) == isinstance(true_image, Image.Image)
            assert not isinstance(image, Image.Image) or image.mode == true_image.mode
            assert np.array_equal(np.asarray(image), np.asarray(true_image))


CHAINS: dict[str, tuple[Any, float]] = {
    "v1": (v1.Compose([v1.RandomHorizontalFlip(1.0), v1.ToTensor(), v1.Normalize((0.5,), (0.25,))]), 1e-6),
    "pad": (v2.Compose([v2.Pad(4, padding_mode="reflect"), v2.CenterCrop(30), v2.ToImage()]), 0),
    "to RGB": (v2.Compose([v2.Grayscale(3), v2.RandomInvert(1.0), v2.PILToTensor()]), 1),
    "jitter": (v2.Compose([v2.ColorJitter(0, 0, (1.5, 1.5)), v2.ColorJitter((0.5, 0.5)), v2.ToImage()]), 1),
    "resize": (v2.Compose([v2.ToImage(), v2.Resize((40, 40))]), 2),
}


@pytest.mark.parametrize("name", ["CIFAR10", "MNIST"])
@pytest.mark.parametrize(("chain", "bound"), CHAINS.values(), ids=CHAINS.keys())
def test_transforms_are_torchvisions(make: Make, name: str, chain: Any, bound: float, device: str) -> None:
    dataset = make(name, chain)
    ours = on_host(DALILoader(dataset, 7, device=device))
    for (images, _), (true_images, _) in zip(ours, DataLoader(dataset, 7), strict=True):
        assert (images.dtype, images.shape) == (true_images.dtype, true_images.shape)
        assert (images.double() - true_images.double()).abs().max() <= bound


def test_sample_that_cannot_be_transformed_is_named(make: Make) -> None:
    dataset = Subset(make("CIFAR10", v2.Compose([v2.ToImage(), v2.RandomCrop(40)])), [4, 9])
    with pytest.raises(SampleError, match=r"sample 1 \(image 9 of CIFAR10, in memory\)") as caught:
        list(DALILoader(dataset, sampler=[1], device="cpu"))
    assert caught.value.index == 1


# Targets

TARGETS: dict[str, Callable[[list[int]], Any]] = {
    "numpy": np.array,
    "uint8": lambda values: np.array(values, np.uint8),
    "tensor": torch.tensor,
    "list of numpy": lambda values: list(np.array(values)),
    "float": lambda values: [value + 0.6 for value in values],
    "float tensor": lambda values: torch.tensor(values) + 0.6,
    "tuple": tuple,
    "mapping": lambda values: dict(enumerate(values)),
}


@pytest.mark.parametrize("name", ["CIFAR10", "MNIST", "SVHN"])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("batch_size", [None, 5])
def test_targets_may_be_of_any_type(make: Make, name: str, targets: Any, batch_size: int | None) -> None:
    dataset = make(name)
    setattr(dataset, "labels" if name == "SVHN" else "targets", targets(numbers()))
    assert isinstance(from_dataset(dataset), ArraySource)
    assert same(list(DALILoader(dataset, batch_size, device="cpu")), list(DataLoader(dataset, batch_size)))


@pytest.mark.parametrize("compat", [True, False])
@pytest.mark.parametrize("targets", [identity, np.asarray, list], ids=["tensor", "numpy", "list"])
def test_qmnist_gives_the_class_or_all_it_knows(make: Make, compat: bool, targets: Any) -> None:
    dataset = make("QMNIST", compat=compat)
    dataset.targets = targets(dataset.targets)
    ours = list(DALILoader(dataset, 5, device="cpu"))
    assert ours[0][1].shape == ((5,) if compat else (5, 8))
    assert same(ours, list(DataLoader(dataset, 5)))


@pytest.mark.parametrize("split", ["train", "test", "unlabeled", "train+unlabeled"])
def test_stl10_splits(make: Make, split: str) -> None:
    dataset = make("STL10", split=split)
    assert same(list(DALILoader(dataset, 8, device="cpu")), list(DataLoader(dataset, 8)))


def test_stl10_fold(make: Make) -> None:
    dataset = make("STL10", folds=0)
    assert len(dataset) == 13
    assert same(list(DALILoader(dataset, 8, device="cpu")), list(DataLoader(dataset, 8)))


def test_labels_may_be_missing(make: Make) -> None:
    dataset = make("STL10", target_transform=str)
    dataset.labels = None
    ours = list(DALILoader(dataset, 8, device="cpu"))
    assert ours[0][1][0] == "None"
    assert same(ours, list(DataLoader(dataset, 8)))
    dataset.target_transform = None
    for loader in (DataLoader(dataset, 8), DALILoader(dataset, 8, device="cpu")):
        with pytest.raises(TypeError, match=r"default_collate.*NoneType"):
            next(iter(loader))


@pytest.mark.parametrize("name", MAKERS)
def test_images_are_read_where_the_dataset_has_them(make: Make, name: str) -> None:
    dataset = make(name)
    assert np.shares_memory(Arrays(dataset).pixels, np.asarray(dataset.data))
    ours = DALILoader(dataset, 8, device="cpu")
    before = list(ours)
    dataset.data[3:9] = 7
    assert same(list(ours), true := list(DataLoader(dataset, 8)))
    assert not same(before, true)


def test_tensor_may_move_to_shared_memory(make: Make) -> None:
    """As it does when a DataLoader hands the dataset to workers that are not forked; what it left is freed."""
    dataset = make("MNIST")
    ours = DALILoader(dataset, 8, device="cpu")
    before = list(ours)
    dataset.data.share_memory_()
    assert same(list(ours), before)
    dataset.data[3:9] = 7
    assert same(list(ours), list(DataLoader(dataset, 8)))


# What the graph is fed


@pytest.mark.parametrize("name", MAKERS)
def test_images_are_dense_and_of_the_kind_that_is_said(make: Make, name: str) -> None:
    dataset = make(name, transform=None)
    source = from_dataset(dataset)
    images = source.read(np.array([4, 0, 4]))
    assert images.flags.c_contiguous
    assert source.kind is InputKind.PIXELS
    assert (source.spec.kind, source.spec.dtype) == ("pil", torch.uint8)
    assert images.shape == (3, *(source.spec.size or ()), source.spec.channels)
    for image, row in zip(images, [4, 0, 4], strict=True):
        assert np.array_equal(image.squeeze(), np.asarray(dataset[row][0]))


def test_nothing_is_copied_for_the_cpu(make: Make) -> None:
    source = from_dataset(make("CIFAR10"))
    assert source.to_device(torch.device("cpu"), 2**40) is source
    assert not source.resident


CUDA = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKERS)
def test_images_that_fit_the_budget_are_kept_on_the_gpu(make: Make, name: str) -> None:
    whole = make(name)
    dataset = Subset(ConcatDataset([whole, whole]), [7, 2, 7 + COUNT, 11])
    source = from_dataset(dataset)
    need = 3 * source.read(np.array([0])).nbytes
    assert source.to_device(CUDA, need - 1) is source
    copied = source.to_device(CUDA, need)
    assert copied.resident
    assert not source.resident
    assert source.to_device(CUDA, need) is copied is copied.to_device(CUDA, 0)
    images = copied.read(np.array([3, 0, 1, 2, 3]))
    assert images.device == CUDA
    assert images.is_contiguous()
    assert np.array_equal(images.cpu().numpy(), source.read(np.array([3, 0, 1, 2, 3])))
    assert "copied to cuda:0" in copied.describe()


@pytest.mark.gpu
def test_images_for_which_the_gpu_has_no_memory_stay_where_they_are(make: Make) -> None:
    dataset = make("STL10")
    dataset.data, dataset.labels = np.zeros((1000, 3, 96, 96), np.uint8), np.zeros(1000)
    source = from_dataset(dataset)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        assert source.to_device(CUDA, 2**40) is source
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_graph_waits_for_the_images_and_they_for_it(make: Make) -> None:
    """The batch is gathered on torch's stream, which is behind here, and read on DALI's; memory is used again."""
    source = from_dataset(make("STL10", v2.ToImage())).to_device(CUDA, 2**30)
    plan = fuse(compile_plan(source.transform, CUDA, "exact", source.spec, source.kind))
    engine = PipelinePool(plan, 8, Threads(2, CUDA, plan.input_kind), source.resident).acquire(8)
    batches = [(np.arange(8) + i) % COUNT for i in range(30)]
    pending: list[Any] = []
    for rows in batches:
        torch.cuda._sleep(3_000_000)  # pyright: ignore
        inputs, _ = plan.draw(Draws(epoch_key(0, 0), rows, np.zeros_like(rows)), open_reader(source).sizes(rows))
        engine.submit(source.read(rows), inputs)
        pending.append(rows)
        if len(pending) == 3:
            expected = from_dataset(make("STL10")).read(first := pending.pop(0))
            images = engine.take().views[0]
            assert isinstance(images, torch.Tensor)
            assert np.array_equal(images.permute(0, 2, 3, 1).cpu().numpy(), expected), first
