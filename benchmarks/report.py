"""Writes a measurement as JSON and as Markdown tables, and says on which machine it was taken."""

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import process
from benchmarks.systems import SYSTEMS

_REPOSITORY = Path(__file__).resolve().parent.parent
_LEGEND = """\
Each line is a fresh process that may use only those cores. *First batch* is construction and the first
batch, with CUDA initialised and modules imported. Images/s and gaps are from the second epoch on; *cut* means
that it was stopped before an epoch's end. CPU time and memory include child processes. Host memory is the sum
of every process's peak, which counts shared pages several times (PSS, at the end, counts them once). GPU
memory leaves out the CUDA context. Threads are what the system was told; where there is no number, it chose
by itself."""


def machine(runs: list[dict[str, Any]], commit: str | None = None) -> dict[str, Any]:
    """The machine and the software: what this process can see, and what the measured ones said.

    `commit` is torchdali's where git cannot tell it.
    """
    seen = [run for run in runs if "versions" in run]
    versions = {"python": platform.python_version()}
    for run in seen:
        versions |= run["versions"]
    return {
        "gpu": next((run["gpu"] for run in seen), None),
        "driver": _nvidia_smi("driver_version"),
        "cpu": process.cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": process.machine_memory_gib(),
        "kernel": platform.release(),
        "versions": versions,
        "commit": commit or _commit(),
    }


def default_name(benchmark: str) -> str:
    """A name for the result files that says which benchmark and which GPU this is."""
    return f"{benchmark}-" + re.sub(r"[^a-z0-9]+", "-", (_nvidia_smi("name") or "cpu").lower())


def _nvidia_smi(field: str) -> str | None:
    return _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")


def _commit() -> str | None:
    """The checkout's commit, with '+' where files differ from it; None where it is no git checkout."""
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if head and _output("git", "status", "--porcelain", "--untracked-files=no"):
        head += "+"
    return head


def write(report: dict[str, Any], out: Path, name: str) -> None:
    """Writes ``<name>.json`` and ``<name>.md`` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    sections = [_heading(report), short_table(report["runs"]), full_table(report["runs"]), _LEGEND]
    (out / f"{name}.md").write_text("\n\n".join(sections) + "\n")


def short_table(runs: list[dict[str, Any]]) -> str:
    """Images per second: a line a system, a column a number of cores."""
    cores = sorted({run["cores"] for run in runs}, reverse=True)
    rows = [["images/s", *(f"{count} core{'s' * (count > 1)}" for count in cores)]]
    for system in dict.fromkeys(run["system"] for run in runs):
        by_cores = {run["cores"]: run for run in runs if run["system"] == system}
        rows.append([SYSTEMS[system].title, *(rate(by_cores.get(count)) for count in cores)])
    return markdown(rows)


def full_table(runs: list[dict[str, Any]]) -> str:
    """Every figure: a line a run."""
    columns = {
        "system": lambda run: SYSTEMS[run["system"]].title,
        "cores": lambda run: str(run["cores"]),
        "threads": lambda run: str(run["threads"]) if run["threads"] else "",
        "images/s": rate,
        "first batch, s": lambda run: number(run, "first_batch_s", 2),
        "second epoch's, s": lambda run: number(run, "second_epoch_first_batch_s", 3),
        "gap p50 / p99 / max, ms": gaps,
        "CPU-s per 1,000": lambda run: number(run, "cpu_s_per_1000_images", 2),
        "busy cores": lambda run: number(run, "busy_cores", 1),
        "GPU MiB": lambda run: number(run, "gpu_peak_mib", 0),
        "host MiB (PSS)": lambda run: f"{number(run, 'rss_peak_mib', 0)} ({number(run, 'pss_mib', 0)})",
        "imports, s": lambda run: f"{sum(run['import_s'].values()):.1f}",
    }
    rows = [list(columns)]
    for run in runs:
        measured = run["status"] == "ok"
        always = {"system", "cores", "threads", "images/s"}
        rows.append([cell(run) if measured or name in always else "" for name, cell in columns.items()])
    return markdown(rows)


def _heading(report: dict[str, Any]) -> str:
    host, data = report["machine"], report["data"]
    return "\n".join(
        [
            f"# Loader only: {host['gpu'] or 'CPU'}",
            "",
            *machine_lines(host),
            f"- data: {data['images']} unique JPEGs of {data['mean_bytes'] / 1000:.1f} kB, about 500x375",
            f"- work: batches of {report['batch_size']}, random resized crop to 224, flip, normalize, fp32",
            f"- command: `{report['command']}`",
            f"- date: {report['date']}",
        ]
    )


def machine_lines(host: dict[str, Any]) -> list[str]:
    """What :func:`machine` found, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    where = f"{host['gpu']} (driver {host['driver']})" if host["gpu"] else "no GPU"
    return [
        f"- machine: {where}, {host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB",
        f"- software: {versions}; torchdali at commit {host['commit'] or 'unknown'}",
    ]


def rate(run: dict[str, Any] | None) -> str:
    """Images per second, or what became of a run that has none."""
    if run is None:
        return "-"
    if run["status"] != "ok":
        return run["status"]
    return f"{run['images_per_s']:,.0f}" + (" (cut)" if run["ended_mid_epoch"] else "")


def number(run: dict[str, Any], key: str, digits: int) -> str:
    """The figure `key`, or a dash."""
    value = run.get(key)
    return "-" if value is None else f"{value:,.{digits}f}"


def gaps(run: dict[str, Any]) -> str:
    """Milliseconds between batches: median, 99th percentile and longest."""
    summary = run["gap_ms"]
    return " / ".join(f"{summary[name]:.1f}" for name in ("median", "p99", "max")) if summary else "-"


def markdown(rows: list[list[str]]) -> str:
    """A table whose columns also line up as plain text: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in (rows[0], rule, *rows[1:])
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _output(*command: str) -> str | None:
    """The first line that a program prints; None where it is missing or fails."""
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None


def ending(entry: dict[str, Any]) -> str:
    """How a case ended, for the line that is printed of it then."""
    line = f", {entry['busy_cores']:.1f} cores busy, {entry['process_s']:.0f} s in all"
    if entry["exit"] != "0":
        line += f" [did not end cleanly: {entry['exit']}]"
    if entry["allowed_cores"] > entry["cores"]:
        line += f" [broke out: its threads may use {entry['allowed_cores']} cores]"
    return line
