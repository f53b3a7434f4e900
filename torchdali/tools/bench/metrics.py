"""Measure what a loader uses: the GPU, the times between batches, CPU time and memory.

CPU time and memory are those of this process and all its descendants, read from Linux's ``/proc`` while they live.
Otherwise loaders that work in child processes would look too cheap.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

_TICKS = os.sysconf("SC_CLK_TCK")


class Gpu:
    """The current CUDA device, if there is one.

    Attributes:
        present: Whether there is one.
        peak_mib: Largest memory in use that was sampled, in MiB, without the CUDA context, or None.
        initialised_s: Seconds that CUDA took to start in this process, or None.
    """

    def __init__(self) -> None:
        start = time.perf_counter()
        self.present = torch.cuda.is_available()
        self.peak_mib: int | None = None
        self.initialised_s: float | None = None
        if self.present:
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
            self._free_before = torch.cuda.mem_get_info()[0]
            self.initialised_s = round(time.perf_counter() - start, 4)

    def wait(self) -> None:
        """Wait until the work queued on the current stream is done."""
        if self.present:
            torch.cuda.current_stream().synchronize()

    def wait_for_all(self) -> None:
        """Wait for the whole device, including batches that a loader prepares."""
        if self.present:
            torch.cuda.synchronize()

    def sample_memory(self) -> None:
        """Update ``peak_mib``."""
        if self.present:
            used = round((self._free_before - torch.cuda.mem_get_info()[0]) / 2**20)
            self.peak_mib = max(used, self.peak_mib or 0)

    def event(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Marks:
    """Times at which the batches of one epoch came, by the host's clock and by the GPU's.

    Attributes:
        host: Seconds by the host's clock, one for each batch.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.host: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._gpu = gpu

    def add(self) -> None:
        """Record that a batch came."""
        self.host.append(time.perf_counter())
        if self._gpu.present:
            self._events.append(self._gpu.event())

    def gaps(self) -> list[float]:
        """Return the milliseconds between batches, by the GPU's clock if there is one."""
        if self._events:
            return [before.elapsed_time(after) for before, after in pairwise(self._events)]
        return [1000 * (after - before) for before, after in pairwise(self.host)]


def summarize(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median, the 99th percentile and the maximum, or None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[round(0.99 * (len(ordered) - 1))]
    figures = {"median": statistics.median(ordered), "p99": p99, "max": ordered[-1]}
    return {name: round(value, 3) for name, value in figures.items()}


def describe_environment(packages: Sequence[str]) -> dict[str, Any]:
    """Return the versions of imported packages, the GPU's name, and environment variables of CUDA, DALI and OpenMP."""
    versions = {name: getattr(sys.modules[name], "__version__", None) for name in packages if name in sys.modules}
    return {
        "versions": {name: version for name, version in versions.items() if version},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "DALI_", "OMP_"))
        },
    }


def cpu_seconds() -> float:
    """Return the user and system time of this process, its living descendants, and the children it waited for."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = usage.ru_utime + usage.ru_stime + waited.ru_utime + waited.ru_stime
    for pid in list_processes()[1:]:
        # utime, stime, cutime, cstime: fields 14 to 17 in proc(5). _stat left out the first two fields.
        total += sum(int(ticks) for ticks in _stat(pid)[11:15]) / _TICKS
    return total


def host_memory() -> dict[str, float]:
    """Return the host memory of the process tree in MiB.

    ``rss_peak_mib`` is the sum of the peaks of all processes, so it counts shared pages several times. ``pss_mib`` is
    what the tree has now, with each shared page counted once.
    """
    peak = sum(_kilobytes(pid, "status", "VmHWM:") for pid in list_processes()) / 1024
    proportional = sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in list_processes()) / 1024
    return {"rss_peak_mib": round(peak), "pss_mib": round(proportional)}


def count_allowed_cores() -> int:
    """Return on how many cores the threads of the tree may run. A system may have removed its own limit."""
    allowed: set[int] = set()
    for pid in list_processes():
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(ProcessLookupError):  # the thread has ended
                allowed |= os.sched_getaffinity(int(task.name))
    return len(allowed)


def cpu_model() -> str:
    """Return the processor's name, or "unknown"."""
    lines = (line for line in _read_lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    return next(lines, ":unknown").partition(":")[2].strip()


def list_processes() -> list[int]:
    """Return the ids of this process, first, and of its living descendants."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    tree = [os.getpid()]
    for pid in tree:
        tree.extend(child for child, parent in parents.items() if parent == pid)
    return tree


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the command's name, or nothing if the process has ended."""
    text = "".join(_read_lines(Path(f"/proc/{pid}/stat")))
    return text.rpartition(")")[2].split()


def _kilobytes(pid: int, file: str, key: str) -> int:
    lines = (line for line in _read_lines(Path(f"/proc/{pid}/{file}")) if line.startswith(key))
    return int(next(lines, "0 0").split()[1])


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # the process has ended, or the kernel does not have this file
        return []
