"""``torchdali bench``: measure DALILoader and DataLoader on a folder, print the figures, and name the bottleneck."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchdali.errors import OptionError
from torchdali.runtime.machine import count_available_cores
from torchdali.tools.bench.cases import LOADERS, SYNTHETIC, Case, measure_case
from torchdali.tools.bench.folder import ONE_CLASS, load_transform, make_dataset, open_class_folders
from torchdali.tools.bench.metrics import cpu_model
from torchdali.tools.bench.subprocesses import measure_in_process, start_context
from torchdali.tools.bench.verdict import Verdict, diagnose

Run = Mapping[str, Any]

_PRELOADED = ("torch", "torchvision.models", "torchdali.tools.bench.cases")
_MAX_BATCH_SIZE = 256
_MIN_BATCHES = 4
"""Least number of batches in an epoch if the user chose no batch size."""

_ALONE_ROWS = {
    "images/s": ("images_per_s", ",.0f"),
    "between batches, ms p50": ("gap_ms.median", ",.1f"),
    "p99": ("gap_ms.p99", ",.1f"),
    "first batch, s": ("first_batch_s", ".2f"),
    "next epoch's first, s": ("second_epoch_first_batch_s", ".2f"),
    "CPU-s per 1,000": ("cpu_s_per_1000_images", ".2f"),
    "GPU MiB": ("gpu_peak_mib", ",.0f"),
    "host MiB": ("pss_mib", ",.0f"),
}
_TRAINING_ROWS = {
    "images/s": ("images_per_s", ",.0f"),
    "of the ceiling": ("share", ".1%"),
    "waiting": ("waiting_share", ".1%"),
    "a step, ms p50": ("gap_ms.median", ",.1f"),
    "p99": ("gap_ms.p99", ",.1f"),
    "CPU-s per 1,000": ("cpu_s_per_1000_images", ".2f"),
    "GPU MiB": ("gpu_peak_mib", ",.0f"),
}


def bench(
    folder: Path,
    *,
    cores: int | None,
    batch_size: int | None,
    seconds: float,
    transform: str | None,
    train: str | None,
    out: Path | None,
    console: Console,
) -> Verdict | None:
    """Measure, and print tables and the verdict. The arguments are the command's options.

    DALILoader comes first, so it is the one that reads files that are not in the page cache yet.

    Returns:
        The verdict, or None if DALILoader, all DataLoaders or the ceiling could not be measured.

    Raises:
        OptionError: The folder has too few images, or there is no such transform.
    """
    cores = min(cores or count_available_cores(), len(os.sched_getaffinity(0)))
    chain = load_transform(transform)
    with open_class_folders(folder) as (root, loose):
        images = len(make_dataset(root, chain))
        if not images:
            raise OptionError(f"{folder} has no images")
        batch_size = batch_size or _choose_batch_size(images)
        if images < batch_size:
            raise OptionError(f"{folder} has {images} images, less than one batch of {batch_size}")
        if loose:
            console.print(f"{loose:,} images beside the class folders are left out, as in ImageFolder")
        title = transform or "RandomResizedCrop(224), flip, Normalize, float32"
        console.print(
            f"{images:,} images in {folder}, batches of {batch_size}, {cores} cores: {title}", highlight=False
        )
        settings = (root, transform, batch_size, images // batch_size, cores, seconds)
        cases = [Case(loader, *settings) for loader in LOADERS if loader != SYNTHETIC]
        if train:
            cases += [Case(loader, *settings, train) for loader in (SYNTHETIC, "torchdali", "tensors", "pil")]
        runs = _measure_all(cases, console, lambda text: text.replace(str(root / ONE_CLASS), str(folder)))
    verdict = _diagnose_runs(runs, cores)
    show_results(runs, verdict, console)
    if out:
        results = {
            "images": images,
            "batch_size": batch_size,
            "cores": cores,
            "transform": title,
            "cpu": cpu_model(),
            "verdict": vars(verdict) if verdict else None,
            "runs": runs,
        }
        out.write_text(json.dumps(results, indent=1) + "\n")
    return verdict


def _choose_batch_size(images: int) -> int:
    size = _MAX_BATCH_SIZE
    while size > 1 and images < _MIN_BATCHES * size:
        size //= 2
    return size


def _measure_all(cases: list[Case], console: Console, clean: Callable[[str], str]) -> list[dict[str, Any]]:
    context = start_context(_PRELOADED)
    runs: list[dict[str, Any]] = []
    for case in cases:
        name = LOADERS[case.loader] + (f" beside {case.model}" if case.model else "")
        with console.status(f"{name}, {case.seconds:g} s and its start"):
            run = measure_in_process(context, measure_case, case, timeout=90 + 6 * case.seconds)
        if "stderr" in run:
            run["stderr"] = clean(run["stderr"])
        runs.append({"loader": case.loader, "model": case.model, **run})
    return runs


def _diagnose_runs(runs: list[dict[str, Any]], cores: int) -> Verdict | None:
    alone = {run["loader"]: run for run in runs if run["status"] == "ok" and run["model"] is None}
    trained = {run["loader"]: run for run in runs if run["status"] == "ok" and run["model"] is not None}
    with_model = any(run["model"] for run in runs)
    for measured, needed in ((alone, {"torchdali"}), (trained, {"torchdali", SYNTHETIC} if with_model else set[str]())):
        if not needed <= measured.keys() or (needed and not {"tensors", "pil"} & measured.keys()):
            return None
    return diagnose(alone, trained, cores)


def show_results(runs: Sequence[Run], verdict: Verdict | None, console: Console) -> None:
    """Print the figures, and the verdict if there is one."""
    alone = [run for run in runs if run["model"] is None]
    trained = [run for run in runs if run["model"] is not None]
    _print_table("Loading alone", alone, _ALONE_ROWS, console)
    if probed := next((run for run in alone if run.get("alone")), None):
        console.print(_make_probe_table(probed["alone"]))
    if trained:
        top = next((run.get("images_per_s") for run in trained if run["loader"] == SYNTHETIC), None)
        shared = [
            {**run, "share": run["images_per_s"] / top if top and run["status"] == "ok" else None} for run in trained
        ]
        _print_table(f"Beside a training step of {trained[0]['model']}", shared, _TRAINING_ROWS, console)
    if verdict:
        console.print(f"[bold]Verdict[/]: {verdict.sentence}.", highlight=False)


def _print_table(title: str, runs: Sequence[Run], rows: Mapping[str, tuple[str, str]], console: Console) -> None:
    """Print a column for each loader. Leave out figures that no run has. Narrow terminals fold the names."""
    lines: list[tuple[str, list[str]]] = []
    if any(run["status"] != "ok" for run in runs):
        lines.append(("", ["" if run["status"] == "ok" else run["status"] for run in runs]))
    for name, row in rows.items():
        cells = [_format_figure(run, *row) if run["status"] == "ok" else "" for run in runs]
        if any(cells):
            lines.append((name, cells))
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for i, run in enumerate(runs):
        style = "bold" if run["loader"] == "torchdali" else ""
        width = max((len(cells[i]) for _, cells in lines), default=0)
        table.add_column(LOADERS[run["loader"]], justify="right", style=style, overflow="fold", min_width=width)
    for name, cells in lines:
        table.add_row(name, *cells)
    console.print(table)
    for run in runs:
        if run["status"] != "ok":
            text = f"{LOADERS[run['loader']]}: {_find_reason(run)}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)


def _format_figure(run: Run, key: str, form: str) -> str:
    value: Any = run
    for part in key.split("."):
        value = None if value is None else value.get(part)
    return "" if value is None else format(value, form)


def _make_probe_table(probe: Mapping[str, Any]) -> Table:
    table = Table(title="DALILoader's parts, each alone", title_justify="left")
    table.add_column("")
    table.add_column("images/s", justify="right")
    table.add_column("ms a batch", justify="right")
    names = {"read": "reading", "decode": "decoding", "transforms": "transforms", "together": "all together"}
    for key, name in names.items():
        if probe[key]:
            table.add_row(name, f"{probe['images'] / probe[key]:,.0f}", f"{1000 * probe[key]:,.1f}")
    return table


def _find_reason(run: Run) -> str:
    """Return why a run has no figures: the last line that it wrote."""
    lines = (run.get("stderr") or "").strip().splitlines()
    return lines[-1][:300] if lines else f"it wrote nothing; {run['status']} after {run.get('process_s', 0)} s"
