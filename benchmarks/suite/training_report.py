"""Tables of `benchmarks.suite.training`, and the shares of the ceiling."""

from typing import Any

from benchmarks.common import report
from benchmarks.common.benchmark import Bars, Run
from benchmarks.systems.systems import PASSES
from benchmarks.systems.training_systems import LEVERS, MODELS, SYSTEMS

LEGEND = f"""\
Each line is a process on those cores only. *Share* is of the ceiling: the same step on one batch that stays on the GPU,
already channels last, with 8 or 32 hardware queues, whichever was faster. For all others the step includes the
conversion to channels last; *to channels last* is its time alone. Images/s are by the host's clock, over whole epochs
with their starts, and with the GPU synchronized at both ends. Measuring begins after some seconds of training (half as
many with one batch on the GPU), in which headers are read and memory pools grow. *Cut* means that it stopped within an
epoch. An epoch of a system with workers goes {PASSES} times through the pictures, because workers start each epoch
without prepared batches. *Step to step* is the GPU's time between the ends of two steps. *Waiting* is the part of it in
which the training's stream had no batch. *Epoch start* is the wait for an epoch's first batch. *In loader* is the
host's time in the loader for each batch. GPU memory is without the CUDA context. *torch's* is the peak of its tensors.
CPU time includes child processes. DALI tuned by hand has half as many threads as cores, which was best in the loader
benchmark. DALI as documented has a thread for each core, and DataLoader a worker for each core."""


def tables(runs: list[Run]) -> list[str]:
    """Return a short table, a table of levers, a table with all figures, and the runs that failed."""
    failures = report.failures(runs, lambda run: f"{plain_title(run)}, {MODELS[run['model']].title}")
    return list(filter(None, [short_table(runs), lever_table(runs), full_table(runs), failures]))


def add_shares(runs: list[dict[str, Any]]) -> None:
    """Add its share of the ceiling to each run, if both are known."""
    ceilings: dict[tuple[str, int], float] = {}
    for run in runs:
        if run["system"] == "synthetic" and run["status"] == "ok":
            key = run["model"], run["cores"]
            ceilings[key] = max(run["images_per_s"], ceilings.get(key, 0))
    for run in runs:
        ceiling = ceilings.get((run["model"], run["cores"]))
        if ceiling and run["status"] == "ok":
            run["share"] = round(run["images_per_s"] / ceiling, 4)


def title(run: dict[str, Any]) -> str:
    """Return the title of a run, with its lever and number of queues if they are not the usual ones."""
    name = SYSTEMS[run["system"]].title
    if run["lever"]:
        return LEVERS[run["lever"]].title
    if run["system"] == "synthetic":
        return f"{name}, {run['queues'] or 8} queues"
    return name


def plain_title(run: dict[str, Any]) -> str:
    """Return the title without Markdown."""
    return report.strip_markdown(title(run))


def rate(run: dict[str, Any] | None) -> str:
    """Return images per second and the share, or the status of a run without figures."""
    return report.rate(run) + (f", {run['share']:.1%}" if run and "share" in run else "")


def short_table(runs: list[dict[str, Any]]) -> str:
    """Return images per second and shares: a row for each system, a column for each model and number of cores."""
    runs = [run for run in runs if not run["lever"]]
    columns = list(dict.fromkeys((run["model"], run["cores"]) for run in runs))
    rows = [["images/s, share", *(f"{MODELS[model].title}, {report.cores(cores)}" for model, cores in columns)]]
    for name in dict.fromkeys(title(run) for run in runs):
        by_column = {(run["model"], run["cores"]): run for run in runs if title(run) == name}
        rows.append([name, *(rate(by_column.get(column)) for column in columns)])
    return report.markdown(rows)


