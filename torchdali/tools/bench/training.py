"""Measure how fast a loop trains with a loader's batches.

The loop is the usual one, and nothing in it waits for the GPU. Measuring adds two CUDA events and two readings of the
host's clock to each step.

* Images/s are by the host's clock. The code waits for the device at both ends. Measuring starts and ends at the same
  position of an epoch, unless an epoch takes long, so the start of every epoch counts.
* ``gap_ms`` is the time from the end of one step to the end of the next, by the GPU's clock if there is one. It is the
  sum of ``wait_ms``, until the next batch is ready on the training's stream, and of ``step_ms``. A loader may cost
  either: the stream waits, or the step is slower because the loader uses the same GPU.
* ``host_in_loader_ms`` is the time that the host spent in the loader's ``next``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchdali.tools.bench.loading import Epoch
from torchdali.tools.bench.metrics import Gpu, count_allowed_cores, cpu_seconds, host_memory, summarize

_SLOW_STEP = 1.0
"""Seconds of the host in one step that show that something was compiled or tuned."""


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
    """Return the figures of a training with one loader, and its last batch.

    Args:
        net: The model, on the CPU.
        epoch: Function that starts an epoch of the loader.
        gpu: The GPU.
        batch_size: Number of images in a batch.
        length: Number of batches in an epoch.
        seconds: How long to measure, rounded to whole epochs.
        warmup: Number of steps in the warm-up, counted from the last slow step.
        settle: Seconds of the warm-up, counted from the last slow step. In the first epoch headers are read, and memory
            pools grow for some seconds.
        patience: Seconds after which the warm-up ends even if the last steps were slow.
        compiled: Whether to compile the model with ``torch.compile``.
    """
    training = Training(net, torch.device("cuda" if gpu.present else "cpu"), compiled)
    batches = repeat_epochs(epoch)

    def is_warm(steps: Steps) -> bool:
        return steps.elapsed() > patience or (
            steps.count_since_slow() >= warmup and steps.seconds_since_slow() >= settle
        )

    warm_up = Steps(gpu)
    train(batches, training, warm_up, is_warm)
    gpu.wait_for_all()
    warmup_s = round(warm_up.elapsed(), 3)
    gpu.sample_memory()

    cpu_before = cpu_seconds()
    gpu.wait_for_all()
    steps = Steps(gpu)
    batch = train(batches, training, steps, lambda steps: has_enough(steps.elapsed(), len(steps), length, seconds))
    gpu.wait_for_all()
    elapsed = steps.elapsed()
    cpu = cpu_seconds() - cpu_before

    gpu.sample_memory()
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
        "torch_peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if gpu.present else None,
        **host_memory(),
        "allowed_cores": count_allowed_cores(),
        "warmup_s": warmup_s,
        "warmup_steps": len(warm_up),
        "first_step_s": round(warm_up.host_seconds()[0], 3),
        "loss": round(loss, 4) if math.isfinite(loss) else str(loss),
    }
    return figures, batch


class Training:
    """A model and its optimizer: bfloat16 autocast, channels last, SGD with momentum.

    Attributes:
        loss: Loss of the last step.
    """

    def __init__(self, net: nn.Module, device: torch.device, compiled: bool = False) -> None:
        net = cast("nn.Module", cast("Any", net).to(device, memory_format=torch.channels_last)).train()
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self._net: Any = torch.compile(net) if compiled else net
        self._device = device
        self.loss = torch.zeros(())

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Queue one step, without waiting."""
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = functional.cross_entropy(self._net(images), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


class Steps:
    """Times at which steps began and ended, by the host's clock and by the GPU's. Measuring starts with the object."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._host: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.add()

    def __len__(self) -> int:
        return (len(self._host) - 1) // 2

    def add(self) -> None:
        """Record that a step begins or, at every other call, that it ended."""
        self._host.append(time.perf_counter())
        if self._gpu.present:
            self._events.append(self._gpu.event())

    def elapsed(self) -> float:
        """Return the seconds since measuring started."""
        return time.perf_counter() - self._host[0]

    def host_seconds(self) -> list[float]:
        """Return the seconds that the host spent in each step."""
        return [end - begin for begin, end in zip(self._host[1::2], self._host[2::2], strict=True)]

    def count_since_slow(self) -> int:
        """Return the number of steps after the last slow one."""
        steps = self.host_seconds()
        return next((count for count, seconds in enumerate(reversed(steps)) if seconds > _SLOW_STEP), len(steps))

    def seconds_since_slow(self) -> float:
        """Return the seconds since the last slow step ended."""
        return time.perf_counter() - self._host[2 * (len(self) - self.count_since_slow())]

    def figures(self, before: int, length: int) -> dict[str, Any]:
        """Summarize the steps, after ``before`` earlier ones, in epochs of ``length`` steps."""
        in_loader = [1000 * (begin - end) for end, begin in zip(self._host[0::2], self._host[1::2], strict=False)]
        host_steps = [1000 * seconds for seconds in self.host_seconds()]
        waits, steps = in_loader, host_steps
        if self._events:
            ends, begins = self._events[0::2], self._events[1::2]
            waits = [end.elapsed_time(begin) for end, begin in zip(ends, begins, strict=False)]
            steps = [begin.elapsed_time(end) for begin, end in zip(begins, ends[1:], strict=True)]
        both = [step + wait for step, wait in zip(steps, waits, strict=True)]
        return {
            "gap_ms": summarize(both),
            "step_ms": summarize(steps),
            "wait_ms": summarize(waits),
            "waiting_share": round(sum(waits) / sum(both), 4),
            "epoch_start_wait_ms": summarize([wait for i, wait in enumerate(waits, before) if i % length == 0]),
            "host_in_loader_ms": summarize(in_loader),
            "host_step_ms": summarize(host_steps),
        }


def train(batches: Iterator[Any], training: Training, steps: Steps, is_done: Callable[[Steps], bool]) -> Any:
    """Train until ``is_done``, and return the last batch."""
    for images, labels in batches:
        steps.add()
        images = images.to(memory_format=torch.channels_last)
        training.step(images, labels)
        steps.add()
        if is_done(steps):
            return images, labels
    raise RuntimeError("the loader ended")


def repeat_epochs(epoch: Epoch) -> Iterator[Any]:
    """Yield the batches of epoch after epoch, without end."""
    while True:
        yield from epoch()


def repeat_batch(images: Tensor, labels: Tensor, length: int) -> Epoch:
    """Return epochs of the same batch, for the fastest that the step can be.

    Args:
        images: Float ``(N, C, H, W)``, on the device.
        labels: ``(N,)``, on the device.
        length: Number of batches in an epoch.
    """
    images = images.to(memory_format=torch.channels_last)
    return lambda: iter([[images, labels]] * length)


def has_enough(elapsed: float, steps: int, length: int, seconds: float) -> bool:
    """Return True at the end of the epoch nearest to ``seconds``, or if twice the time is over."""
    if elapsed > 2 * seconds:
        return True
    return steps % length == 0 and elapsed + elapsed / steps * length / 2 >= seconds
