"""What ``torchdali bench`` shows: a table, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from torchdali.tools.bench.verdict import Verdict
from torchdali.tools.bench.work import LOADERS, SYNTHETIC

__all__ = ["reason", "show"]

Run = Mapping[str, Any]


def show(runs: Sequence[Run], decided: Verdict | None, console: Console) -> None:
    """Prints what was measured, and the verdict where there is one."""
    alone = [run for run in runs if run["model"] is None]
    trained = [run for run in runs if run["model"] is not None]
    _print("Loading alone", alone, _ALONE, console)
    ours = next((run for run in alone if run.get("alone")), None)
    if ours:
        console.print(_parts(ours["alone"]))
    if trained:
        top = next((run.get("images_per_s") for run in trained if run["loader"] == SYNTHETIC), None)
        shared = [
            {**run, "share": run["images_per_s"] / top if top and run["status"] == "ok" else None} for run in trained
        ]
        _print(f"Beside a training step of {trained[0]['model']}", shared, _TRAINED, console)
    if decided:
        console.print(f"[bold]Verdict[/]: {decided.sentence}.", highlight=False)


_ALONE = {
    "images/s": ("images_per_s", ",.0f"),
    "between batches, ms p50": ("gap_ms.median", ",.1f"),
    "p99": ("gap_ms.p99", ",.1f"),
    "first batch, s": ("first_batch_s", ".2f"),
    "next epoch's first, s": ("second_epoch_first_batch_s", ".2f"),
    "CPU-s per 1,000": ("cpu_s_per_1000_images", ".2f"),
    "GPU MiB": ("gpu_peak_mib", ",.0f"),
    "host MiB": ("pss_mib", ",.0f"),
}
_TRAINED = {
    "images/s": ("images_per_s", ",.0f"),
    "of the ceiling": ("share", ".1%"),
    "waiting": ("waiting_share", ".1%"),
    "a step, ms p50": ("gap_ms.median", ",.1f"),
    "p99": ("gap_ms.p99", ",.1f"),
    "CPU-s per 1,000": ("cpu_s_per_1000_images", ".2f"),
    "GPU MiB": ("gpu_peak_mib", ",.0f"),
}


def _print(title: str, runs: Sequence[Run], rows: Mapping[str, tuple[str, str]], console: Console) -> None:
    """A column for each loader, in narrow terminals with folded names; figures that nobody has are left out."""
    lines: list[tuple[str, list[str]]] = []
    if any(run["status"] != "ok" for run in runs):
        lines.append(("", ["" if run["status"] == "ok" else run["status"] for run in runs]))
    for name, row in rows.items():
        cells = [_cell(run, *row) if run["status"] == "ok" else "" for run in runs]
        if any(cells):
            lines.append((name, cells))
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for i, run in enumerate(runs):
        style = "bold" if run["loader"] == "torchdali" else ""
        widest = max((len(cells[i]) for _, cells in lines), default=0)
        table.add_column(LOADERS[run["loader"]], justify="right", style=style, overflow="fold", min_width=widest)
    for name, cells in lines:
        table.add_row(name, *cells)
    console.print(table)
    for run in runs:
        if run["status"] != "ok":
            console.print(f"{LOADERS[run['loader']]}: {reason(run)}", highlight=False, markup=False, soft_wrap=True)


def _cell(run: Run, key: str, form: str) -> str:
    value: Any = run
    for part in key.split("."):
        value = None if value is None else value.get(part)
    return "" if value is None else format(value, form)


def _parts(alone: Mapping[str, Any]) -> Table:
    """What each part of DALILoader's work reaches alone."""
    table = Table(title="DALILoader's parts, each alone", title_justify="left")
    table.add_column("")
    table.add_column("images/s", justify="right")
    table.add_column("ms a batch", justify="right")
    names = {"read": "reading", "decode": "decoding", "transforms": "transforms", "together": "all together"}
    for key, name in names.items():
        if alone[key]:
            table.add_row(name, f"{alone['images'] / alone[key]:,.0f}", f"{1000 * alone[key]:,.1f}")
    return table


def reason(run: Run) -> str:
    """Why a run has no figures: the last line that it wrote."""
    lines = (run.get("stderr") or "").strip().splitlines()
    return lines[-1][:300] if lines else f"nothing was said; {run['status']} after {run.get('process_s', 0)} s"
