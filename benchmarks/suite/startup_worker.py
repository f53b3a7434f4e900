"""Start one system in this interpreter, and measure how long each part takes. `benchmarks.suite.startup` runs it.

No module may be imported before its import is timed. So `torchdali.tools.bench`, which imports torch, comes later.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_BREAK_AFTER = 3
"""Number of batches after which an epoch is left."""


def main() -> None:
    """Measure with the options in the first argument, and write the figures to the file in the second, as JSON."""
    options = json.loads(sys.argv[1])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options["cores"]])
    from benchmarks.systems.loader_systems import LOADER

    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before its time was taken")
    system = LOADER[options["system"]]
    begin = time.perf_counter()
    import_s = {name: _time_call(importlib.import_module, name) for name in system.imports}
    figures: dict[str, Any] = {
        "import_s": import_s,
        "imports_s": _seconds_since(begin),
        "batch_size": options["batch_size"],
    }

    from benchmarks.systems.systems import Job

    figures["cuda_init_s"], free = _start_cuda()
    job = Job(Path(options["root"]), options["batch_size"], options["threads"], options["data"])
    start = time.perf_counter()
    epoch = system.build(job)
    figures["construct_s"] = _seconds_since(start)
    start = time.perf_counter()
    batches = epoch()
    next(batches)
    _wait()
    figures["next_s"] = _seconds_since(start)
    figures["first_batch_s"] = round(figures["construct_s"] + figures["next_s"], 4)
    figures["in_all_s"] = _seconds_since(begin)
    environment = dict(os.environ)  # imports below change it
    _measure_rest(figures, batches, free, options["warmup"])
    os.environ.pop(options["variable"], None)
    os.environ.update(environment)
    _write(figures)
    del batches
    if not figures["ended_mid_epoch"]:
        figures["second_epoch_first_batch_s"] = _time_first_batch(epoch, _BREAK_AFTER)
        _write(figures)
        figures["after_break_first_batch_s"] = _time_first_batch(epoch, 1)
        _write(figures)
    if not system.exits:
        os._exit(0)


def _write(figures: dict[str, Any]) -> None:
    from benchmarks.systems.batches import surroundings
    from torchdali.tools.bench import subprocesses

    subprocesses.write_figures(figures | surroundings(), Path(sys.argv[2]))


def _measure_rest(figures: dict[str, Any], batches: Any, free: int, warmup: float) -> None:
    """Measure the rest of the first epoch."""
    # Imported here, because they import torchdali, which other systems do not.
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


def _time_first_batch(epoch: Any, count: int) -> float:
    """Return the seconds to the first batch of an epoch. Take `count` batches of it."""
    start = time.perf_counter()
    batches = epoch()
    next(batches)
    _wait()
    seconds = _seconds_since(start)
    for _ in range(count - 1):
        next(batches, None)
    return seconds


def _start_cuda() -> tuple[float | None, int]:
    """Return the seconds until a kernel has run and the free memory in bytes, or None and 0 without a GPU."""
    import torch

    start = time.perf_counter()
    if not torch.cuda.is_available():
        return None, 0
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return _seconds_since(start), _free()


def _free() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _time_call(work: Any, argument: Any) -> float:
    start = time.perf_counter()
    work(argument)
    return _seconds_since(start)


def _seconds_since(start: float) -> float:
    return round(time.perf_counter() - start, 4)


if __name__ == "__main__":
    main()
