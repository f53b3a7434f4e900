"""Measure one case of the training benchmark. `torchdali.tools.bench.training` explains the figures."""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.systems.batches import describe, set_queues, surroundings, time_import
from benchmarks.systems.training_systems import MODELS, SYSTEMS, Case, get_lever, make_epochs
from torchdali.tools.bench import subprocesses, training
from torchdali.tools.bench.metrics import Gpu


def measure_case(case: Case, result: Path) -> None:
    """Measure one case in this process, and write the figures to `result` as JSON."""
    system = SYSTEMS[case.system]
    set_queues(system.imports, case.queues)
    import_s = {name: time_import(name) for name in system.imports}

    import torch

    torch.set_num_threads(case.cores)  # torch was imported when the process still had all cores
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    gpu = Gpu()
    if before := get_lever(case).before:
        before()
    with _stream(case, gpu):
        start = time.perf_counter()
        net = MODELS[case.model].make()
        epoch = make_epochs(case)
        build_s = round(time.perf_counter() - start, 3)
        figures, batch = training.measure(
            net,
            epoch,
            gpu,
            batch_size=case.batch_size,
            length=case.length,
            seconds=case.seconds,
            warmup=case.warmup,
            settle=case.settle,
            patience=case.patience,
            compiled=MODELS[case.model].compiled,
        )
    figures["to_channels_last_ms"] = time_conversion(batch[0], gpu)
    dtype = torch.float16 if get_lever(case).half else None
    times: dict[str, Any] = {"import_s": import_s, "cuda_init_s": gpu.initialised_s, "build_s": build_s}
    described = describe(batch, case.batch_size, case.job(0).size, dtype=dtype)
    subprocesses.write_figures({**times, **figures, "batch": described, **surroundings()}, result)
    if not system.exits:
        subprocesses.exit_now(0)


def time_conversion(images: Any, gpu: Gpu) -> float:
    """Return the milliseconds of converting a contiguous batch to ``torch.channels_last``."""
    import torch

    images, times = images.contiguous(), 20
    images.to(memory_format=torch.channels_last)
    gpu.wait_for_all()
    start = time.perf_counter()
    for _ in range(times):
        images.to(memory_format=torch.channels_last)
    gpu.wait_for_all()
    return round(1000 * (time.perf_counter() - start) / times, 3)


def _stream(case: Case, gpu: Gpu) -> AbstractContextManager[Any]:
    import torch

    if not (gpu.present and get_lever(case).high_priority):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(priority=-1))
