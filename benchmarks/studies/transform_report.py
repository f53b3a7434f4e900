"""Writes the transforms' images per second as JSON and as Markdown, and names where torchdali is slower."""

import json
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.systems.transform_rows import BY_CALL
from benchmarks.systems.transform_systems import WINDOW

_SHORT = {"torchvision-cuda": "torchvision on CUDA", "torchvision-cpu": "torchvision on the CPU", "kornia": "Kornia"}
_REASON = 60
_LEGEND = f"""\
All start from the same decoded photographs, (N, 3, H, W) uint8 unless it says *float* (float32 in [0, 1]). A
transform with a probability has p=1.

- *torchdali*: the loader's engine on a batch in GPU memory, {WINDOW} batches in flight. It includes drawing the
  random parameters on the host, the copy that puts channels last, and the one that puts them first again: the row
  of `Identity()` is these two copies and nothing else. *one at a time* waits for each batch before the next.
  *torch*: it has no rule for this and leaves it to torchvision; the reason is below the table.
- *torchvision, CUDA, per sample*: a loop over the images of the batch on the GPU, which is how each gets parameters
  of its own; it waits at the end only.
- *torchvision, CPU*: a `DataLoader` with one worker a core over images in memory, up to the batch in host memory:
  the way to the GPU is not counted, which favours it. Batches of slow transforms are smaller than the others'.
- *Kornia*: `kornia.augmentation` on a float32 batch on the GPU, parameters for each sample unless it says otherwise
  at the end; the conversion to float is not counted, which favours it. "-": nothing like it, or not installed."""


def write(whole: dict[str, Any], out: Path, name: str) -> None:
    """Writes ``<name>.json`` and ``<name>.md`` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    host = whole["machine"]
    heading = [
        f"# Each transform alone: {host['gpu'] or 'CPU'}",
        "",
        *report.machine_lines(host),
        f"- work: batches of {whole['batch_size']}, already decoded; about {whole['seconds']:g} s a cell",
        f"- command: `{whole['command']}`",
        f"- date: {whole['date']}; {whole['total_seconds']:.0f} s in all",
    ]
    sections = ["\n".join(heading), *tables(whole["runs"]), _LEGEND, _relatives(whole["runs"])]
    (out / f"{name}.md").write_text("\n\n".join(filter(None, sections)) + "\n")


def tables(runs: list[dict[str, Any]]) -> list[str]:
    """For each size a heading, a table, how often torchdali is slower, and what it leaves to torch."""
    columns = _columns(runs)
    sections: list[str] = []
    for size in dict.fromkeys(run["size"] for run in runs):
        by_call: dict[str, dict[str, Any]] = {}
        for run in runs:
            if run["size"] == size:
                by_call.setdefault(run["transform"], {})[run["system"]] = run
        rows = [["images/s", *(title for title, _, _ in columns), "torchdali is slower than"]]
        for call, of_row in by_call.items():
            name = f"`{BY_CALL[call].name}`" + (", float" if BY_CALL[call].floats else "")
            cells = [_cell(of_row.get(system), figure) for _, system, figure in columns]
            rows.append([name, *cells, _slower_than(of_row)])
        sections += [f"## {size}", report.markdown(rows), _summary(by_call)]
    return sections


def _columns(runs: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Title, system and figure of each column."""
    workers = next((f", {run['workers']} workers" for run in runs if "workers" in run), "")
    columns = [
        ("torchdali", "torchdali", "images_per_s"),
        ("one at a time", "torchdali", "alone_images_per_s"),
        ("torchvision, CUDA, per sample", "torchvision-cuda", "images_per_s"),
        (f"torchvision, CPU{workers}", "torchvision-cpu", "images_per_s"),
        ("Kornia", "kornia", "images_per_s"),
    ]
    measured = {run["system"] for run in runs}
    return [column for column in columns if column[1] in measured]


def _cell(run: dict[str, Any] | None, figure: str) -> str:
    """The number, or what stands where there is none."""
    if run is None or run["status"] == "none":
        return "-"
    if run["status"] == "ok":
        return f"{run[figure]:,.0f}"
    if run["status"] != "failed" or figure != "images_per_s":
        return run["status"]
    reason = " ".join(run["reason"].replace("|", "/").split())
    return f"failed: {reason if len(reason) <= _REASON else reason[: _REASON - 3] + '...'}"


def _slower_than(of_row: dict[str, Any]) -> str:
    """The systems that are faster than torchdali, and by how much."""
    rates = {system: run["images_per_s"] for system, run in of_row.items() if run["status"] == "ok"}
    if "torchdali" not in rates:
        return ""
    faster = {system: rates.get(system, 0) / rates["torchdali"] for system in _SHORT}
    return ", ".join(f"{_SHORT[system]} ({ratio:.2f}x)" for system, ratio in faster.items() if ratio > 1)


def _summary(by_call: dict[str, dict[str, Any]]) -> str:
    """Where torchdali is slower, and what it leaves to torch, in words."""
    own = {call: of_row["torchdali"] for call, of_row in by_call.items() if "torchdali" in of_row}
    slower = [f"`{BY_CALL[call].name}`" for call in own if _slower_than(by_call[call])]
    measured = sum(run["status"] == "ok" for run in own.values())
    lines = [f"torchdali is slower than another system in {len(slower)} of {measured} rows"]
    lines[0] += f": {'; '.join(slower)}." if slower else "."
    left = [
        f"- left to torch: `{BY_CALL[call].name}`: {run['reason']}"
        for call, run in own.items()
        if run["status"] == "torch"
    ]
    return "\n".join([*lines, *([""] if left else []), *left])


def _relatives(runs: list[dict[str, Any]]) -> str:
    """Which of Kornia's transforms was run for which of torchvision's."""
    ran = dict.fromkeys(run["transform"] for run in runs if run["system"] == "kornia" and run["status"] == "ok")
    if not ran:
        return ""
    rows = [["torchvision", "Kornia", "how it differs, beside floats"]]
    rows += [[f"`{BY_CALL[call].name}`", f"`{BY_CALL[call].kornia}`", BY_CALL[call].differs] for call in ran]
    return f"## What Kornia ran\n\n{report.markdown(rows)}"