def lever_table(runs: list[dict[str, Any]]) -> str:
    """Return levers, compared with the mean of all runs with defaults, or an empty string without levers."""
    levers = [run for run in runs if run["lever"]]
    if not levers:
        return ""
    model, cores = levers[0]["model"], levers[0]["cores"]
    same = [run for run in runs if (run["model"], run["cores"]) == (model, cores)]
    plain = [run for run in same if run["system"] == "torchdali" and run["lever"] in ("", "again", "once_more")]
    rates = [run["images_per_s"] for run in plain if run["status"] == "ok"]
    columns = {
        f"**torchdali**, {MODELS[model].title}, {report.cores(cores)}": title,
        "images/s, share": rate,
        "of defaults": lambda run: f"{run['images_per_s'] / (sum(rates) / len(rates)):.3f}" if rates else "-",
        "queues": lambda run: run["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
        **_TIMES,
    }
    return report.table(columns, [run for run in plain if not run["lever"]] + levers, 2)


def full_table(runs: list[dict[str, Any]]) -> str:
    """Return all figures, with a row for each run without a lever."""
    columns = {
        "system": title,
        "model": lambda run: MODELS[run["model"]].title,
        "cores": lambda run: str(run["cores"]),
        "images/s, share": rate,
        **_TIMES,
        "to channels last, ms": lambda run: report.number(run, "to_channels_last_ms", 2),
        "first step, s": lambda run: report.number(run, "first_step_s", 1),
    }
    return report.table(columns, [run for run in runs if not run["lever"]], 4)


def _memory(run: dict[str, Any]) -> str:
    return f"{report.number(run, 'gpu_peak_mib', 0)} ({report.number(run, 'torch_peak_mib', 0)})"


def _median(run: dict[str, Any], key: str) -> str:
    return f"{run[key]['median']:.1f}" if run[key] else "-"


_TIMES = {
    "step to step p50 / p99 / max, ms": lambda run: report.gaps(run, "gap_ms"),
    "step, ms": lambda run: _median(run, "step_ms"),
    "waiting": lambda run: f"{run['waiting_share']:.1%}",
    "wait p50 / p99 / max, ms": lambda run: report.gaps(run, "wait_ms"),
    "epoch start, ms": lambda run: _median(run, "epoch_start_wait_ms"),
    "in loader p50 / p99 / max, ms": lambda run: report.gaps(run, "host_in_loader_ms"),
    "busy cores": lambda run: report.number(run, "busy_cores", 1),
    "CPU-s per 1,000": lambda run: report.number(run, "cpu_s_per_1000_images", 2),
    "GPU MiB (torch's)": _memory,
    "host MiB (PSS)": report.host_memory,
}


def heading(whole: dict[str, Any]) -> list[str]:
    """Return lines of the heading."""
    data, options = whole["data"], whole["options"]
    kernels = "the fastest of cuDNN's kernels" if options["cudnn_benchmark"] else "cuDNN's own choice of kernels"
    crop = "random crop to 32 with a padding of 4" if data["kind"] == "small" else "random resized crop to 224"
    return [
        f"- images: batches of {whole['batch_size']}, {crop}, flip, normalize, fp32",
        f"- epochs: {data['images'] // whole['batch_size']} batches",
        f"- measured after {options['settle']:g} s of training",
        f"- step: bfloat16 autocast, channels last, cross entropy, SGD with momentum, {kernels}",
    ]


def bars(runs: list[Run]) -> Bars | None:
    """Return the picture of the shares of the ceiling."""
    runs = [run for run in runs if "share" in run and not run["lever"] and run["system"] != "synthetic"]
    columns = list(dict.fromkeys((run["model"], run["cores"]) for run in runs))
    groups: list[tuple[str, list[float | None]]] = []
    for name in dict.fromkeys(title(run) for run in runs):
        by_column = {(run["model"], run["cores"]): 100 * run["share"] for run in runs if title(run) == name}
        groups.append((report.strip_markdown(name), [by_column.get(column) for column in columns]))
    names = [f"{MODELS[model].title}, {report.cores(cores)}" for model, cores in columns]
    unit = "% of the images/s that the step makes with one batch on the GPU"
    return Bars("Beside a training step", unit, names, groups, 100.0) if groups else None
