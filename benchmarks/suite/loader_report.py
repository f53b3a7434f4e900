"""Tables of loading alone and of decoding alone."""

from typing import Any

from benchmarks.common import report
from benchmarks.common.benchmark import Bars, Run
from benchmarks.systems.systems import PASSES, System

LEGEND = f"""\
Each line is a process on those cores only, forked from one that has imported torch and torchvision. *First batch* is
construction and the first batch, after imports and with CUDA initialised. Images/s and gaps are from the second epoch
on. If the first epoch takes long, they are from some seconds on; *cut* means that measuring stopped within an epoch. An
epoch of a system with workers goes {PASSES} times through the pictures, because workers start each epoch without
prepared batches (not with cold files). CPU time and memory include child processes. Host memory is the sum of the peaks
of all processes, which counts shared pages several times. PSS, at the end, counts them once. GPU memory is without the
CUDA context. Threads are the number given to the system; without a number it chose itself. *Tried* is the best of a few
numbers."""


def tables(systems: dict[str, System], runs: list[Run]) -> list[str]:
    """Return a short table, a table with all figures, and the runs that failed."""
    return list(
        filter(
            None,
            [
                short_table(systems, runs),
                full_table(systems, runs),
                report.failures(runs, lambda run: report.strip_markdown(systems[run["system"]].title)),
            ],
        )
    )


def short_table(systems: dict[str, System], runs: list[Run]) -> str:
    """Return images per second, with a row for each system and a column for each number of cores."""
    cores = sorted({run["cores"] for run in runs}, reverse=True)
    rows = [["images/s", *map(report.cores, cores)]]
    for system in dict.fromkeys(run["system"] for run in runs):
        by_cores = {run["cores"]: run for run in runs if run["system"] == system}
        rows.append([systems[system].title, *(report.rate(by_cores.get(count)) for count in cores)])
    return report.markdown(rows)


def full_table(systems: dict[str, System], runs: list[Run]) -> str:
    """Return all figures, with a row for each run."""
    columns = {
        "system": lambda run: systems[run["system"]].title,
        "cores": lambda run: str(run["cores"]),
        "threads": _threads,
        "images/s": report.rate,
        "first batch, s": lambda run: report.number(run, "first_batch_s", 2),
        "second epoch's, s": lambda run: report.number(run, "second_epoch_first_batch_s", 3),
        "gap p50 / p99 / max, ms": report.gaps,
        "CPU-s per 1,000": lambda run: report.number(run, "cpu_s_per_1000_images", 2),
        "busy cores": lambda run: report.number(run, "busy_cores", 1),
        "GPU MiB": lambda run: report.number(run, "gpu_peak_mib", 0),
        "host MiB (PSS)": report.host_memory,
    }
    return report.table(columns, runs, 4)


def _threads(run: Run) -> str:
    return (str(run["threads"]) + " (tried)" * ("threads_tried" in run)) if run["threads"] else ""


def heading(benchmark: str, whole: dict[str, Any]) -> list[str]:
    """Return lines of the heading."""
    work = (
        "decoding and a crop to one size, nothing else"
        if benchmark == "decode"
        else "random crop to 32 with a padding of 4, flip, normalize, fp32"
        if whole["data"]["kind"] == "small"
        else "random resized crop to 224, flip, normalize, fp32"
    )
    return [f"- work: batches of {whole['batch_size']}, {work}"]


def line(run: Run) -> str:
    """Return the line that is printed for a run."""
    text = f"{run['cores']:>3} cores  {run['system']:<18}"
    if run["status"] != "ok":
        return f"{text}{run.get('reason', run['status'])}\n{run.get('stderr', '')}".rstrip()
    text += f"{run['images_per_s']:>10,.0f} images/s, first batch {run['first_batch_s']:.2f} s"
    if run.get("threads_tried"):
        text += f", threads tried: {run['threads_tried']}"
    return text + report.describe_ending(run)


def bars(systems: dict[str, System], title: str, runs: list[Run]) -> Bars | None:
    """Return the picture of images per second."""
    cores = sorted({run["cores"] for run in runs}, reverse=True)
    groups: list[tuple[str, list[float | None]]] = []
    for system in dict.fromkeys(run["system"] for run in runs if run["status"] == "ok"):
        by_cores = {run["cores"]: run.get("images_per_s") for run in runs if run["system"] == system}
        groups.append((report.strip_markdown(systems[system].title), [by_cores.get(count) for count in cores]))
    return Bars(title, "images/s", [report.cores(count) for count in cores], groups) if groups else None
