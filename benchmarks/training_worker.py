"""Measures one case of the training benchmark, in a process of its own that `benchmarks.training` starts.

The loop is what a user writes. Nothing in it waits for the GPU: what it adds are two CUDA events and two readings of
the host's clock for each step.

What the figures mean:

* Images/s are by the host's clock, with the device waited for at both ends. Measuring starts and ends at the same
  place of an epoch, so every epoch's start counts in full, and only where an epoch takes long is it cut.
* *step to step* is the GPU's time from one step's end to the next one's. It is the sum of *wait*, until the next batch
  can be read on the training's stream, and *step*. Loading costs either: it makes the stream wait, or it slows the step
  by using the same GPU. On the CPU, the host's clock takes the place of events.
* *host in loader* is how long the host was in the loader's `next`.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import children, measure, process
from benchmarks.training_systems import MODELS, SYSTEMS, Case, Epoch, Model, epochs_of, lever_of

if TYPE_CHECKING:
    import torch

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_SLOW_STEP = 1.0
"""Seconds of the host in one step that say that something was compiled or tuned."""


def measure_case(case: Case, result: Path) -> None:
    """Measures one case in this process and writes the figures to `result` as JSON."""
    os.environ.pop(VARIABLE, None)
    if case.queues is not None:
        os.environ[VARIABLE] = str(case.queues)
    import_s = {name: measure.timed_import(name) for name in SYSTEMS[case.system].imports}

    import torch

    torch.set_num_threads(case.cores)  # it was imported before the process had given up the other cores
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    gpu = measure.Gpu()
    figures: dict[str, Any] = {"import_s": import_s, "cuda_init_s": gpu.initialised_s}
    with _stream(case, gpu):
        figures |= _measure(case, gpu)
    children.write(figures | measure.surroundings(), result)


def _stream(case: Case, gpu: measure.Gpu) -> AbstractContextManager[Any]:
    import torch

    if not (gpu.present and lever_of(case).high_priority):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(priority=-1))


def _measure(case: Case, gpu: measure.Gpu) -> dict[str, Any]:
    import torch

    start = time.perf_counter()
    training = Training(MODELS[case.model], torch.device("cuda" if gpu.present else "cpu"))
    batches = endless(epochs_of(case))
    build_s = round(time.perf_counter() - start, 3)

    def warm(marks: Marks) -> bool:
        return marks.elapsed() > case.patience or marks.since_slow() >= case.warmup

    def enough(marks: Marks) -> bool:
        return is_enough(marks.elapsed(), len(marks), case.length, case.seconds)

    warm_up = Marks(gpu)
    train(batches, training, warm_up, warm)
    wait(gpu)
    warmup_s = round(warm_up.elapsed(), 3)
    gpu.sample_memory()

    cpu_before = process.cpu_seconds()
    wait(gpu)
    marks = Marks(gpu)
    images, labels = train(batches, training, marks, enough)
    wait(gpu)
    elapsed = marks.elapsed()
    cpu = process.cpu_seconds() - cpu_before

    gpu.sample_memory()
    steps = len(marks)
    loss = float(training.loss)
    return {
        "images_per_s": round(steps * case.batch_size / elapsed, 1),
        "images": steps * case.batch_size,
        "steps": steps,
        "seconds": round(elapsed, 3),
        "epochs": round(steps / case.length, 2),
        "ended_mid_epoch": steps % case.length != 0,
        **marks.figures(len(warm_up), case.length),
        "busy_cores": round(cpu / elapsed, 2),
        "cpu_s_per_1000_images": round(cpu / steps / case.batch_size * 1000, 3),
        "gpu_peak_mib": gpu.peak_mib,
        "torch_peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if gpu.present else None,
        **process.memory(),
        "allowed_cores": process.allowed_cores(),
        "build_s": build_s,
        "warmup_s": warmup_s,
        "warmup_steps": len(warm_up),
        "first_step_s": round(warm_up.host_steps()[0], 3),
        "loss": round(loss, 4) if math.isfinite(loss) else str(loss),
        "batch": measure.describe(
            [images, labels], case.batch_size, True, torch.float16 if lever_of(case).half else None
        ),
        "to_channels_last_ms": conversion_ms(images, gpu),
    }


class Training:
    """A model that trains: bfloat16 autocast, channels last, SGD with momentum."""

    def __init__(self, model: Model, device: "torch.device") -> None:
        import torch

        net = model.make().to(device, memory_format=torch.channels_last).train()
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self._net: Any = torch.compile(net) if model.compiled else net
        self._device = device
        self.loss = torch.zeros(())

    def step(self, images: "torch.Tensor", labels: "torch.Tensor") -> None:
        """One step, which waits for nothing."""
        import torch
        from torch.nn import functional

        with torch.autocast(self._device.type, torch.bfloat16):
            loss = functional.cross_entropy(self._net(images), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


class Marks:
    """When steps began and ended, by the host's clock and by the GPU's; made when measuring starts."""

    def __init__(self, gpu: measure.Gpu) -> None:
        self._gpu = gpu
        self._host: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.add()

    def __len__(self) -> int:
        return (len(self._host) - 1) // 2

    def add(self) -> None:
        """Now a step begins or ends, in turns."""
        self._host.append(time.perf_counter())
        if self._gpu.present:
            self._events.append(self._gpu.event())

    def elapsed(self) -> float:
        """Seconds since measuring started."""
        return time.perf_counter() - self._host[0]

    def host_steps(self) -> list[float]:
        """Seconds that the host spent in each step."""
        return [end - begin for begin, end in zip(self._host[1::2], self._host[2::2], strict=True)]

    def since_slow(self) -> int:
        """How many steps there were since the last slow one."""
        steps = self.host_steps()
        return next((count for count, seconds in enumerate(reversed(steps)) if seconds > _SLOW_STEP), len(steps))

    def figures(self, before: int, length: int) -> dict[str, Any]:
        """Milliseconds of steps, waits and of both together; `before` steps were done earlier, `length` an epoch."""
        in_loader = [1000 * (begin - end) for end, begin in zip(self._host[0::2], self._host[1::2], strict=False)]
        steps = [1000 * seconds for seconds in self.host_steps()]
        waits, host_steps = in_loader, steps
        if self._events:
            ends, begins = self._events[0::2], self._events[1::2]
            waits = [end.elapsed_time(begin) for end, begin in zip(ends, begins, strict=False)]
            steps = [begin.elapsed_time(end) for begin, end in zip(begins, ends[1:], strict=True)]
        both = [step + waited for step, waited in zip(steps, waits, strict=True)]
        starts = [waited for number, waited in enumerate(waits, before) if number % length == 0]
        return {
            "gap_ms": measure.summary(both),
            "step_ms": measure.summary(steps),
            "wait_ms": measure.summary(waits),
            "waiting_share": round(sum(waits) / sum(both), 4),
            "epoch_start_wait_ms": measure.summary(starts),
            "host_in_loader_ms": measure.summary(in_loader),
            "host_step_ms": measure.summary(host_steps),
        }


def train(batches: Iterator[Any], training: Training, marks: Marks, enough: Callable[[Marks], bool]) -> tuple[Any, Any]:
    """Steps until there are enough; the last batch."""
    import torch

    for images, labels in batches:
        marks.add()
        images = images.to(memory_format=torch.channels_last)
        training.step(images, labels)
        marks.add()
        if enough(marks):
            return images, labels
    raise RuntimeError("the loader ended")


def endless(epoch: Epoch) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from epoch()


def is_enough(elapsed: float, steps: int, length: int, seconds: float) -> bool:
    """Whether `seconds` are over, to the nearest epoch of `length` steps; after twice the time in any case."""
    if elapsed > 2 * seconds:
        return True
    return steps % length == 0 and elapsed + elapsed / steps * length / 2 >= seconds


def wait(gpu: measure.Gpu) -> None:
    """Waits for the whole device, also for batches that a loader is preparing."""
    import torch

    if gpu.present:
        torch.cuda.synchronize()


def conversion_ms(images: "torch.Tensor", gpu: measure.Gpu, times: int = 20) -> float:
    """Milliseconds of one `images.to(memory_format=torch.channels_last)` of a batch as loaders give it."""
    import torch

    planes = images.contiguous()
    planes.to(memory_format=torch.channels_last)
    wait(gpu)
    start = time.perf_counter()
    for _ in range(times):
        planes.to(memory_format=torch.channels_last)
    wait(gpu)
    return round(1000 * (time.perf_counter() - start) / times, 3)
