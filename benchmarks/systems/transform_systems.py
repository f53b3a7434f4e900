"""Measure images per second of one transform in one system. `benchmarks.studies.transform_worker` calls this.

All systems get the same decoded photographs. The time is by the host's clock, from an idle GPU until the GPU has made
the last image. Each measurement is warmed up, so that nothing is compiled or allocated during it.

Modules are imported where they are used. The process of the DataLoader must not start CUDA or DALI.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.systems.transform_inputs import Inputs
from benchmarks.systems.transform_rows import Row

WINDOW = 4
"""Number of batches in flight."""
_WORKER_BATCH_S = 0.1
"""Intended time of a worker's batch. With 256 images of a slow transform, 16 workers would take minutes."""
_SMALLEST_WORKER_BATCH = 8

Figures = dict[str, Any]


def torchdali(row: Row, inputs: Inputs, seconds: float) -> Figures:
    """Run the loader's pipeline on pixels on the device, with several batches in flight.

    The time includes drawing the parameters, and changing the layout to channels last and back. `alone` has one batch
    in flight and waits for it, as a call of ``torchdali.compile(...)`` whose result is used at once.
    """
    import numpy as np

    from torchdali.pipeline import graph
    from torchdali.pipeline.compile import compile_plan, fuse
    from torchdali.pipeline.engine import PipelineRunner
    from torchdali.runtime import machine
    from torchdali.transforms.rng import Draws, epoch_key
    from torchdali.transforms.spec import InputKind, Spec

    gpu = inputs.device == "cuda"
    images = inputs.select(row, inputs.device)
    count = len(images)
    plan = compile_plan(
        row.build_torchvision(), graph.resolve(inputs.device), "exact", Spec("tensor", images.dtype), InputKind.PIXELS
    )
    if reasons := [step.note for step in plan.steps if step.library == "torch"]:
        return {"status": "torch", "reason": reasons[0]}
    if plan.tail:
        return {"status": "torch", "reason": "on whole batches"}
    plan = fuse(plan)
    index, size = np.arange(count), np.tile(np.array(inputs.size, np.int64), (count, 1))
    key = epoch_key(0, 0)
    pixels = images.permute(0, 2, 3, 1)
    in_flight: deque[Any] = deque()
    turns = iter(range(1 << 30))

    def draw() -> Any:
        return plan.draw(Draws(key, index, np.full(count, next(turns), np.int64)), size)[0]

    def submit() -> None:
        feed: Any = pixels.contiguous()
        # The pipeline reads this memory, so it is kept until the run is finished.
        in_flight.append(feed if gpu else feed.numpy())
        engine.submit(in_flight[-1], draw())

    def take() -> None:
        engine.take()
        in_flight.popleft()

    def drain() -> None:
        while in_flight:
            take()

    def run_alone() -> None:
        submit()
        take()
        wait(gpu)

    start = time.perf_counter()
    engine = PipelineRunner(plan, count, machine.count_available_cores(), gpu)
    try:
        run_alone()
        figures: Figures = {"first_s": round(time.perf_counter() - start, 3)}
        turn = _make_turn(submit, take, in_flight, gpu)
        _rate(turn, gpu, seconds / 4, last=drain)
        figures |= _rate(turn, gpu, seconds, count, last=drain)
        figures["alone_images_per_s"] = _rate(run_alone, gpu, seconds / 2, count)["images_per_s"]
        figures["draw_ms"] = round(1000 * count / _rate(draw, False, seconds / 10, count)["images_per_s"], 3)
    finally:
        engine.close()
    return figures


def _make_turn(
    submit: Callable[[], None], take: Callable[[], None], in_flight: "deque[Any]", gpu: bool
) -> Callable[[], None]:
    """Return a function that submits a batch, and takes one if enough are in flight. The host waits for the GPU."""
    import torch

    events: deque[torch.cuda.Event] = deque()

    def turn() -> None:
        submit()
        if len(in_flight) < WINDOW:
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
    """Run torchvision on the GPU, image by image, so that each has its own parameters."""
    transform = row.build_torchvision()
    images = inputs.select(row, "cuda").unbind()
    turns = iter(range(1 << 30))

    def call() -> None:
        transform(images[next(turns) % len(images)])

    _rate(call, True, seconds / 4)
    return _rate(call, True, seconds, 1, every=16)


def kornia(row: Row, inputs: Inputs, seconds: float) -> Figures:
    """Run Kornia on a float32 batch on the GPU. The conversion to float is not counted."""
    import torch

    if not row.kornia:
        return {"status": "none", "reason": "no similar transform"}
    try:
        transform = row.build_kornia()
    except ImportError as error:
        return {"status": "none", "reason": str(error)}
    transform = transform.to("cuda")
    images = inputs.floats("cuda")

    def call() -> None:
        transform(images)

    with torch.no_grad():
        _rate(call, True, seconds / 4)
        return _rate(call, True, seconds, len(images))


def torchvision_cpu(row: Row, inputs: Inputs, seconds: float) -> Figures:
    """Run torchvision in a DataLoader with a worker for each core. Batches stay in host memory.

    A batch of a slow transform has fewer images. If shapes differ, a batch is one flat tensor, which costs less to send
    than a list.
    """
    import torch
    from torch.utils.data import DataLoader

    from torchdali.runtime import machine

    torch.set_num_threads(1)
    transform = row.build_torchvision()
    images = inputs.select(row, "cpu").unbind()
    turns = iter(range(1 << 30))
    alone = _rate(lambda: transform(images[next(turns) % len(images)]), False, seconds / 10)["images_per_s"]
    wanted = int(alone * _WORKER_BATCH_S)
    count = max(1, min(inputs.count, max(_SMALLEST_WORKER_BATCH, wanted)))
    workers = machine.count_available_cores()
    loader: Any = DataLoader(
        _Dataset(images, transform),  # pyright: ignore[reportArgumentType]
        batch_sampler=_EndlessBatches(len(images), count),
        num_workers=workers,
        collate_fn=_collate,
        multiprocessing_context="fork",  # the default is how this process was started: spawned
    )
    batches = iter(loader)
    try:
        for _ in range(2 * workers):  # batches that workers prepared during the warm-up are not counted
            next(batches)
        # The workers' batches come in rounds, so whole rounds are counted.
        figures = _rate(lambda: next(batches), False, seconds, count, every=workers)
    finally:
        batches._shutdown_workers()  # noqa: SLF001 - not later, at garbage collection
    return {**figures, "workers": workers, "worker_batch": count}


class _Dataset:
    """Dataset of images in memory, with a transform."""

    def __init__(self, images: Any, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index])


@dataclass
class _EndlessBatches:
    """Endless batches of `count` indices below `images`."""

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

    if isinstance(samples[0], torch.Tensor) and len({sample.shape for sample in samples}) > 1:
        return torch.cat([sample.flatten() for sample in samples])
    return default_collate(samples)


def wait(gpu: bool) -> None:
    """Wait until the GPU is idle."""
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
    """Call `work`, which makes `images`, until `seconds` are over, then `last`. Read the clock after `every` calls."""
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
