"""Loading alone: what a loader gives when nobody uses the batches.

The order is that of a training script: build, take the first batch, finish the first epoch (the warm-up), then
measure whole epochs. Where the first epoch takes long, what follows is measured of the same epoch: another one would
begin with throwing away what worker processes have prepared.

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

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchdali.tools.bench import process
from torchdali.tools.bench.gauges import Gpu, Marks, summary

__all__ = ["Epoch", "measure"]

Epoch = Callable[[], Iterator[Any]]
"""Starts one epoch, an iterator of ``[images, labels]``."""


def measure(
    build: Callable[[], Epoch],
    gpu: Gpu,
    batch_size: int,
    seconds: float,
    warmup: float,
    before_epoch: Callable[[], None] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Every figure of one loader, and its last batch.

    Args:
        build: makes the loader.
        gpu: the GPU, where there is one.
        batch_size: images in a batch; every batch must have as many.
        seconds: how long to measure; a last epoch is finished unless it would take as long again. Twice as long where
            the warm-up was cut, since batches of worker processes come in bursts.
        warmup: seconds after which the warm-up of a slow loader ends within the first epoch.
        before_epoch: called before each epoch; its time is left out.
    """
    figures: dict[str, Any] = {"cuda_init_s": gpu.initialised_s}
    if before_epoch:
        before_epoch()
    start = time.perf_counter()
    epoch = build()
    figures["construct_s"] = round(time.perf_counter() - start, 4)
    batches = epoch()
    batch = next(batches)
    gpu.wait()
    figures["first_batch_s"] = round(time.perf_counter() - start, 4)
    gpu.sample_memory()

    taken, whole = _warm_up(batches, start + warmup)
    gpu.wait()
    figures["first_epoch_images_per_s"] = round(taken * batch_size / (time.perf_counter() - start), 1)
    gpu.sample_memory()

    if whole:
        del batches
        measured, batch = _measure_epochs(epoch, gpu, batch_size, taken, seconds, before_epoch)
    else:
        measured, batch = _measure_epochs(epoch, gpu, batch_size, None, 2 * seconds, before_epoch, batches)
    figures |= measured
    gpu.sample_memory()
    figures |= process.memory()
    figures["gpu_peak_mib"] = gpu.peak_mib
    figures["allowed_cores"] = process.allowed_cores()
    return figures, batch


def _warm_up(batches: Iterator[Any], until: float) -> tuple[int, bool]:
    """Takes the rest of the first epoch: how many batches it had, and whether it came to its end."""
    taken = 1
    for _ in batches:
        taken += 1
        if time.perf_counter() > until:
            return taken, False
    return taken, True


def _measure_epochs(
    epoch: Epoch,
    gpu: Gpu,
    batch_size: int,
    batches_of_epoch: int | None,
    seconds: float,
    before_epoch: Callable[[], None] | None,
    going_on: Iterator[Any] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Throughput, gaps and CPU time over epochs, from the second on, or from where `going_on` is; and the last batch.

    `batches_of_epoch` is None where nobody knows, because no epoch has come to its end.
    """
    marks: list[Marks] = []
    epoch_starts: list[float] = []
    taken, cut, batch = 0, False, None
    cpu_before = process.cpu_seconds()
    start = now = time.perf_counter()
    aside = aside_cpu = 0.0
    while not cut and now - start - aside < seconds:
        running, going_on = going_on, None
        if before_epoch and running is None:
            cpu, begun = process.cpu_seconds(), time.perf_counter()
            before_epoch()
            aside += time.perf_counter() - begun
            aside_cpu += process.cpu_seconds() - cpu
            now = time.perf_counter()
        begun = now
        mark = Marks(gpu)
        marks.append(mark)
        for batch in running or epoch():
            if not mark.host and running is None:
                gpu.wait()
                epoch_starts.append(time.perf_counter() - begun)
            if len(batch[0]) != batch_size or len(batch[1]) != batch_size:
                raise RuntimeError(f"a batch of {len(batch[0])} images and {len(batch[1])} labels")
            mark.add()
            taken += 1
            now = time.perf_counter()
            over = now - start - aside > seconds
            if over and _left(now - begun, len(mark.host), batches_of_epoch) > seconds:
                cut = True
                break
        if not mark.host and running is None:
            raise RuntimeError("an epoch without a batch")
    gpu.wait()
    elapsed = time.perf_counter() - start - aside
    cpu = process.cpu_seconds() - cpu_before - aside_cpu
    figures = {
        "images_per_s": round(taken * batch_size / elapsed, 1),
        "images": taken * batch_size,
        "seconds": round(elapsed, 3),
        "epochs": len(marks),
        "ended_mid_epoch": cut,
        "second_epoch_first_batch_s": None if batches_of_epoch is None else round(epoch_starts[0], 4),
        "epoch_start_median_s": round(statistics.median(epoch_starts), 4) if epoch_starts else None,
        "gap_ms": summary([gap for mark in marks for gap in mark.gaps()]),
        "host_gap_ms": summary([gap for mark in marks for gap in mark.host_gaps()]),
        "cpu_s_per_1000_images": round(cpu / taken / batch_size * 1000, 3),
        "busy_cores": round(cpu / elapsed, 2),
    }
    return figures, batch


def _left(elapsed: float, done: int, total: int | None) -> float:
    """How long the rest of an epoch of `total` batches will take."""
    return float("inf") if total is None else elapsed / done * (total - done)
