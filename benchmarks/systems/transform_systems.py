"""One transform in one system: images per second. `benchmarks.studies.transform_worker` calls this in its processes.

All systems are given the same photographs, decoded. What is counted is the host's clock from an idle GPU until
the GPU has made the last image. Each cell is warmed up first, so that nothing is compiled or allocated meanwhile.

Modules are imported where they are used: the process of the DataLoader must not start CUDA or DALI, and the one
that starts the others needs neither.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.systems.transform_inputs import Inputs
from benchmarks.systems.transform_rows import Row

WINDOW = 4
# A worker's batch takes about this long; 256 images of a slow transform would keep 16 workers for minutes.
_WORKER_BATCH_S = 0.1
_SMALLEST_WORKER_BATCH = 8

Figures = dict[str, Any]


def torchdali(row: Row, inputs: Inputs, seconds: float) -> Figures:
    """The loader's engine on pixels that are on the device, several batches in flight.

    Counted are the drawing of the parameters, the change to the layout that DALI works on, and back. `alone` has
    one batch in flight and waits for it, as a call of ``torchdali.compile(...)`` followed by work on the result.
    """
    import numpy as np

    from torchdali.pipeline import graph
    from torchdali.pipeline.compile import compile_plan, fuse
    from torchdali.pipeline.engine import PipelineRunner
    from torchdali.runtime import machine
    from torchdali.transforms.rng import Draws, epoch_key
    from torchdali.transforms.spec import InputKind, Spec

    gpu = inputs.device == "cuda"
    images = inputs.of(row, inputs.device)
    count = len(images)
    plan = compile_plan(
        row.torchvision(), graph.resolve(inputs.device), "exact", Spec("tensor", images.dtype), InputKind.PIXELS
    )
    if left := [step.note for step in plan.steps if step.where == "torch"]:
        return {"status": "torch", "reason": left[0]}
    if plan.tail:
        return {"status": "torch", "reason": "on whole batches"}
    plan = fuse(plan)
    index, size = np.arange(count), np.tile(np.array(inputs.size, np.int64), (count, 1))
    key = epoch_key(0, 0)
    pixels = images.permute(0, 2, 3, 1)
    flying: deque[Any] = deque()
    turns = iter(range(1 << 30))

    def draw() -> Any:
        return plan.draw(Draws(key, index, np.full(count, next(turns), np.int64)), size)[0]

    def submit() -> None:
        feed: Any = pixels.contiguous()
        # the pipeline reads it where it is, so it is kept until the run has been taken
        flying.append(feed if gpu else feed.numpy())
        engine.submit(flying[-1], draw())

    def take() -> None:
        engine.take()
        flying.popleft()

    def land() -> None:
        while flying:
            take()

    def alone() -> None:
        submit()
        take()
        wait(gpu)

    start = time.perf_counter()
    engine = PipelineRunner(plan, count, machine.available_cores(), gpu)
    try:
        alone()
        figures: Figures = {"first_s": round(time.perf_counter() - start, 3)}
        turn = _windowed(submit, take, flying, gpu)
        _rate(turn, gpu, seconds / 4, last=land)
        figures |= _rate(turn, gpu, seconds, count, last=land)
        figures["alone_images_per_s"] = _rate(alone, gpu, seconds / 2, count)["images_per_s"]
        figures["draw_ms"] = round(1000 * count / _rate(draw, False, seconds / 10, count)["images_per_s"], 3)
    finally:
        engine.close()
    return figures


def _windowed(
    submit: Callable[[], None], take: Callable[[], None], flying: "deque[Any]", gpu: bool
) -> Callable[[], None]:
    """One batch in, and one out where the window is full; the host is never more than a window ahead of the GPU."""
    import torch

    events: deque[torch.cuda.Event] = deque()

    def turn() -> None:
        submit()
        if len(flying) < WINDOW:
            return
        take()
        if gpu:
            event = torch.cuda.Event()
            event.record()
            events.append(event)
            if len(events) > WINDOW:
                events.popleft().synchronize()

    return turn


def torchvision_cuda(row: Row, inputs: Inputs, seconds: float) -> Figures:
    """torchvision on the GPU, called on one image after another, so that each has parameters of its own."""
    transform = row.torchvision()
    images = inputs.of(row, "cuda").unbind()
    turns = iter(range(1 << 30))

    def one() -> None:
        transform(images[next(turns) % len(images)])

    _rate(one, True, seconds / 4)
    return _rate(one, True, seconds, 1, every=16)


def kornia(row: Row, inputs: Inputs, seconds: float) -> Figures:
    """Kornia on a float32 batch on the GPU; making it floats is not counted."""
    import torch

    if not row.kornia:
        return {"status": "none", "reason": "nothing like it"}
    try:
        transform = row.kornias()
    except ImportError as error:
        return {"status": "none", "reason": str(error)}
    transform = transform.to("cuda")
    images = inputs.floats("cuda")

    def one() -> None:
        transform(images)

    with torch.no_grad():
        _rate(one, True, seconds / 4)
        return _rate(one, True, seconds, len(images))


def torchvision_cpu(row: Row, inputs: Inputs, seconds: float) -> Figures:
    """torchvision in a DataLoader's workers, one a core, until the batch is in this process's memory, not the GPU's.

    A batch of a slow transform has fewer images. Where shapes differ the values come in one flat tensor, which is
    less to hand over than a list.
    """
    import torch
    from torch.utils.data import DataLoader

    from torchdali.runtime import machine

    torch.set_num_threads(1)
    transform = row.torchvision()
    images = inputs.of(row, "cpu").unbind()
    turns = iter(range(1 << 30))
    alone = _rate(lambda: transform(images[next(turns) % len(images)]), False, seconds / 10)["images_per_s"]
    wanted = int(alone * _WORKER_BATCH_S)
    count = max(1, min(inputs.count, max(_SMALLEST_WORKER_BATCH, wanted)))
    workers = machine.available_cores()
    loader: Any = DataLoader(
        _Dataset(images, transform),  # pyright: ignore[reportArgumentType]
        batch_sampler=_Endless(len(images), count),
        num_workers=workers,
        collate_fn=_collate,
        multiprocessing_context="fork",  # this process was spawned, and its children would be by default
    )
    batches = iter(loader)
    try:
        for _ in range(2 * workers):  # what is fetched ahead when the clock starts was not made for nothing
            next(batches)
        # the workers' batches come in rounds, so whole rounds are counted
        figures = _rate(lambda: next(batches), False, seconds, count, every=workers)
    finally:
        batches._shutdown_workers()  # noqa: SLF001 - now, and not when garbage is collected
    return {**figures, "workers": workers, "worker_batch": count}


class _Dataset:
    """Images in memory and the transform that makes a sample of one."""

    def __init__(self, images: Any, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index])


@dataclass
class _Endless:
    """Batches of `count` indices below `images`, for ever."""

    images: int
    count: int

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        while True:
            yield [i % self.images for i in range(start, start + self.count)]
            start += self.count


def _collate(samples: list[Any]) -> Any:
    import torch
    from torch.utils.data import default_collate

    if isinstance(samples[0], torch.Tensor) and len({one.shape for one in samples}) > 1:
        return torch.cat([one.flatten() for one in samples])
    return default_collate(samples)


def wait(gpu: bool) -> None:
    """Waits until the GPU has nothing to do."""
    import torch

    if gpu:
        torch.cuda.synchronize()


def _rate(
    work: Callable[[], Any],
    gpu: bool,
    seconds: float,
    images: int = 1,
    every: int = 1,
    last: Callable[[], None] = lambda: None,
) -> Figures:
    """Calls `work`, which makes `images`, until the time is up, then `last`; the clock is read after `every` calls."""
    wait(gpu)
    calls, start = 0, time.perf_counter()
    while not calls or time.perf_counter() - start < seconds:
        for _ in range(every):
            work()
        calls += every
    last()
    wait(gpu)
    elapsed = time.perf_counter() - start
    return {
        "status": "ok",
        "images_per_s": round(calls * images / elapsed, 1),
        "images": calls * images,
        "seconds": round(elapsed, 3),
    }


SYSTEMS: dict[str, Callable[[Row, Inputs, float], Figures]] = {
    "torchdali": torchdali,
    "torchvision-cuda": torchvision_cuda,
    "torchvision-cpu": torchvision_cpu,
    "kornia": kornia,
}
