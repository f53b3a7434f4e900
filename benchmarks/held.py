"""What a process holds, which a leak makes more of: memory of the host and of its GPU, threads, open files."""

import gc
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def host() -> dict[str, float]:
    """Of this process: memory in MiB, threads, and file descriptors.

    `pss_mib` counts each page that several processes share as a share; `anonymous_mib` is what is its own and in no
    file, `file_mib` its share of files that are mapped.
    """
    gc.collect()
    kilobytes = {
        line.split()[0].rstrip(":"): int(line.split()[1])
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    }
    return {
        "pss_mib": round(kilobytes["Pss"] / 1024, 1),
        "anonymous_mib": round(kilobytes["Pss_Anon"] / 1024, 1),
        "file_mib": round((kilobytes["Pss_File"] + kilobytes["Pss_Shmem"]) / 1024, 1),
        "threads": _entries("/proc/self/task"),
        "python_threads": threading.active_count(),
        "files": _entries("/proc/self/fd") - 1,  # that of the listing
    }


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
