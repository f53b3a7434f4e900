"""Measures one system on some cores, in this process, from a cold start. `benchmarks.loader` starts it.

Nothing heavy is imported before the process has given up all cores but its own, so every thread that torch
or DALI start sees only those. The order is that of a training script: import, initialise CUDA, build, take
the first batch, finish the first epoch (the warm-up), then measure whole epochs.

What the figures mean:

* Images count when work on the current CUDA stream can use them, so that stream is waited for at both ends.
  Waiting for the whole device would also wait for batches of the next epoch that a loader prepares early.
* A gap is the time between two batches of one epoch, taken from CUDA events on that stream (from the host's
  clock without a GPU). `host_gap_ms` is the host's view: a loader may hand out a batch before the GPU has
  finished it.
* GPU memory is what the device has less free than when CUDA had just been initialised, seen after the first
  batch and between epochs; torch's and DALI's pools do not shrink, so that is the peak.
* CPU time and host memory are those of the process and all its children.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import process
from benchmarks.systems import SYSTEMS, System

if TYPE_CHECKING:
    import torch

VERSIONED = ("torch", "torchvision", "nvidia.dali", "torchdali", "numpy", "kornia")


def measure(system: System, root: Path, batch_size: int, threads: int, seconds: float, warmup: float) -> dict[str, Any]:
    """Every figure of one system.

    Args:
        system: what to measure.
        root: the folder of class folders.
        batch_size: images in a batch.
        threads: what the system is told about threads or workers.
        seconds: how long to measure; a last epoch is finished unless it would take as long again.
        warmup: where to cut the first epoch of a slow system.
    """
    import_s = {name: timed_import(name) for name in system.imports}
    gpu = Gpu()
    figures: dict[str, Any] = {"import_s": import_s, "cuda_init_s": gpu.initialised_s}

    start = time.perf_counter()
    epoch = system.build(root, batch_size, threads)
    figures["construct_s"] = _since(start)
    batches = epoch()
    batch = next(batches)
    gpu.wait()
    figures["first_batch_s"] = _since(start)
    gpu.sample_memory()

    taken, whole = _warm_up(batches, start + warmup)
    gpu.wait()
    figures["first_epoch_images_per_s"] = round(taken * batch_size / (time.perf_counter() - start), 1)
    del batches
    gpu.sample_memory()

    measured, batch = _measure_epochs(epoch, gpu, batch_size, taken if whole else None, seconds)
    figures |= measured
    gpu.sample_memory()
    figures |= process.memory()
    figures["gpu_peak_mib"] = gpu.peak_mib
    figures["allowed_cores"] = process.allowed_cores()
    figures["batch"] = describe(batch, batch_size, system.normalized)
    return figures


def _warm_up(batches: Iterator[Any], until: float) -> tuple[int, bool]:
    """Takes the rest of the first epoch: how many batches it had, and whether it came to its end."""
    taken = 1
    for _ in batches:
        taken += 1
        if time.perf_counter() > until:
            return taken, False
    return taken, True


def _measure_epochs(
    epoch: Any, gpu: "Gpu", batch_size: int, batches_of_epoch: int | None, seconds: float
) -> tuple[dict[str, Any], Any]:
    """Throughput, gaps and CPU time over epochs, from the second on; and the last batch.

    `batches_of_epoch` is None when the first epoch was cut: then the second one's start tells nothing,
    because the loader first has to throw away what it had prepared.
    """
    marks: list[_Marks] = []
    epoch_starts: list[float] = []
    taken, cut, batch = 0, False, None
    cpu_before = process.cpu_seconds()
    start = now = time.perf_counter()
    while not cut and now - start < seconds:
        begun = now
        marks.append(_Marks(gpu))
        for batch in epoch():
            if not marks[-1].host:
                gpu.wait()
                epoch_starts.append(time.perf_counter() - begun)
            if len(batch[0]) != batch_size or len(batch[1]) != batch_size:
                raise RuntimeError(f"a batch of {len(batch[0])} images and {len(batch[1])} labels")
            marks[-1].add()
            taken += 1
            now = time.perf_counter()
            if now - start > seconds and _left(now - begun, len(marks[-1].host), batches_of_epoch) > seconds:
                cut = True
                break
    gpu.wait()
    elapsed = time.perf_counter() - start
    cpu = process.cpu_seconds() - cpu_before
    figures = {
        "images_per_s": round(taken * batch_size / elapsed, 1),
        "images": taken * batch_size,
        "seconds": round(elapsed, 3),
        "epochs": len(marks),
        "ended_mid_epoch": cut,
        "second_epoch_first_batch_s": None if batches_of_epoch is None else round(epoch_starts[0], 4),
        "epoch_start_median_s": round(statistics.median(epoch_starts), 4),
        "gap_ms": summary([gap for mark in marks for gap in mark.gaps()]),
        "host_gap_ms": summary([gap for mark in marks for gap in mark.host_gaps()]),
        "cpu_s_per_1000_images": round(cpu / taken / batch_size * 1000, 3),
        "busy_cores": round(cpu / elapsed, 2),
    }
    return figures, batch


def _left(elapsed: float, done: int, total: int | None) -> float:
    """How long the rest of an epoch of `total` batches will take."""
    return float("inf") if total is None else elapsed / done * (total - done)


class Gpu:
    """The GPU, or nothing where there is none: waiting for it, its memory."""

    def __init__(self) -> None:
        import torch

        start = time.perf_counter()
        self.present = torch.cuda.is_available()
        self.peak_mib: int | None = None
        if self.present:
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
            self._free_before = torch.cuda.mem_get_info()[0]
        self.initialised_s = _since(start) if self.present else None

    def wait(self) -> None:
        """Waits until the current stream has done what was queued."""
        import torch

        if self.present:
            torch.cuda.current_stream().synchronize()

    def sample_memory(self) -> None:
        """Looks at the memory in use."""
        import torch

        if self.present:
            used = round((self._free_before - torch.cuda.mem_get_info()[0]) / 2**20)
            self.peak_mib = max(used, self.peak_mib or 0)

    def event(self) -> "torch.cuda.Event":
        """An event recorded now on the current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Marks:
    """When the batches of one epoch came, by the host's clock and by the GPU's."""

    def __init__(self, gpu: Gpu) -> None:
        self.host: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._gpu = gpu

    def add(self) -> None:
        self.host.append(time.perf_counter())
        if self._gpu.present:
            self._events.append(self._gpu.event())

    def host_gaps(self) -> list[float]:
        """Milliseconds between batches, by the host's clock."""
        return [1000 * (after - before) for before, after in zip(self.host, self.host[1:], strict=False)]

    def gaps(self) -> list[float]:
        """Milliseconds between batches, by the GPU's clock where there is one."""
        if not self._events:
            return self.host_gaps()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) for before, after in pairs]


