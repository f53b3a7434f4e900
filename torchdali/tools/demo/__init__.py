"""``torchdali demo``: run one training script with DataLoader and with DALILoader, and compare."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader

from torchdali import DALILoader
from torchdali.tools.demo.compare import Comparison, compare, observe, show, write_grid
from torchdali.tools.demo.pictures import PICTURES, write_pictures
from torchdali.tools.demo.train import Settings

_TRAIN, _VAL = 32, 12
"""Crops of each picture for training and for validation."""


def run(out: Path, *, epochs: int, device: str, seed: int, console: Console) -> Comparison:
    """Write the pictures, train twice, print the comparison and write the grid. The arguments are the options."""
    dali = partial(DALILoader, device=device)
    has_cuda = torch.cuda.is_available()
    target = torch.device(("cuda" if has_cuda else "cpu") if device == "auto" else device)
    settings = Settings(out / "pictures", target, epochs, min(8, len(os.sched_getaffinity(0))), seed)

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def start_stage(name: str, total: int) -> partial[None]:
            return partial(progress.advance, progress.add_task(name, total=total))

        train, val = len(PICTURES) * _TRAIN, len(PICTURES) * _VAL
        tick = start_stage(f"{train + val} crops of {len(PICTURES)} photographs", train + val)
        write_pictures(settings.root, train=_TRAIN, val=_VAL, seed=seed, tick=tick)
        seen = train * (1 + epochs) + val
        # DataLoader comes first, so that its worker processes are forked before DALI has threads.
        reference = observe(DataLoader, settings, start_stage("DataLoader trains", seen))
        result = observe(dali, settings, start_stage("DALILoader trains", seen))

    comparison = compare(reference, result)
    show(comparison, console)
    grid = out / "first_batch.png"
    write_grid(comparison, settings, grid)
    console.print(f"Pictures: {settings.root}\nAugmented images, by torchdali and by torchvision: {grid}")
    return comparison
