"""Measure what a process uses, to find leaks: memory of the host and of its GPU, threads, open files."""

import gc
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchdali.tools.bench import metrics


def measure_host() -> dict[str, float]:
    """Return this process's memory in MiB, with that of its workers, and its threads, open files and workers.

    `pss_mib` divides a shared page among its processes. So it changes when processes with the same libraries start or
    end. `anonymous_mib` is memory that belongs to no file, and does not change then.
    """
    gc.collect()
    pids = metrics.list_processes()
    sums = {"Pss": 0, "Pss_Anon": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            if name in sums:
                sums[name] += int(rest.split()[0])
    return {
        "pss_mib": round(sums["Pss"] / 1024, 1),
        "anonymous_mib": round(sums["Pss_Anon"] / 1024, 1),
        "threads": _count_entries("/proc/self/task"),
        "python_threads": threading.active_count(),
        "files": _count_entries("/proc/self/fd") - 1,  # the listing opens one itself
        "workers": len(pids) - 1,
    }


def _count_entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def measure_mapped_file(path: Path) -> float:
    """Return this process's share of a file mapped into its memory, in MiB, without pages that it changed."""
    kilobytes, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            here = fields[-1] == str(path)
        elif here and fields[0] in ("Pss:", "Anonymous:"):
            kilobytes += int(fields[1]) * (1 if fields[0] == "Pss:" else -1)
    return round(kilobytes / 1024, 1)


def measure_gpu() -> dict[str, float]:
    """Return the current CUDA device's used memory, of all processes, and torch's, in MiB. Empty without a device."""
    import torch

    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu_mib": round((total - free) / 2**20, 1),
        "gpu_torch_mib": round(torch.cuda.memory_reserved() / 2**20, 1),
    }


def measure_all() -> dict[str, float]:
    """Return the figures of the host and of the GPU."""
    return measure_host() | measure_gpu()


def fit_drift(values: Sequence[float]) -> dict[str, float]:
    """Return the slope of the straight line through a figure's values, per step, and the range of the values.

    The slope is the median of the slopes of all pairs (Theil and Sen), so one outlier does not move it.
    """
    pairs = [(b - a) / (j - i) for i, a in enumerate(values) for j, b in enumerate(values) if i < j]
    return {
        "slope": round(statistics.median(pairs), 4) if pairs else 0.0,
        "range": round(max(values) - min(values), 1) if values else 0.0,
    }


def fit_drifts(rows: Sequence[dict[str, Any]], skip: int = 1) -> dict[str, dict[str, float]]:
    """Return :func:`fit_drift` of each figure. Leave out the first ``skip`` rows, in which memory pools still grow."""
    rows = rows[skip:]
    return {name: fit_drift([row[name] for row in rows]) for name in (rows[0] if rows else {})}
