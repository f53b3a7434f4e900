"""What ``torchdali bench`` shows: a table, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from torchdali.bench.verdict import Verdict
from torchdali.bench.work import LOADERS, SYNTHETIC

__all__ = ["reason", "show"]

Run = Mapping[str, Any]


def show(runs: Sequence[Run], decided: Verdict | None, console: Console) -> None:
    """Prints what was measured, and the verdict where there is one."""
    alone = [run for run in runs if run["model"] is None]
    trained = [run for run in runs if run["model"] is not None]
    console.print(_table("Loading alone", alone, _ALONE))
    ours = next((run for run in alone if run.get("alone")), None)
    if ours:
        console.print(_parts(ours["alone"]))
    if trained:
        top = next((run.get("images_per_s") for run in trained if run["loader"] == SYNTHETIC), None)
        shared = [
            {**run, "share": run["images_per_s"] / top if top and run["status"] == "ok" else None} for run in trained
        ]
        console.print(_table(f"Beside a training step of {trained[0]['model']}", shared, _TRAINED))
    if decided:
        console.print(f"[bold]Verdict[/]: {decided.sentence}.", highlight=False)


_ALONE = {
    "images/s": ("images_per_s", ",.0f"),
    "gap p50": ("gap_ms.median", ",.1f"),
    "p99, ms": ("gap_ms.p99", ",.1f"),
    "first batch, s": ("first_batch_s", ".2f"),
    "next epoch's": ("second_epoch_first_batch_s", ".2f"),
    "CPU-s per 1,000": ("cpu_s_per_1000_images", ".2f"),
    "GPU MiB": ("gpu_peak_mib", ",.0f"),
    "host MiB": ("pss_mib", ",.0f"),
}
_TRAINED = {
    "images/s": ("images_per_s", ",.0f"),
    "of the ceiling": ("share", ".1%"),
    "waiting": ("waiting_share", ".1%"),
    "step p50": ("gap_ms.median", ",.1f"),
    "p99, ms": ("gap_ms.p99", ",.1f"),
    "CPU-s per 1,000": ("cpu_s_per_1000_images", ".2f"),
    "GPU MiB": ("gpu_peak_mib", ",.0f"),
}


def _table(title: str, runs: Sequence[Run], columns: Mapping[str, tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for run in runs:
        cells = [_cell(run, *column) for column in columns.values()]
        if run["status"] != "ok":
            cells = [run["status"], *[""] * (len(columns) - 1)]
        table.add_row(LOADERS[run["loader"]], *cells, style="bold" if run["loader"] == "torchdali" else "")
    for run in runs:
        if run["status"] != "ok":
            table.caption = f"{table.caption or ''}\n{LOADERS[run['loader']]}: {reason(run)}".strip()
    return table


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
