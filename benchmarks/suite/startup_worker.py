"""Starts one system in this interpreter and says how long each part took; `benchmarks.suite.startup` runs it.

Nothing is imported before its time is taken, so not `torchdali.tools.bench` either, which imports torch.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_LEFT_AFTER = 3
"""Batches."""


def main() -> None:
    """Measures what the first argument says, and writes the figures to the second as JSON."""
    told = json.loads(sys.argv[1])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: told["cores"]])
    from benchmarks.systems.loader_systems import LOADER

    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before its time was taken")
    system = LOADER[told["system"]]
    begun = time.perf_counter()
    import_s = {name: _timed(importlib.import_module, name) for name in system.imports}
    figures: dict[str, Any] = {"import_s": import_s, "imports_s": _since(begun), "batch_size": told["batch_size"]}

    from benchmarks.systems.systems import Job

    figures["cuda_init_s"], free = _start_cuda()
    job = Job(Path(told["root"]), told["batch_size"], told["threads"], told["data"])
    start = time.perf_counter()
    epoch = system.build(job)
    figures["construct_s"] = _since(start)
    start = time.perf_counter()
    batches = epoch()
    next(batches)
    _wait()
    figures["next_s"] = _since(start)
    figures["first_batch_s"] = round(figures["construct_s"] + figures["next_s"], 4)
    figures["in_all_s"] = _since(begun)
    environment = dict(os.environ)  # what is imported now would change it
    _rest(figures, batches, free, told["warmup"])
    os.environ.pop(told["variable"], None)
    os.environ.update(environment)
    _write(figures)
    del batches
    if not figures["ended_mid_epoch"]:
        figures["second_epoch_first_batch_s"] = _first(epoch, _LEFT_AFTER)
        _write(figures)
        figures["after_break_first_batch_s"] = _first(epoch, 1)
        _write(figures)
    if not system.exits:
        os._exit(0)


def _write(figures: dict[str, Any]) -> None:
    from benchmarks.systems.batches import surroundings
    from torchdali.tools.bench import subprocesses

    subprocesses.write_figures(figures | surroundings(), Path(sys.argv[2]))


def _rest(figures: dict[str, Any], batches: Any, free: int, warmup: float) -> None:
    """The rest of the first epoch."""
    # only now: they import torchdali, which other systems do not
    from torchdali.tools.bench import metrics
    from torchdali.tools.bench.metrics import Gpu, Marks, summarize

    gpu, batch_size = Gpu(), figures["batch_size"]
    cpu, start, cut = metrics.cpu_seconds(), time.perf_counter(), False
    marks = Marks(gpu)
    for _ in batches:
        marks.add()
        if time.perf_counter() - start > warmup:
            cut = True
            break
    gpu.wait()
    elapsed, cpu = time.perf_counter() - start, metrics.cpu_seconds() - cpu
    images = len(marks.host) * batch_size
    figures |= {
        "images_per_s": round(images / elapsed, 1),
        "ended_mid_epoch": cut,
        "gap_ms": summarize(marks.gaps()),
        "cpu_s_per_1000_images": round(cpu / images * 1000, 3) if images else None,
        "busy_cores": round(cpu / elapsed, 2),
        "gpu_peak_mib": round((free - _free()) / 2**20) if gpu.present else None,
        **metrics.host_memory(),
        "allowed_cores": metrics.count_allowed_cores(),
    }


def _first(epoch: Any, count: int) -> float:
    """Seconds until the first batch of an epoch, of which `count` batches are taken."""
    start = time.perf_counter()
    batches = epoch()
    next(batches)
    _wait()
    seconds = _since(start)
    for _ in range(count - 1):
        next(batches, None)
    return seconds


def _start_cuda() -> tuple[float | None, int]:
    """Seconds until a kernel has run, and the free memory in bytes; None and 0 without a GPU."""
    import torch

    start = time.perf_counter()
    if not torch.cuda.is_available():
        return None, 0
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return _since(start), _free()


def _free() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _timed(work: Any, argument: Any) -> float:
    start = time.perf_counter()
    work(argument)
    return _since(start)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 4)


if __name__ == "__main__":
    main()
