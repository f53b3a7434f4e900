"""Measure a loader alone, without a consumer of its batches.

Build the loader, take the first batch, finish the first epoch (the warm-up), then measure whole epochs. If the first
epoch takes long, the rest of it is measured: a new epoch would discard what worker processes have prepared.

* Images count when the current CUDA stream can use them, so the code waits for that stream at both ends. It does not
  wait for the whole device, because a loader may prepare the next epoch's batches.
* A gap is the time between two batches of one epoch, from CUDA events on that stream, or by the host's clock.
* GPU memory is what the device has less free than just after CUDA was initialised. It is sampled after the first batch
  and between epochs. The memory pools of torch and DALI do not shrink, so this is the peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torchdali.tools.bench.metrics import Gpu, Marks, count_allowed_cores, cpu_seconds, host_memory, summarize

Epoch = Callable[[], Iterator[Any]]
"""Function that starts an epoch, and returns an iterator of ``[images, labels]``."""


def measure(
    build: Callable[[], Epoch],
    gpu: Gpu,
    batch_size: int,
    seconds: float,
    warmup: float,
    before_epoch: Callable[[], None] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Return the figures of one loader, and its last batch.

    Args:
        build: Function that makes the loader.
        gpu: The GPU.
        batch_size: Number of images that every batch must have.
        seconds: How long to measure. The last epoch is finished unless that would take as long again. If the warm-up
            was cut, the time is doubled, because the batches of worker processes come in bursts.
        warmup: Seconds after which the warm-up ends within the first epoch.
        before_epoch: Function called before each epoch. Its time is not counted.
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

    count, ended = _warm_up(batches, start + warmup)
    gpu.wait()
    figures["first_epoch_images_per_s"] = round(count * batch_size / (time.perf_counter() - start), 1)
    gpu.sample_memory()

    if ended:
        del batches
        measured, batch = _measure_epochs(epoch, gpu, batch_size, count, seconds, before_epoch)
    else:
        measured, batch = _measure_epochs(epoch, gpu, batch_size, None, 2 * seconds, before_epoch, batches)
    gpu.sample_memory()
    figures |= {**measured, **host_memory(), "gpu_peak_mib": gpu.peak_mib, "allowed_cores": count_allowed_cores()}
    return figures, batch


def _warm_up(batches: Iterator[Any], until: float) -> tuple[int, bool]:
    """Take the rest of the first epoch. Return the number of its batches, and whether it ended."""
    count = 1
    for _ in batches:
        count += 1
        if time.perf_counter() > until:
            return count, False
    return count, True


def _measure_epochs(
    epoch: Epoch,
    gpu: Gpu,
    batch_size: int,
    epoch_length: int | None,
    seconds: float,
    before_epoch: Callable[[], None] | None,
    unfinished: Iterator[Any] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Measure the rest of an ``unfinished`` epoch, or new epochs. ``epoch_length`` is None if no epoch has ended."""
    marks: list[Marks] = []
    first_batch_s: float | None = None
    count, cut, batch = 0, False, None
    cpu_before = cpu_seconds()
    start = now = time.perf_counter()
    excluded = excluded_cpu = 0.0
    while not cut and now - start - excluded < seconds:
        running, unfinished = unfinished, None
        if before_epoch and running is None:
            cpu, begin = cpu_seconds(), time.perf_counter()
            before_epoch()
            excluded += time.perf_counter() - begin
            excluded_cpu += cpu_seconds() - cpu
            now = time.perf_counter()
        begin = now
        mark = Marks(gpu)
        marks.append(mark)
        for batch in running or epoch():
            if not mark.host and running is None:
                gpu.wait()
                first_batch_s = first_batch_s or round(time.perf_counter() - begin, 4)
            if len(batch[0]) != batch_size or len(batch[1]) != batch_size:
                raise RuntimeError(
                    f"a batch must have {batch_size} images, got {len(batch[0])}, {len(batch[1])} labels"
                )
            mark.add()
            count += 1
            now = time.perf_counter()
            over = now - start - excluded > seconds
            if over and _estimate_remaining_seconds(now - begin, len(mark.host), epoch_length) > seconds:
                cut = True
                break
        if not mark.host and running is None:
            raise RuntimeError("an epoch has no batch")
    gpu.wait()
    elapsed = time.perf_counter() - start - excluded
    cpu = cpu_seconds() - cpu_before - excluded_cpu
    figures = {
        "images_per_s": round(count * batch_size / elapsed, 1),
        "images": count * batch_size,
        "seconds": round(elapsed, 3),
        "epochs": len(marks),
        "ended_mid_epoch": cut,
        "second_epoch_first_batch_s": None if epoch_length is None else first_batch_s,
        "gap_ms": summarize([gap for mark in marks for gap in mark.gaps()]),
        "cpu_s_per_1000_images": round(cpu / count / batch_size * 1000, 3),
        "busy_cores": round(cpu / elapsed, 2),
    }
    return figures, batch


def _estimate_remaining_seconds(elapsed: float, done: int, total: int | None) -> float:
    """Estimate how long the rest of an epoch of ``total`` batches takes."""
    return float("inf") if total is None else elapsed / done * (total - done)
