"""Beside a training step: how fast a loop trains that takes its batches from a loader.

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

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchdali.tools.bench import process
from torchdali.tools.bench.gauges import Gpu, summary
from torchdali.tools.bench.loading import Epoch

__all__ = ["Steps", "Training", "conversion_ms", "endless", "is_enough", "measure", "one_batch", "train"]

_SLOW_STEP = 1.0
"""Seconds of the host in one step that say that something was compiled or tuned."""
_LONGEST = 5
"""How many steps are told singly, the longest ones, for whoever looks for what made them so."""


def measure(
    net: nn.Module,
    epoch: Epoch,
    gpu: Gpu,
    *,
    batch_size: int,
    length: int,
    seconds: float,
    warmup: int,
    settle: float,
    patience: float,
    compiled: bool = False,
) -> tuple[dict[str, Any], Any]:
    """Every figure of a training with one loader, and its last batch.

    Args:
        net: what trains, on the CPU.
        epoch: starts one epoch of the loader.
        gpu: the GPU, where there is one.
        batch_size: images in a batch.
        length: batches in an epoch.
        seconds: how long to measure, rounded to whole epochs.
        warmup: steps before that, from the last slow one on.
        settle: seconds before that, likewise. In the first epoch headers are read, and for some seconds pools grow.
        patience: seconds after which the warm-up ends, however slow the last steps were.
        compiled: whether the model goes through ``torch.compile``.
    """
    training = Training(net, torch.device("cuda" if gpu.present else "cpu"), compiled)
    batches = endless(epoch)

    def warm(steps: Steps) -> bool:
        return steps.elapsed() > patience or (steps.since_slow() >= warmup and steps.settled() >= settle)

    def enough(steps: Steps) -> bool:
        return is_enough(steps.elapsed(), len(steps), length, seconds)

    warm_up = Steps(gpu)
    train(batches, training, warm_up, warm)
    gpu.wait_for_all()
    warmup_s = round(warm_up.elapsed(), 3)
    mib_before = gpu.sample_memory()

    cpu_before = process.cpu_seconds()
    gpu.wait_for_all()
    steps = Steps(gpu)
    batch = train(batches, training, steps, enough)
    gpu.wait_for_all()
    elapsed = steps.elapsed()
    cpu = process.cpu_seconds() - cpu_before

    mib_after = gpu.sample_memory()
    count, loss = len(steps), float(training.loss)
    figures = {
        "images_per_s": round(count * batch_size / elapsed, 1),
        "images": count * batch_size,
        "steps": count,
        "seconds": round(elapsed, 3),
        "epochs": round(count / length, 2),
        "ended_mid_epoch": count % length != 0,
        **steps.figures(len(warm_up), length),
        "busy_cores": round(cpu / elapsed, 2),
        "cpu_s_per_1000_images": round(cpu / count / batch_size * 1000, 3),
        "gpu_peak_mib": gpu.peak_mib,
        "gpu_mib_before_and_after": [mib_before, mib_after],
        "torch_peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if gpu.present else None,
        **process.memory(),
        "allowed_cores": process.allowed_cores(),
        "warmup_s": warmup_s,
        "warmup_steps": len(warm_up),
        "first_step_s": round(warm_up.host_steps()[0], 3),
        "loss": round(loss, 4) if math.isfinite(loss) else str(loss),
        "to_channels_last_ms": conversion_ms(batch[0], gpu),
    }
    return figures, batch


class Training:
    """A model that trains: bfloat16 autocast, channels last, SGD with momentum.

    Attributes:
        loss: that of the last step.
    """

    def __init__(self, net: nn.Module, device: torch.device, compiled: bool = False) -> None:
        net = cast("nn.Module", cast("Any", net).to(device, memory_format=torch.channels_last)).train()
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self._net: Any = torch.compile(net) if compiled else net
        self._device = device
        self.loss = torch.zeros(())

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step, which waits for nothing."""
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = functional.cross_entropy(self._net(images), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


class Steps:
    """When steps began and ended, by the host's clock and by the GPU's; made when measuring starts."""

    def __init__(self, gpu: Gpu) -> None:
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

    def settled(self) -> float:
        """Seconds since the end of the last slow step."""
        return time.perf_counter() - self._host[2 * (len(self) - self.since_slow())]

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
        late = sorted(range(len(both)), key=both.__getitem__, reverse=True)[:_LONGEST]
        return {
            "gap_ms": summary(both),
            "step_ms": summary(steps),
            "wait_ms": summary(waits),
            "waiting_share": round(sum(waits) / sum(both), 4),
            "epoch_start_wait_ms": summary(starts),
            "host_in_loader_ms": summary(in_loader),
            "host_step_ms": summary(host_steps),
            "longest": [
                {
                    "in_epoch": (before + number) % length,
                    "after_s": round(self._host[2 * number] - self._host[0], 3),
                    "ms": round(both[number], 1),
                    "wait_ms": round(waits[number], 1),
                    "host_in_loader_ms": round(in_loader[number], 1),
                    "host_step_ms": round(host_steps[number], 1),
                }
                for number in sorted(late)
            ],
        }


def train(batches: Iterator[Any], training: Training, steps: Steps, enough: Callable[[Steps], bool]) -> Any:
    """Steps until there are enough; the last batch."""
    for images, labels in batches:
        steps.add()
        images = images.to(memory_format=torch.channels_last)
        training.step(images, labels)
        steps.add()
        if enough(steps):
            return images, labels
    raise RuntimeError("the loader ended")


def endless(epoch: Epoch) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from epoch()


def one_batch(images: Tensor, labels: Tensor, length: int) -> Epoch:
    """The same batch again and again, already as the model wants it: what the step can reach at most.

    Args:
        images: float (N, C, H, W), on the device.
        labels: (N,), on the device.
        length: batches in an epoch.
    """
    images = images.to(memory_format=torch.channels_last)

    def epoch() -> Iterator[Any]:
        for _ in range(length):
            yield [images, labels]

    return epoch


def is_enough(elapsed: float, steps: int, length: int, seconds: float) -> bool:
    """Whether `seconds` are over, to the nearest epoch of `length` steps; after twice the time in any case."""
    if elapsed > 2 * seconds:
        return True
    return steps % length == 0 and elapsed + elapsed / steps * length / 2 >= seconds


def conversion_ms(images: Tensor, gpu: Gpu) -> float:
    """Milliseconds of one `images.to(memory_format=torch.channels_last)` of a batch as loaders give it."""
    planes, times = images.contiguous(), 20
    planes.to(memory_format=torch.channels_last)
    gpu.wait_for_all()
    start = time.perf_counter()
    for _ in range(times):
        planes.to(memory_format=torch.channels_last)
    gpu.wait_for_all()
    return round(1000 * (time.perf_counter() - start) / times, 3)