def summary(gaps: list[float]) -> dict[str, float] | None:
    """The median, the 99th percentile and the largest; None of nothing."""
    if not gaps:
        return None
    ordered = sorted(gaps)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    figures = {"median": statistics.median(ordered), "p99": p99, "max": ordered[-1]}
    return {name: round(value, 3) for name, value in figures.items()}


def describe(batch: Any, batch_size: int, normalized: bool, dtype: "torch.dtype | None" = None) -> dict[str, Any]:
    """What a batch looks like, after checking that this system did the work that all are compared by."""
    import torch

    images, labels = batch
    dtype = dtype or (torch.float32 if normalized else torch.uint8)
    expected = (batch_size, 3, 224, 224) if normalized else (batch_size, 224, 224, 3)
    if tuple(images.shape) != expected or tuple(labels.shape) != (batch_size,):
        raise RuntimeError(f"images of {tuple(images.shape)} and labels of {tuple(labels.shape)}")
    if images.dtype != dtype:
        raise RuntimeError(f"images of {images.dtype}")
    if torch.cuda.is_available() and not (images.is_cuda and labels.is_cuda):
        raise RuntimeError(f"images on {images.device}, labels on {labels.device}")
    values = images.float()
    return {
        "shape": list(images.shape),
        "dtype": str(images.dtype),
        "device": str(images.device),
        "contiguous": images.is_contiguous(),
        "labels": f"{labels.dtype} on {labels.device}, {len(set(labels.tolist()))} different",
        "mean": round(values.mean().item(), 3),
        "std": round(values.std().item(), 3),
    }


def timed_import(name: str) -> float:
    """Imports a module: the seconds that it took."""
    start = time.perf_counter()
    importlib.import_module(name)
    return _since(start)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 4)


def surroundings() -> dict[str, Any]:
    """Versions of what was imported, the GPU's name, and the settings of CUDA and DALI in the environment."""
    import torch

    versions = {name: getattr(sys.modules[name], "__version__", None) for name in VERSIONED if name in sys.modules}
    return {
        "versions": {name: version for name, version in versions.items() if version},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "DALI_", "OMP_"))
        },
    }


def main() -> None:
    """Measures as the command line says and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description="Measures one system; started by benchmarks.loader.")
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--cpus", required=True, help="the cores to run on, separated by commas")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warmup", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {int(cpu) for cpu in args.cpus.split(",")})
    figures = measure(SYSTEMS[args.system], args.root, args.batch_size, args.threads, args.seconds, args.warmup)
    args.result.write_text(json.dumps(figures | surroundings()))


if __name__ == "__main__":
    main()
