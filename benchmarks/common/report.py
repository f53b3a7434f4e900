"""What all results share: the machine, the heading, tables, and the files that they are written to."""

import json
import os
import platform
import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import picture
from benchmarks.common.benchmark import Benchmark, Run
from benchmarks.common.data import KINDS
from torchdali.tools.bench import metrics

_REPOSITORY = Path(__file__).resolve().parents[2]


def machine(runs: list[Run], commit: str | None = None) -> dict[str, Any]:
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
        "cpu": metrics.cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "versions": versions,
        "commit": commit or _commit(),
    }


def shown(command: Sequence[str], args: Namespace) -> list[str]:
    """A command's words as results show them: without the folders of the machine that it ran on."""
    places = {str(place): name.upper() for name in ("out", "root") if (place := vars(args).get(name))}
    return [places.get(word, word) if Path(word).is_absolute() else word for word in command]


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


def write(benchmark: Benchmark, whole: dict[str, Any], out: Path, name: str) -> None:
    """Writes ``<name>.json``, ``<name>.md`` and, where matplotlib is installed, ``<name>.svg`` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    runs = whole["runs"]
    title = f"{benchmark.title}: {whole['machine']['gpu'] or 'CPU'}"
    bars = benchmark.bars(runs)
    drawn = bars is not None and picture.draw(bars, title, out / f"{name}.svg")
    shown = [f"![{benchmark.title}]({name}.svg)"] if drawn else []
    short, *others = benchmark.tables(runs)
    sections = ["\n".join(heading(title, whole, benchmark.said(whole))), short, *shown, *others, benchmark.legend]
    (out / f"{name}.md").write_text("\n\n".join(sections) + "\n")


def heading(title: str, whole: dict[str, Any], said: list[str]) -> list[str]:
    """What was measured, on what, with which command; `said` are the benchmark's own lines."""
    data = whole["data"]
    kilobytes = data["mean_bytes"] / 1000
    return [
        f"# {title}",
        "",
        *machine_lines(whole["machine"]),
        f"- data: {data['images']} unique {KINDS[data['kind']].title}, {kilobytes:.1f} kB each, {_cache(whole)}",
        *said,
        f"- command: `{whole['command']}`, {whole['total_seconds']:.0f} s for this table",
        f"- date: {whole['date']}",
    ]


def _cache(whole: dict[str, Any]) -> str:
    where = f"on {whole['file_system']}"
    if whole["cache"] == "warm":
        return f"{where}, in the page cache"
    shares = [run["cached_share"] for run in whole["runs"] if run.get("cached_share") is not None]
    if not shares:
        left = "whether they were is not known here"
    else:
        left = f"{max(shares):.0%} of it was still there at most"
    return f"{where}, dropped from the page cache before each epoch ({left})"


def machine_lines(host: dict[str, Any]) -> list[str]:
    """What :func:`machine` found, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    where = f"{host['gpu']} (driver {host['driver']})" if host["gpu"] else "no GPU"
    return [
        f"- machine: {where}, {host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB",
        f"- software: {versions}; torchdali at commit {host['commit'] or 'unknown'}",
    ]


def rate(run: Run | None) -> str:
    """Images per second, or what became of a run that has none."""
    if run is None:
        return "-"
    if run["status"] != "ok":
        return run["status"]
    return f"{run['images_per_s']:,.0f}" + (" (cut)" if run["ended_mid_epoch"] else "")


def cores(count: int) -> str:
    """'1 core', '4 cores'."""
    return f"{count} core{'s' * (count > 1)}"


def number(run: Run, key: str, digits: int) -> str:
    """The figure `key`, or a dash."""
    value = run.get(key)
    return "-" if value is None else f"{value:,.{digits}f}"


def gaps(run: Run, key: str = "gap_ms") -> str:
    """Milliseconds between batches: median, 99th percentile and longest."""
    summary = run[key]
    return " / ".join(f"{summary[name]:.1f}" for name in ("median", "p99", "max")) if summary else "-"


def host_memory(run: Run) -> str:
    """MiB of all processes: the sum of their peaks, and what they share counted once."""
    return f"{number(run, 'rss_peak_mib', 0)} ({number(run, 'pss_mib', 0)})"


def plain(title: str) -> str:
    """A title without Markdown."""
    return title.replace("*", "")


def table(columns: dict[str, Callable[[Run], str]], runs: list[Run], always: int) -> str:
    """A line a run; of one that was not measured the first `always` columns alone."""
    rows = [list(columns)]
    for run in runs:
        shown = columns.values() if run["status"] == "ok" else list(columns.values())[:always]
        cells = [cell(run) for cell in shown]
        rows.append(cells + [""] * (len(columns) - len(cells)))
    return markdown(rows)


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


def failures(runs: list[Run], named: Callable[[Run], str]) -> str:
    """What those said that were not measured, a line each; empty where all were."""
    lines: list[str] = []
    for run in runs:
        if run["status"] in ("failed", "timeout"):
            last = (run.get("stderr") or "nothing").strip().splitlines()[-1][:300]
            lines.append(f"- {named(run)}, {cores(run['cores'])}: {run['status']}: `{last}`")
        elif "reason" in run:
            lines.append(f"- {named(run)}, {cores(run['cores'])}: {run['reason']}")
    return "\n".join(["What was not measured:", "", *lines]) if lines else ""


def _output(*command: str) -> str | None:
    """The first line that a program prints; None where it is missing or fails."""
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None


def ending(run: Run) -> str:
    """How a case ended, for the line that is printed of it then."""
    line = f", {run['busy_cores']:.1f} cores busy, {run['process_s']:.0f} s in all"
    if run["exit"] != "0":
        line += f" [did not end cleanly: {run['exit']}]"
    if run["allowed_cores"] > run["cores"]:
        line += f" [broke out: its threads may use {run['allowed_cores']} cores]"
    return line
