"""``torchdali demo``: one training script, run with DataLoader and with DALILoader, and compared."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader

from torchdali.tools.demo.compare import Comparison, compare, images_to_observe, images_to_time, observe, speeds
from torchdali.tools.demo.pictures import PICTURES, write_pictures
from torchdali.tools.demo.report import show, write_grid
from torchdali.tools.demo.train import LoaderClass

__all__ = ["Comparison", "run"]


def run(
    out: Path,
    *,
    epochs: int = 8,
    device: str = "auto",
    seed: int = 0,
    train: int = 32,
    val: int = 12,
    console: Console | None = None,
    dali: LoaderClass | None = None,
) -> Comparison:
    """Writes the pictures, trains twice, prints the comparison and writes the grid.

    Args:
        out: Folder for ``pictures/`` and ``first_batch.png``.
        epochs: Epochs of each training.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA where torch sees a device.
        seed: Seed of the crops and of both trainings.
        train: Crops of each picture for training.
        val: Crops of each picture for validation.
        console: Where to print.
        dali: The class that is compared with ``torch.utils.data.DataLoader``; ``DALILoader`` unless told.
    """
    console = console or Console()
    if dali is None:
        from torchdali import DALILoader

        loader = DALILoader if device == "auto" else partial(cast("Any", DALILoader), device=device)
        dali = cast("LoaderClass", loader)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(where if device == "auto" else device)
    workers = min(8, len(os.sched_getaffinity(0)))
    pictures, grid = out / "pictures", out / "first_batch.png"

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def stage(name: str, total: int) -> partial[None]:
            return partial(progress.advance, progress.add_task(name, total=total))

        crops = len(PICTURES) * (train + val)
        tick = stage(f"{crops} crops of {len(PICTURES)} photographs", crops)
        write_pictures(pictures, train=train, val=val, seed=seed, tick=tick)

        settings = partial(observe, root=pictures, device=target, epochs=epochs, workers=workers, seed=seed)
        per_loader = images_to_observe(len(PICTURES) * train, len(PICTURES) * val, epochs)
        # DataLoader's worker processes are all forked before DALI has started a thread.
        reference = settings(DataLoader, tick=stage("DataLoader trains", per_loader))
        timed = speeds(
            [DataLoader, dali],
            pictures,
            device=target,
            workers=workers,
            tick=stage("both alone, in turn", images_to_time(len(PICTURES) * train, loaders=2)),
        )
        ours = settings(dali, tick=stage("DALILoader trains", per_loader))

    comparison = compare(reference, ours, (timed[0], timed[1]))
    show(comparison, console)
    write_grid(comparison, grid)
    console.print(f"Pictures: {pictures}\nFirst augmented batch, above by DALI, below by torchvision: {grid}")
    return comparison
