"""What the demo shows: a table, a verdict on the speed, and a grid of pictures."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision.utils import make_grid

from torchdali.tools.demo.compare import Comparison
from torchdali.tools.demo.train import shown

__all__ = ["COLUMNS", "show", "write_grid"]

COLUMNS = 10
"""Pictures in a row of the grid."""


def show(comparison: Comparison, console: Console) -> None:
    """Prints the two runs side by side, and says who was faster."""
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
    table.add_row("images/s, loader alone", *(f"{speed:,.0f}" for speed in comparison.speeds))
    table.add_row("images/s, training", f"{theirs.training.speed:,.0f}", f"{ours.training.speed:,.0f}")
    console.print(table)
    reference, speed = comparison.speeds
    console.print(verdict(speed / reference, on_gpu=ours.device.type == "cuda"))


def verdict(ratio: float, *, on_gpu: bool) -> str:
    """Says in words what the loader's speed is beside DataLoader's."""
    word = "faster" if ratio > 1.1 else "slower" if ratio < 0.9 else "about as fast"
    said = f"Alone, DALILoader is {word} here: {ratio:.2f} times DataLoader's images/s."
    if on_gpu:
        return f"{said} These pictures are few and small; the gain grows with both."
    return f"{said} Without a GPU both share the same cores; torchdali is made for GPUs."


def write_grid(comparison: Comparison, path: Path) -> None:
    """Writes a PNG of two rows: the start of DALILoader's first training batch, and the same by torchvision.

    The samples are the same in each column, their random crops and flips are not.
    """
    rows = [run.training.first[:COLUMNS] for run in (comparison.dali, comparison.torch)]
    grid = make_grid(shown(torch.cat(rows)), nrow=len(rows[0]), padding=2)
    Image.fromarray(grid.permute(1, 2, 0).numpy()).save(path)
