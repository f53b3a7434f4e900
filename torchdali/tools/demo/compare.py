"""Compare two loaders from outside: their order, their pixels and their training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali.tools.commands import preview
from torchdali.tools.demo.train import (
    AUGMENT,
    VIEW,
    LoaderClass,
    Settings,
    Training,
    make_loader,
    train,
)
from torchdali.tools.parity.compare import compile_chain

COLUMNS = 10
"""Number of pictures in a row of the grid."""
_SAME_IMAGE = 8.0
"""Bound of an image's mean difference in grey levels. Decoders differ by less than 1, other photographs by tens."""


@dataclass(frozen=True)
class Run:
    """Observations of one loader.

    Attributes:
        device: Device of its images.
        files: Number of the file of each image in a shuffled epoch.
        views: These images, uint8, after a transform without random numbers.
        training: Result of the training script.
    """

    device: torch.device
    files: Tensor
    views: Tensor
    training: Training


@dataclass(frozen=True)
class Comparison:
    """Two loaders side by side.

    Attributes:
        torch: Observations of ``torch.utils.data.DataLoader``.
        dali: Observations of ``torchdali.DALILoader``.
        same_order: Whether both returned the same files, images and training labels, in the same order.
        largest: Largest difference of a pixel, in grey levels.
        mean: Mean difference of a pixel, in grey levels.
    """

    torch: Run
    dali: Run
    same_order: bool
    largest: int
    mean: float


def observe(loader_class: LoaderClass, settings: Settings, tick: Callable[[int], None]) -> Run:
    """Run one loader for a shuffled epoch without random transforms, and in the training script."""
    torch.manual_seed(settings.seed)
    numbered = ImageFolder(str(settings.root / "train"), transform=v2.Compose(VIEW))
    # The label of each file is its number, so the loader itself tells which file an image is from.
    numbered.samples = [(path, number) for number, (path, _) in enumerate(numbered.samples)]
    device, files, views = torch.device("cpu"), list[Tensor](), list[Tensor]()
    for images, numbers in make_loader(loader_class, numbered, settings, shuffle=True):
        device = images.device
        files.append(numbers.cpu())
        views.append(images.cpu())
        tick(len(numbers))
    return Run(device, torch.cat(files), torch.cat(views), train(loader_class, settings, tick))


def compare(reference: Run, run: Run) -> Comparison:
    """Compare the observations of DataLoader with those of DALILoader."""
    same_order = torch.equal(reference.files, run.files) and torch.equal(reference.training.labels, run.training.labels)
    difference = (reference.views.short() - run.views.short()).abs()
    by_image = difference.flatten(1).float().mean(1)
    return Comparison(
        torch=reference,
        dali=run,
        same_order=same_order and bool((by_image < _SAME_IMAGE).all()),
        largest=int(difference.max()),
        mean=float(by_image.mean()),
    )


def show(comparison: Comparison, console: Console) -> None:
    """Print the two runs side by side."""
    ours, theirs = comparison.dali, comparison.torch
    table = Table(title="The same script, one changed import", title_justify="left")
    table.add_column("")
    table.add_column("DataLoader", justify="right")
    table.add_column("DALILoader", justify="right", style="bold")
    table.add_row("images on", str(theirs.device), str(ours.device))
    table.add_row("batches in equal order", "", "yes" if comparison.same_order else "[red]no[/]")
    table.add_row("largest pixel difference, of 255", "", f"{comparison.largest}")
    table.add_row("mean pixel difference, of 255", "", f"{comparison.mean:.3f}")
    table.add_row("validation accuracy", f"{theirs.training.accuracy:.1%}", f"{ours.training.accuracy:.1%}")
    table.add_row("images/s, training", f"{theirs.training.speed:,.0f}", f"{ours.training.speed:,.0f}")
    console.print(table)


def write_grid(comparison: Comparison, settings: Settings, path: Path) -> None:
    """Write a PNG of the epoch's first images, augmented by torchdali and by torchvision, and their difference.

    Both draw the same random numbers, so that each column shows one crop of one sample.
    """
    images = ImageFolder(str(settings.root / "train"))
    images.samples = [images.samples[int(number)] for number in comparison.dali.files[:COLUMNS]]
    plan = compile_chain([v2.Compose(AUGMENT)], comparison.dali.device, fused=False)
    text = "The first images of a shuffled epoch, augmented with the same random numbers"
    preview.write_grid(path, preview.make_samples(images, plan, settings.seed), text, "")
