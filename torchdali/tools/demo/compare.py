"""What the demo claims about a loader, observed from outside: its order, its pixels, its speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali.tools.demo.train import (
    AUGMENT,
    NORMALIZE,
    VIEW,
    LoaderClass,
    Training,
    make_loader,
    settle,
    train,
)

__all__ = ["Comparison", "Run", "compare", "images_to_observe", "images_to_time", "observe", "speeds"]

ROUNDS = 3
REPEATS = 4

# Grey levels, the mean over one image: decoders differ by less than one, different photographs by tens.
SAME_IMAGE = 8.0


@dataclass(frozen=True)
class Run:
    """What was seen of one loader.

    Attributes:
        device: Where its images lie.
        files: The file behind each image of a shuffled epoch, as its number in the dataset.
        views: These images, uint8, after a transform that draws no random numbers.
        training: The run of the training script.
    """

    device: torch.device
    files: Tensor
    views: Tensor
    training: Training


@dataclass(frozen=True)
class Comparison:
    """Two loaders side by side.

    Attributes:
        torch: What was seen of ``torch.utils.data.DataLoader``.
        dali: What was seen of ``torchdali.DALILoader``.
        speeds: Images a second of each alone, in this order.
        same_order: Whether both gave the same files, images and training labels, image by image.
        largest: Largest difference of a pixel, in grey levels.
        mean: Mean difference of a pixel, in grey levels.
    """

    torch: Run
    dali: Run
    speeds: tuple[float, float]
    same_order: bool
    largest: int
    mean: float


def observe(
    loader_class: LoaderClass,
    root: Path,
    *,
    device: torch.device,
    epochs: int,
    workers: int,
    seed: int,
    tick: Callable[[int], None],
) -> Run:
    """Runs one loader through a shuffled epoch without random transforms, and through the training script.

    Args:
        loader_class: ``torch.utils.data.DataLoader``, or what takes its place.
        root: The image folder, with ``train`` and ``val``.
        device: Where images are wanted.
        epochs: Epochs of the training script.
        workers: ``num_workers`` of the loaders.
        seed: For ``torch.manual_seed``.
        tick: Called with the number of images just seen.
    """
    torch.manual_seed(seed)
    numbered = ImageFolder(str(root / "train"), transform=v2.Compose(VIEW))
    # Each label becomes its file's number, so that the loader itself says which file it took an image for.
    numbered.samples = [(path, number) for number, (path, _) in enumerate(numbered.samples)]
    where, files, views = torch.device("cpu"), list[Tensor](), list[Tensor]()
    for images, numbers in make_loader(loader_class, numbered, shuffle=True, device=device, workers=workers):
        where = images.device
        files.append(numbers.cpu())
        views.append(images.cpu())
        tick(len(numbers))
    training = train(loader_class, root, device=device, epochs=epochs, workers=workers, seed=seed, tick=tick)
    return Run(where, torch.cat(files), torch.cat(views), training)


def speeds(
    loader_classes: Sequence[LoaderClass],
    root: Path,
    *,
    device: torch.device,
    workers: int,
    tick: Callable[[int], None],
) -> list[float]:
    """Images a second of each loader, with nobody using the images: the median epoch after one to warm up.

    The loaders take turns, so that whatever else the machine does meets all of them.
    """
    folder = ImageFolder(str(root / "train"), transform=v2.Compose([*AUGMENT, *NORMALIZE]))
    # The folder alone is over before a loader has got into its stride.
    dataset: Dataset[Any] = ConcatDataset([folder] * REPEATS)
    count = len(folder) * REPEATS
    loaders = [
        make_loader(loader_class, dataset, shuffle=True, device=device, workers=workers)
        for loader_class in loader_classes
    ]
    epochs: list[list[float]] = []
    for _ in range(1 + ROUNDS):
        seconds: list[float] = []
        for loader in loaders:
            start = time.perf_counter()
            for images, labels in loader:
                images.to(device, non_blocking=True)
                tick(len(labels))
            settle(device)
            seconds.append(time.perf_counter() - start)
        epochs.append(seconds)
    return [count / statistics.median(of_loader) for of_loader in zip(*epochs[1:], strict=True)]


def images_to_observe(train: int, val: int, epochs: int) -> int:
    """The number of images that `observe` reports to ``tick`` in all."""
    return train * (1 + epochs) + val


def images_to_time(train: int, loaders: int) -> int:
    """The number of images that `speeds` reports to ``tick`` in all."""
    return train * REPEATS * (1 + ROUNDS) * loaders


def compare(reference: Run, run: Run, speeds: tuple[float, float]) -> Comparison:
    """Compares what was seen of DataLoader with what was seen of DALILoader."""
    same_order = torch.equal(reference.files, run.files) and torch.equal(reference.training.labels, run.training.labels)
    difference = (reference.views.short() - run.views.short()).abs()
    of_image = difference.flatten(1).float().mean(1)
    return Comparison(
        torch=reference,
        dali=run,
        speeds=speeds,
        same_order=same_order and bool((of_image < SAME_IMAGE).all()),
        largest=int(difference.max()),
        mean=float(of_image.mean()),
    )
