"""Tables of `benchmarks.suite.proxy`."""

from typing import Any

from benchmarks.common import report
from benchmarks.common.benchmark import Bars, Run
from benchmarks.systems.proxy_datasets import ARRAYS
from benchmarks.systems.proxy_systems import SYSTEMS

_SOURCES = {
    "bytes": "encoded bytes",
    "pil": "PIL images",
    "arrays": "uint8 arrays",
    "paths": "paths",
    "folder": "image folder, native",
}
LEGEND = """\
Each line is a process on those cores only, with workers that stay between epochs. *First batch* is construction and
the first batch, after imports and with CUDA initialised. Images/s and gaps are from the second epoch on, and include
the starts of epochs. *Cut* means that measuring stopped within an epoch. *Second epoch's* is the time from `iter()`
to its first batch. *With new workers* is the same with `persistent_workers=False`, after an epoch of one batch for
each worker. CPU time includes the workers. DALI's proxy is tried with two numbers of workers, and the short table
has the better result. GPU memory is without the CUDA context."""


def tables(runs: list[Run]) -> list[str]:
    """Return a short table with ratios, a table with all figures, and the runs that failed."""
    return list(filter(None, [short_table(runs), full_table(runs), failures(runs)]))


def short_table(runs: list[dict[str, Any]]) -> str:
    """Return images per second and ratios, with a row for each kind of image and number of cores."""
    names = [name for name in ("torchdali", "nvidia", "torch_v2") if any(run["system"] == name for run in runs)]
    others = [name for name in names if name != "torchdali"]
    heads = [f"torchdali / {SYSTEMS[name].title}" for name in others]
    rows = [["images/s", *(SYSTEMS[name].title for name in names), *heads]]
    for cores in sorted({run["cores"] for run in runs}, reverse=True):
        for source, title in _SOURCES.items():
            row_runs = [run for run in runs if (run["cores"], run["source"]) == (cores, source)]
            if not row_runs:
                continue
            best = {name: _best(row_runs, name) for name in names}
            if source == "folder":
                best["torchdali"] = _best(row_runs, "native")
            cells = [_rate(best[name]) for name in names]
            ratios = [_ratio(best.get("torchdali"), best[name]) for name in others]
            rows.append([f"{title}, {report.cores(cores)}", *cells, *ratios])
    return report.markdown(rows)


def full_table(runs: list[dict[str, Any]]) -> str:
    """Return all figures, with a row for each run."""
    columns = {
        "system": lambda run: SYSTEMS[run["system"]].title,
        "image": lambda run: _SOURCES[run["source"]],
        "cores": lambda run: str(run["cores"]),
        "workers": lambda run: str(run["workers"]) if run["workers"] else "",
        "images/s": report.rate,
        "first batch, s": lambda run: report.number(run, "first_batch_s", 2),
        "second epoch's, s": lambda run: report.number(run, "second_epoch_first_batch_s", 3),
        "with new workers, s": lambda run: report.number(run, "new_workers_first_batch_s", 3),
        "gap p50 / p99 / max, ms": report.gaps,
        "CPU-s per 1,000": lambda run: report.number(run, "cpu_s_per_1000_images", 2),
        "busy cores": lambda run: report.number(run, "busy_cores", 1),
        "GPU MiB": lambda run: report.number(run, "gpu_peak_mib", 0),
    }
    always = list(columns)[:5]
    order = {name: place for place, name in enumerate(_SOURCES)}
    rows = [list(columns)]
    for run in sorted(runs, key=lambda run: (-run["cores"], order[run["source"]])):
        measured = run["status"] == "ok"
        rows.append([cell(run) if measured or name in always else "" for name, cell in columns.items()])
    return report.markdown(rows)


def _best(runs: list[dict[str, Any]], system: str) -> dict[str, Any] | None:
    """Return the fastest run of a system."""
    own = [run for run in runs if run["system"] == system]
    return max(own, key=lambda run: run.get("images_per_s", -1), default=None)


def _rate(run: dict[str, Any] | None) -> str:
    tried = run is not None and run["status"] == "ok" and run["system"] == "nvidia"
    return report.rate(run) + (f", {run['workers']} workers" if tried else "")


def _ratio(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
    rates = [run.get("images_per_s") if run else None for run in (ours, theirs)]
    return f"{rates[0] / rates[1]:.2f}x" if all(rates) else "-"


def heading(whole: dict[str, Any]) -> list[str]:
    """Return lines of the heading."""
    lengths = {run["cores"]: run["length"] for run in whole["runs"]}
    arrays = min(ARRAYS, whole["data"]["images"])
    return [
        f"- arrays: {arrays} of them, decoded to 500x375 in one memory-mapped file, repeated",
        "- epochs: " + ", ".join(f"{length} samples on {cores} cores" for cores, length in lengths.items()),
        f"- work: batches of {whole['batch_size']}, random resized crop to 224, flip, normalize, fp32",
    ]


def failures(runs: list[Run]) -> str:
    """Return a list of the runs without figures, also of those that failed with new workers only."""
    lines = report.failures(runs, lambda run: f"{run['system']}, {_SOURCES[run['source']]}, {run['workers']} workers")
    for run in runs:
        if error := run.get("new_workers_error"):
            name = f"{run['system']}, {_SOURCES[run['source']]}, {run['workers']} workers, {report.cores(run['cores'])}"
            last = error.strip().splitlines()[-1][:300]
            lines = f"{lines or 'What was not measured:'}\n- {name}: new workers: `{last}`"
    return lines


def bars(runs: list[Run]) -> Bars | None:
    """Return the picture of images per second on the most cores, with the better number of workers."""
    most = max((run["cores"] for run in runs), default=0)
    runs = [run for run in runs if run["cores"] == most and run["status"] == "ok"]
    sources = [source for source in _SOURCES if any(run["source"] == source for run in runs)]
    # The native image folder is torchdali's, and no other system has one.
    runs = [{**run, "system": "torchdali"} if run["system"] == "native" else run for run in runs]
    groups: list[tuple[str, list[float | None]]] = []
    for name in dict.fromkeys(run["system"] for run in runs):
        best = [_best([run for run in runs if run["source"] == source], name) for source in sources]
        groups.append((report.strip_markdown(SYSTEMS[name].title), [run and run["images_per_s"] for run in best]))
    names = [_SOURCES[source] for source in sources]
    return Bars("Datasets in worker processes", f"images/s, {most} cores", names, groups) if groups else None
