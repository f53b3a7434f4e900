"""The script that is run twice: a small CNN on an image folder, written for ``torch.utils.data.DataLoader``.

The class of the loader is its only variable. A script of your own would say so with one line::

    from torchdali import DALILoader as DataLoader
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

__all__ = [
    "AUGMENT",
    "NORMALIZE",
    "VIEW",
    "LoaderClass",
    "Training",
    "make_loader",
    "settle",
    "shown",
    "train",
]

BATCH = 32
SIZE = 96
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

NORMALIZE = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
VIEW = [v2.ToImage(), v2.Resize(112, antialias=True), v2.CenterCrop(SIZE)]
AUGMENT = [
    v2.ToImage(),
    v2.RandomResizedCrop(SIZE, scale=(0.3, 1.0), antialias=True),
    v2.RandomHorizontalFlip(),
]


class LoaderClass(Protocol):
    """What the script asks of a loader's class; ``torch.utils.data.DataLoader`` is one."""

    def __call__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        shuffle: bool,
        num_workers: int,
        pin_memory: bool,
        persistent_workers: bool,
    ) -> DataLoader[Any]:
        """Makes a loader."""
        ...


@dataclass(frozen=True)
class Training:
    """What one run of the script gives.

    Attributes:
        labels: The labels of every training image, in the order in which the network saw them.
        first: The images of the first training batch.
        accuracy: Fraction of the validation images that were classified rightly.
        speed: Images a second of the median training epoch, leaving out the first where there is a second.
    """

    labels: Tensor
    first: Tensor
    accuracy: float
    speed: float


def train(
    loader_class: LoaderClass,
    root: Path,
    *,
    device: torch.device,
    epochs: int,
    workers: int,
    seed: int,
    tick: Callable[[int], None],
) -> Training:
    """Trains on ``root/train``, then validates on ``root/val``.

    Args:
        loader_class: ``torch.utils.data.DataLoader``, or what takes its place.
        root: The image folder.
        device: Where the network runs.
        epochs: How often it sees ``root/train``.
        workers: ``num_workers`` of the loaders; at least 1, as the order would else depend on the transforms.
        seed: For ``torch.manual_seed``.
        tick: Called with the number of images just seen.
    """
    torch.manual_seed(seed)
    train_set = ImageFolder(str(root / "train"), transform=v2.Compose([*AUGMENT, *NORMALIZE]))
    val_set = ImageFolder(str(root / "val"), transform=v2.Compose([*VIEW, *NORMALIZE]))
    train_loader = make_loader(loader_class, train_set, shuffle=True, device=device, workers=workers)
    val_loader = make_loader(loader_class, val_set, shuffle=False, device=device, workers=workers)

    model = small_cnn(len(train_set.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(train_loader))

    seen: list[Tensor] = []
    first: Tensor | None = None
    seconds: list[float] = []
    for _ in range(epochs):
        start = time.perf_counter()
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            first = images if first is None else first
            seen.append(labels)
            tick(len(labels))
        settle(device)
        seconds.append(time.perf_counter() - start)

    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.inference_mode():
        for images, labels in val_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            right += (model(images).argmax(1) == labels).sum()
            tick(len(labels))

    assert first is not None, "an ImageFolder is never empty, and there is at least one epoch"
    return Training(
        labels=torch.cat(seen).cpu(),
        first=first.cpu(),
        accuracy=right.item() / len(val_set),
        speed=len(train_set) / statistics.median(seconds[1:] or seconds),
    )


def make_loader(
    loader_class: LoaderClass, dataset: Dataset[Any], *, shuffle: bool, device: torch.device, workers: int
) -> DataLoader[Any]:
    """Makes a loader with the arguments that both classes are given throughout the demo."""
    return loader_class(
        dataset,
        batch_size=BATCH,
        shuffle=shuffle,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )


def small_cnn(classes: int) -> nn.Module:
    """Three convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def settle(device: torch.device) -> None:
    """Waits until the work queued on a GPU is done, so that the clock may be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shown(images: Tensor) -> Tensor:
    """Undoes the normalisation of a batch: back to uint8."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (images * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
