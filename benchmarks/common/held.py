"""What a process holds, which a leak makes more of: memory of the host and of its GPU, threads, open files."""

import gc
import os
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def host() -> dict[str, float]:
    """Of this process: memory in MiB, with that of its workers, threads, file descriptors, and workers.

    `pss_mib` counts each page that several processes share as a share, so it changes when others come and go that have
    the same libraries; `anonymous_mib`, what is in no file, does not.
    """
    gc.collect()
    pids = _with_workers(os.getpid())
    sums = {"Pss": 0, "Pss_Anon": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            if name in sums:
                sums[name] += int(rest.split()[0])
    return {
        "pss_mib": round(sums["Pss"] / 1024, 1),
        "anonymous_mib": round(sums["Pss_Anon"] / 1024, 1),
        "threads": _entries("/proc/self/task"),
        "python_threads": threading.active_count(),
        "files": _entries("/proc/self/fd") - 1,  # that of the listing
        "workers": len(pids) - 1,
    }


def _with_workers(pid: int) -> list[int]:
    """A process and its children, and theirs."""
    children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return [pid, *(one for child in children for one in _with_workers(int(child)))]


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def of_file(path: Path) -> float:
    """This process's share of a file that is mapped into its memory, in MiB, without what it changed there."""
    kilobytes, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            here = fields[-1] == str(path)
        elif here and fields[0] in ("Pss:", "Anonymous:"):
            kilobytes += int(fields[1]) * (1 if fields[0] == "Pss:" else -1)
    return round(kilobytes / 1024, 1)


def gpu() -> dict[str, float]:
    """Of the current CUDA device, in MiB: what is not free, whoever has it, and what torch has; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu_mib": round((total - free) / 2**20, 1),
        "gpu_torch_mib": round(torch.cuda.memory_reserved() / 2**20, 1),
    }


def everything() -> dict[str, float]:
    """Both."""
    return host() | gpu()


def drift(values: Sequence[float]) -> dict[str, float]:
    """How a figure moves: the slope of the straight line through it, a step; and its largest minus its smallest.

    The slope is the median of those of all pairs (Theil and Sen), which one odd value does not move.
    """
    pairs = [(b - a) / (j - i) for i, a in enumerate(values) for j, b in enumerate(values) if i < j]
    return {
        "slope": round(statistics.median(pairs), 4) if pairs else 0.0,
        "range": round(max(values) - min(values), 1) if values else 0.0,
    }


def drifts(rows: Sequence[dict[str, Any]], skip: int = 1) -> dict[str, dict[str, float]]:
    """:func:`drift` of each figure over some samples, without the first `skip`, in which pools still fill."""
    kept = rows[skip:]
    return {name: drift([row[name] for row in kept]) for name in (kept[0] if kept else {})}
