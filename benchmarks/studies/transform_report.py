"""Write the transforms' images per second as JSON and as Markdown, and list where torchdali is slower."""

from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.systems.transform_rows import BY_CALL
from benchmarks.systems.transform_systems import WINDOW

_SHORT = {"torchvision-cuda": "torchvision on CUDA", "torchvision-cpu": "torchvision on the CPU", "kornia": "Kornia"}
_REASON = 60
_LEGEND = f"""\
All start from the same decoded photographs, (N, 3, H, W) uint8, or *float* (float32 in [0, 1]). A transform with a
probability has p=1.

- *torchdali*: the loader's pipeline on a batch in GPU memory, with {WINDOW} batches in flight. It includes drawing the
  random parameters on the host, and two copies, to channels last and back. The row of `Identity()` is only these two
  copies. *one at a time* waits for each batch before the next. *torch*: there is no rule for this, and torchvision runs
  it; the reason is below the table.
- *torchvision, CUDA, per sample*: a loop over the images of the batch on the GPU, so that each has its own parameters.
  It waits at the end only.
- *torchvision, CPU*: a `DataLoader` with one worker for each core over images in memory, up to the batch in host
memory.
  The copy to the GPU is not counted, which favours it. Batches of slow transforms are smaller.
- *Kornia*: `kornia.augmentation` on a float32 batch on the GPU, with parameters for each sample; exceptions are at the
  end. The conversion to float is not counted, which favours it. "-": no similar transform, or not installed."""


def write(whole: dict[str, Any], out: Path, name: str) -> None:
    """Write ``<name>.json`` and ``<name>.md`` to `out`."""
    heading = report.study_heading(
        f"Each transform alone: {report.describe_device(whole)}",
        whole,
        f"- work: batches of {whole['batch_size']}, already decoded; about {whole['seconds']:g} s for each cell, "
        f"{whole['total_seconds']:.0f} s in all",
    )
    sections = [heading, *tables(whole["runs"]), _LEGEND, _kornia_table(whole["runs"])]
    report.save(whole, out, name, "\n\n".join(filter(None, sections)))


def tables(runs: list[dict[str, Any]]) -> list[str]:
    """Return for each size a heading, a table, and a summary of where torchdali is slower or uses torch."""
    columns = _columns(runs)
    sections: list[str] = []
    for size in dict.fromkeys(run["size"] for run in runs):
        by_call: dict[str, dict[str, Any]] = {}
        for run in runs:
            if run["size"] == size:
                by_call.setdefault(run["transform"], {})[run["system"]] = run
        rows = [["images/s", *(title for title, _, _ in columns), "torchdali is slower than"]]
        for call, by_system in by_call.items():
            name = f"`{BY_CALL[call].name}`" + (", float" if BY_CALL[call].floats else "")
            cells = [_cell(by_system.get(system), figure) for _, system, figure in columns]
            rows.append([name, *cells, _list_faster(by_system)])
        sections += [f"## {size}", report.markdown(rows), _summary(by_call)]
    return sections


def _columns(runs: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return title, system and figure of each column."""
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
    """Return the number, or the reason why there is none."""
    if run is None or run["status"] == "none":
        return "-"
    if run["status"] == "ok":
        return f"{run[figure]:,.0f}"
    if run["status"] != "failed" or figure != "images_per_s":
        return run["status"]
    reason = " ".join(run["reason"].replace("|", "/").split())
    return f"failed: {reason if len(reason) <= _REASON else reason[: _REASON - 3] + '...'}"


def _list_faster(by_system: dict[str, Any]) -> str:
    """Return the systems that are faster than torchdali, and by how much."""
    rates = {system: run["images_per_s"] for system, run in by_system.items() if run["status"] == "ok"}
    if "torchdali" not in rates:
        return ""
    faster = {system: rates.get(system, 0) / rates["torchdali"] for system in _SHORT}
    return ", ".join(f"{_SHORT[system]} ({ratio:.2f}x)" for system, ratio in faster.items() if ratio > 1)


def _summary(by_call: dict[str, dict[str, Any]]) -> str:
    """Return in words where torchdali is slower, and what torch runs."""
    own = {call: by_system["torchdali"] for call, by_system in by_call.items() if "torchdali" in by_system}
    slower = [f"`{BY_CALL[call].name}`" for call in own if _list_faster(by_call[call])]
    measured = sum(run["status"] == "ok" for run in own.values())
    lines = [f"torchdali is slower than another system in {len(slower)} of {measured} rows"]
    lines[0] += f": {'; '.join(slower)}." if slower else "."
    in_torch = [
        f"- run by torch: `{BY_CALL[call].name}`: {run['reason']}"
        for call, run in own.items()
        if run["status"] == "torch"
    ]
    return "\n".join([*lines, *([""] if in_torch else []), *in_torch])


def _kornia_table(runs: list[dict[str, Any]]) -> str:
    """Return a table of the transforms that Kornia ran for torchvision's."""
    ran = dict.fromkeys(run["transform"] for run in runs if run["system"] == "kornia" and run["status"] == "ok")
    if not ran:
        return ""
    rows = [["torchvision", "Kornia", "other difference than floats"]]
    rows += [[f"`{BY_CALL[call].name}`", f"`{BY_CALL[call].kornia}`", BY_CALL[call].differs] for call in ran]
    return f"## What Kornia ran\n\n{report.markdown(rows)}"
