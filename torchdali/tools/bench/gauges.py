"""What is read while something runs: the GPU's memory, when batches came, versions."""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

__all__ = ["Gpu", "Marks", "summary", "surroundings", "timed_import"]


class Gpu:
    """The GPU, or nothing where there is none: waiting for it, its memory.

    Attributes:
        present: whether there is one.
        peak_mib: the largest memory in use that was seen, in MiB, without the CUDA context; None without a GPU.
        initialised_s: the seconds that CUDA took to start here; None without a GPU.
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
        """Waits until the current stream has done what was queued."""
        if self.present:
            torch.cuda.current_stream().synchronize()

    def wait_for_all(self) -> None:
        """Waits for the whole device, also for batches that a loader is preparing."""
        if self.present:
            torch.cuda.synchronize()

    def sample_memory(self) -> int | None:
        """Looks at the memory in use; in MiB, without the CUDA context, None without a GPU."""
        if not self.present:
            return None
        used = round((self._free_before - torch.cuda.mem_get_info()[0]) / 2**20)
        self.peak_mib = max(used, self.peak_mib or 0)
        return used

    def event(self) -> torch.cuda.Event:
        """An event recorded now on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Marks:
    """When the batches of one epoch came, by the host's clock and by the GPU's.

    Attributes:
        host: seconds of the host's clock, one for each batch.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.host: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._gpu = gpu

    def add(self) -> None:
        """A batch came."""
        self.host.append(time.perf_counter())
        if self._gpu.present:
            self._events.append(self._gpu.event())

    def host_gaps(self) -> list[float]:
        """Milliseconds between batches, by the host's clock."""
        return [1000 * (after - before) for before, after in pairwise(self.host)]

    def gaps(self) -> list[float]:
        """Milliseconds between batches, by the GPU's clock where there is one."""
        if not self._events:
            return self.host_gaps()
        return [before.elapsed_time(after) for before, after in pairwise(self._events)]


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """The median, the 99th percentile and the largest; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[round(0.99 * (len(ordered) - 1))]
    figures = {"median": statistics.median(ordered), "p99": p99, "max": ordered[-1]}
    return {name: round(value, 3) for name, value in figures.items()}


def timed_import(name: str) -> float:
    """Imports a module: the seconds that it took."""
    start = time.perf_counter()
    importlib.import_module(name)
    return round(time.perf_counter() - start, 4)


def surroundings(versioned: Sequence[str]) -> dict[str, Any]:
    """Versions of what was imported, the GPU's name, and the settings of CUDA and DALI in the environment."""
    versions = {name: getattr(sys.modules[name], "__version__", None) for name in versioned if name in sys.modules}
    return {
        "versions": {name: version for name, version in versions.items() if version},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "DALI_", "OMP_"))
        },
    }
