"""Training script that both loaders run: a small CNN on an image folder, written for ``torch.utils.data.DataLoader``.

Only the class of the loader differs. In a script of your own, this line is the change::

    from torchdali import DALILoader as DataLoader
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

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

LoaderClass = Callable[..., DataLoader[Any]]
"""``torch.utils.data.DataLoader``, or its replacement."""


@dataclass(frozen=True)
class Settings:
    """Settings of both runs.

    Attributes:
        root: Image folder, with ``train`` and ``val``.
        device: Device of the network.
        epochs: Number of training epochs.
        workers: ``num_workers`` of the loaders, at least 1. With 0, DataLoader's transforms would draw from the
            generator that determines the order.
        seed: Seed for ``torch.manual_seed``.
    """

    root: Path
    device: torch.device
    epochs: int
    workers: int
    seed: int


@dataclass(frozen=True)
class Training:
    """Result of one run of the script.

    Attributes:
        labels: Labels of all training images, in the order in which the network saw them.
        accuracy: Share of the validation images that were classified correctly.
        speed: Images per second of the median training epoch, without the first epoch if there are several.
    """

    labels: Tensor
    accuracy: float
    speed: float


def train(loader_class: LoaderClass, settings: Settings, tick: Callable[[int], None]) -> Training:
    """Train on ``root/train``, then validate on ``root/val``. Call ``tick`` with the number of images just seen."""
    root, device = settings.root, settings.device
    torch.manual_seed(settings.seed)
    train_set = ImageFolder(str(root / "train"), transform=v2.Compose([*AUGMENT, *NORMALIZE]))
    val_set = ImageFolder(str(root / "val"), transform=v2.Compose([*VIEW, *NORMALIZE]))
    train_loader = make_loader(loader_class, train_set, settings, shuffle=True)
    val_loader = make_loader(loader_class, val_set, settings, shuffle=False)

    model = make_cnn(len(train_set.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=settings.epochs * len(train_loader))

    seen: list[Tensor] = []
    seconds: list[float] = []
    for _ in range(settings.epochs):
        start = time.perf_counter()
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            seen.append(labels)
            tick(len(labels))
        synchronize(device)
        seconds.append(time.perf_counter() - start)

    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with torch.inference_mode():
        for images, labels in val_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            correct += (model(images).argmax(1) == labels).sum()
            tick(len(labels))

    return Training(
        labels=torch.cat(seen).cpu(),
        accuracy=correct.item() / len(val_set),
        speed=len(train_set) / statistics.median(seconds[1:] or seconds),
    )


def make_loader(
    loader_class: LoaderClass, dataset: Dataset[Any], settings: Settings, *, shuffle: bool
) -> DataLoader[Any]:
    """Make a loader, with the same arguments for both classes."""
    return loader_class(
        dataset,
        batch_size=BATCH,
        shuffle=shuffle,
        num_workers=settings.workers,
        pin_memory=settings.device.type == "cuda",
        persistent_workers=True,
    )


def make_cnn(classes: int) -> nn.Module:
    """Return a network of three convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def synchronize(device: torch.device) -> None:
    """Wait until the work queued on a GPU is done, so that the time can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
