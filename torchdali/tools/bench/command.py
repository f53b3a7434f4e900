"""``torchdali bench``: DALILoader and DataLoader on a folder of the user's own, and what that means."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from torchdali.errors import OptionError
from torchdali.runtime.machine import available_cores
from torchdali.tools.bench import children, process
from torchdali.tools.bench.folder import ONE_CLASS, as_classes, dataset, loaded
from torchdali.tools.bench.report import show
from torchdali.tools.bench.verdict import Verdict, verdict
from torchdali.tools.bench.work import LOADERS, SYNTHETIC, Case, measure_case

__all__ = ["bench"]

_PRELOADED = ("torch", "torchvision.models", "torchdali.tools.bench.work")
_LARGEST = 256
_BATCHES = 4
"""At least so many in an epoch, where nobody chose the batch size."""


def bench(
    pictures: Path,
    *,
    cores: int | None,
    batch_size: int | None,
    seconds: float,
    transform: str | None,
    train: str | None,
    out: Path | None,
    console: Console,
) -> Verdict | None:
    """Measures, and prints tables and the verdict.

    DALILoader comes first, so that it is the one that finds files that are not in the page cache.

    Args:
        pictures: a folder of class folders, or of images.
        cores: how many the loaders may use; all that this process may.
        batch_size: images in a batch; 256, or less where that would make fewer than four batches.
        seconds: how long each loader is measured.
        transform: ``FILE:NAME`` of a transform; ImageNet's training transform for None.
        train: torchvision's name of a model that is trained beside.
        out: where to write all figures as JSON.
        console: where to print.

    Returns:
        The verdict; None where DALILoader, all DataLoaders or the ceiling could not be measured.

    Raises:
        OptionError: the folder has too few images, or the transform is not there.
    """
    cores = min(cores or available_cores(), len(os.sched_getaffinity(0)))
    chain = loaded(transform)
    with as_classes(pictures) as (root, loose):
        images = len(dataset(root, chain))
        if not images:
            raise OptionError(f"{pictures} has no images")
        batch_size = batch_size or _fitting(images)
        if images < batch_size:
            raise OptionError(f"{pictures} has {images} images, less than one batch of {batch_size}")
        if loose:
            console.print(f"{loose:,} images beside the class folders are left out, as in ImageFolder")
        what = transform or "RandomResizedCrop(224), flip, Normalize, float32"
        console.print(
            f"{images:,} images in {pictures}, batches of {batch_size}, {cores} cores: {what}", highlight=False
        )
        settings = (root, transform, batch_size, images // batch_size, cores, seconds)
        cases = [Case(loader, *settings) for loader in LOADERS if loader != SYNTHETIC]
        if train:
            cases += [Case(loader, *settings, train) for loader in (SYNTHETIC, "torchdali", "tensors", "pil")]
        runs = _measured(cases, console, lambda said: said.replace(str(root / ONE_CLASS), str(pictures)))
    decided = _decided(runs, cores)
    show(runs, decided, console)
    if out:
        whole = {
            "images": images,
            "batch_size": batch_size,
            "cores": cores,
            "transform": what,
            "cpu": process.cpu_model(),
            "verdict": vars(decided) if decided else None,
            "runs": runs,
        }
        out.write_text(json.dumps(whole, indent=1) + "\n")
    return decided


def _fitting(images: int) -> int:
    size = _LARGEST
    while size > 1 and images < _BATCHES * size:
        size //= 2
    return size


def _measured(cases: list[Case], console: Console, said: Callable[[str], str]) -> list[dict[str, Any]]:
    context = children.start_context(_PRELOADED)
    runs: list[dict[str, Any]] = []
    for case in cases:
        name = LOADERS[case.loader] + (f" beside {case.model}" if case.model else "")
        with console.status(f"{name}, {case.seconds:g} s and its start"):
            run = children.measured(context, measure_case, case, timeout=90 + 6 * case.seconds)
        if "stderr" in run:
            run["stderr"] = said(run["stderr"])
        runs.append({"loader": case.loader, "model": case.model, **run})
    return runs


def _decided(runs: list[dict[str, Any]], cores: int) -> Verdict | None:
    alone = {run["loader"]: run for run in runs if run["status"] == "ok" and run["model"] is None}
    trained = {run["loader"]: run for run in runs if run["status"] == "ok" and run["model"] is not None}
    asked = any(run["model"] for run in runs)
    for measured, needed in ((alone, {"torchdali"}), (trained, {"torchdali", SYNTHETIC} if asked else set[str]())):
        if not needed <= measured.keys() or (needed and not {"tensors", "pil"} & measured.keys()):
            return None
    return verdict(alone, trained, cores)
