"""Parts that all results share: the machine, the heading, the tables, and the files."""

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


def describe_machine(runs: list[Run], commit: str | None = None) -> dict[str, Any]:
    """Describe the machine and the software, as seen by this process and by the measured ones.

    Args:
        runs: The results.
        commit: torchdali's commit, if git cannot tell it.
    """
    known = [run for run in runs if "versions" in run]
    versions = {"python": platform.python_version()}
    for run in known:
        versions |= run["versions"]
    return {
        "gpu": next((run["gpu"] for run in known), None),
        "driver": _nvidia_smi("driver_version"),
        "cpu": metrics.cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "versions": versions,
        "commit": commit or _commit(),
    }


def hide_paths(command: Sequence[str], args: Namespace) -> list[str]:
    """Replace the folders in a command by the names of their options."""
    names = {str(path): name.upper() for name in ("out", "root") if (path := vars(args).get(name))}
    return [names.get(word, word) if Path(word).is_absolute() else word for word in command]


def default_name(benchmark: str) -> str:
    """Return a name for the result files, from the benchmark and the GPU."""
    return f"{benchmark}-" + re.sub(r"[^a-z0-9]+", "-", (_nvidia_smi("name") or "cpu").lower())


def _nvidia_smi(field: str) -> str | None:
    return _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")


def _commit() -> str | None:
    """Return the commit of the git checkout, with '+' if files differ from it, or None."""
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if head and _output("git", "status", "--porcelain", "--untracked-files=no"):
        head += "+"
    return head


def write(benchmark: Benchmark, whole: dict[str, Any], out: Path, name: str) -> None:
    """Write ``<name>.json``, ``<name>.md`` and, with matplotlib, ``<name>.svg`` to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    runs = whole["runs"]
    title = f"{benchmark.title}: {describe_device(whole)}"
    bars = benchmark.bars(runs)
    drawn = bars is not None and picture.draw(bars, title, out / f"{name}.svg")
    picture_lines = [f"![{benchmark.title}]({name}.svg)"] if drawn else []
    short, *others = benchmark.tables(runs)
    sections = [
        "\n".join(heading(title, whole, benchmark.heading(whole))),
        short,
        *picture_lines,
        *others,
        benchmark.legend,
    ]
    save(whole, out, name, "\n\n".join(sections))


def save(whole: dict[str, Any], out: Path, name: str, markdown: str) -> None:
    """Write ``<name>.json`` and ``<name>.md`` to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    (out / f"{name}.md").write_text(markdown + "\n")


def study_heading(title: str, whole: dict[str, Any], *lines: str) -> str:
    """Return the heading of a study: title, machine, its own `lines`, command and date."""
    machine = format_machine(whole["machine"])
    return "\n".join(
        [f"# {title}", "", *machine, *lines, f"- command: `{whole['command']}`", f"- date: {whole['date']}"]
    )


def describe_device(whole: dict[str, Any]) -> str:
    """Return the name of the GPU, or "CPU"."""
    return whole["machine"]["gpu"] or "CPU"


def heading(title: str, whole: dict[str, Any], lines: list[str]) -> list[str]:
    """Return the heading: title, machine, data, the benchmark's own `lines`, command and date."""
    data = whole["data"]
    kilobytes = data["mean_bytes"] / 1000
    return [
        f"# {title}",
        "",
        *format_machine(whole["machine"]),
        f"- data: {data['images']} unique {KINDS[data['kind']].title}, {kilobytes:.1f} kB, {_describe_cache(whole)}",
        *lines,
        f"- command: `{whole['command']}`, {whole['total_seconds']:.0f} s for this table",
        f"- date: {whole['date']}",
    ]


def _describe_cache(whole: dict[str, Any]) -> str:
    where = f"on {whole['file_system']}"
    if whole["cache"] == "warm":
        return f"{where}, in the page cache"
    shares = [run["cached_share"] for run in whole["runs"] if run.get("cached_share") is not None]
    if not shares:
        rest = "whether they were is not known here"
    else:
        rest = f"{max(shares):.0%} of it was still there at most"
    return f"{where}, dropped from the page cache before each epoch ({rest})"


def format_machine(host: dict[str, Any]) -> list[str]:
    """Return lines on the machine, from :func:`describe_machine`."""
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    where = f"{host['gpu']} (driver {host['driver']})" if host["gpu"] else "no GPU"
    return [
        f"- machine: {where}, {host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB",
        f"- software: {versions}; torchdali at commit {host['commit'] or 'unknown'}",
    ]


def rate(run: Run | None) -> str:
    """Return images per second, or the status of a run without figures."""
    if run is None:
        return "-"
    if run["status"] != "ok":
        return run["status"]
    return f"{run['images_per_s']:,.0f}" + (" (cut)" if run["ended_mid_epoch"] else "")


def cores(count: int) -> str:
    """Return '1 core', '4 cores'."""
    return f"{count} core{'s' * (count > 1)}"


def number(run: Run, key: str, digits: int) -> str:
    """Return the figure `key`, or a dash."""
    value = run.get(key)
    return "-" if value is None else f"{value:,.{digits}f}"


def gaps(run: Run, key: str = "gap_ms") -> str:
    """Return milliseconds between batches: median, 99th percentile and maximum."""
    summary = run[key]
    return " / ".join(f"{summary[name]:.1f}" for name in ("median", "p99", "max")) if summary else "-"


def host_memory(run: Run) -> str:
    """Return MiB of all processes: the sum of their peaks, and the sum with shared pages counted once."""
    return f"{number(run, 'rss_peak_mib', 0)} ({number(run, 'pss_mib', 0)})"


def strip_markdown(title: str) -> str:
    """Return a title without Markdown."""
    return title.replace("*", "")


def table(columns: dict[str, Callable[[Run], str]], runs: list[Run], always: int) -> str:
    """Return a table with a row for each run. Runs without figures have the first `always` columns only."""
    rows = [list(columns)]
    for run in runs:
        used = columns.values() if run["status"] == "ok" else list(columns.values())[:always]
        cells = [cell(run) for cell in used]
        rows.append(cells + [""] * (len(columns) - len(cells)))
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns: the first to the left, the others to the right."""
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


def failures(runs: list[Run], name: Callable[[Run], str]) -> str:
    """Return a list of the runs without figures, with the reasons, or an empty string."""
    lines: list[str] = []
    for run in runs:
        if run["status"] in ("failed", "timeout"):
            last = (run.get("stderr") or "nothing").strip().splitlines()[-1][:300]
            lines.append(f"- {name(run)}, {cores(run['cores'])}: {run['status']}: `{last}`")
        elif "reason" in run:
            lines.append(f"- {name(run)}, {cores(run['cores'])}: {run['reason']}")
    return "\n".join(["What was not measured:", "", *lines]) if lines else ""


def _output(*command: str) -> str | None:
    """Return the first line that a program prints, or None if it is missing or fails."""
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None


def describe_ending(run: Run) -> str:
    """Describe how a case ended, for the line that is printed."""
    line = f", {run['busy_cores']:.1f} cores busy, {run['process_s']:.0f} s in all"
    if run["exit"] != "0":
        line += f" [exit code: {run['exit']}]"
    if run["allowed_cores"] > run["cores"]:
        line += f" [not limited: its threads may use {run['allowed_cores']} cores]"
    return line
