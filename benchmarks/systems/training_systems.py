"""What trains, from what, and with which lever: the models, systems and levers of the training benchmark.

The systems are those of `systems`, told about threads as the loader benchmark found best; *synthetic* is
one batch that lies on the GPU, handed out again and again.

Modules are imported where they are used, as in `systems`.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.systems import systems
from benchmarks.systems.loader_systems import LOADER
from benchmarks.systems.systems import TORCHDALI, Epoch, Job
from benchmarks.systems.training_stages import STAGES, stage
from torchdali.tools.bench.training import repeat_batch

if TYPE_CHECKING:
    import torch

CLASSES = 1000
QUEUES = 32
"""Hardware queues that torchdali asks the driver for; where nobody asks there are 8."""


@dataclass(frozen=True)
class Case:
    """One line of the full table, and how to measure it.

    Attributes:
        model: what trains, a name in :data:`MODELS`.
        system: where batches come from, a name in :data:`SYSTEMS`.
        lever: what is changed, a name in :data:`LEVERS`; empty where nothing is.
        cores: how many cores the process may use.
        queues: what ``CUDA_DEVICE_MAX_CONNECTIONS`` is set to before the process starts; None where it is not set.
        root: the folder of class folders.
        batch_size: images in a batch.
        length: batches in an epoch.
        seconds: how long to measure, rounded to whole epochs.
        warmup: steps before that.
        patience: seconds after which the warm-up ends, however slow the last steps were.
        cudnn_benchmark: whether cuDNN tries its kernels and takes the fastest.
        data: which set the pictures are of.
        passes: as `systems.Job.passes`.
        settle: seconds of training before it is measured.
    """

    model: str
    system: str
    lever: str
    cores: int
    queues: int | None
    root: Path
    batch_size: int
    length: int
    seconds: float
    warmup: int
    patience: float
    cudnn_benchmark: bool
    data: str = "imagenet"
    passes: int = 1
    settle: float = 0.0

    def job(self, threads: int) -> Job:
        """What a system is to do, told about so many threads or workers."""
        return Job(self.root, self.batch_size, threads, self.data, self.passes)

    def label(self) -> dict[str, Any]:
        """What it is, for the report."""
        return {name: getattr(self, name) for name in ("model", "system", "lever", "cores", "queues")}


# Models


@dataclass(frozen=True)
class Model:
    """What trains.

    Attributes:
        title: what the tables call it.
        make: makes it, on the CPU.
        compiled: whether it goes through ``torch.compile``.
    """

    title: str
    make: Callable[[], "torch.nn.Module"]
    compiled: bool = False


def _resnet(name: str) -> "torch.nn.Module":
    import torchvision.models

    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES)


def _tiny() -> "torch.nn.Module":
    """For trials of the harness where there is no GPU."""
    from torch import nn

    pooled = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(pooled, nn.Linear(8, CLASSES))


MODELS = {
    "resnet18": Model("ResNet-18", lambda: _resnet("resnet18")),
    "resnet50": Model("ResNet-50", lambda: _resnet("resnet50")),
    "resnet18_compiled": Model("ResNet-18, torch.compile", lambda: _resnet("resnet18"), compiled=True),
    "tiny": Model("tiny", _tiny),
    "tiny_compiled": Model("tiny, torch.compile", _tiny, compiled=True),
}


# Levers


@dataclass(frozen=True)
class Lever:
    """One thing that is done otherwise than by default.

    Attributes:
        title: what the tables call it.
        options: arguments of the loader.
        queues: what ``CUDA_DEVICE_MAX_CONNECTIONS`` is set to before; None where it is not set.
        half: whether the images come as float16.
        high_priority: whether the training runs on a stream of high priority.
        ahead: whether each batch is asked for before the step on the one before it is launched.
        before: what is done once in the process, before the loader is made.
        system: what it is tried with.
    """

    title: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    queues: int | None = None
    half: bool = False
    high_priority: bool = False
    ahead: bool = False
    before: Callable[[], None] | None = None
    system: str = "torchdali"


def _reserve(device: int, pinned: int) -> None:
    """Has DALI's pools take more memory than a loader needs, so that they never grow beside the training."""
    import torch
    from nvidia.dali import backend

    if torch.cuda.is_available():
        if device:
            backend.PreallocateDeviceMemory(device, torch.cuda.current_device())
        if pinned:
            backend.PreallocatePinnedMemory(pinned)


LEVERS = {
    "again": Lever("defaults, again"),
    **{f"window_{n}": Lever(f"window {n}", {"num_workers": 16, "prefetch_factor": n}) for n in (2, 4, 8)},
    **{f"threads_{n}": Lever(f"{n} threads", {"num_workers": n}) for n in (4, 8, 16)},
    **{f"queues_{n}": Lever(f"{n} queues", queues=n) for n in (8, 16, 32, 64)},
    "high_priority": Lever("training on a stream of high priority", high_priority=True),
    "half": Lever("float16 images", half=True),
    "ahead": Lever("each batch asked for one step ahead", ahead=True),
    "reserved": Lever("DALI's pools filled beforehand", before=partial(_reserve, 4 * 2**30, 2**30)),
    "reserved_device": Lever("DALI's pool of GPU memory filled beforehand", before=partial(_reserve, 4 * 2**30, 0)),
    "reserved_pinned": Lever("DALI's pool of pinned memory filled beforehand", before=partial(_reserve, 0, 2**30)),
    "no_gc": Lever("without Python's garbage collector", before=gc.disable),
    "tuned_queues": Lever(f"for comparison: DALI tuned by hand, {QUEUES} queues", queues=QUEUES, system="dali_tuned"),
    "tuned_read_queues": Lever(
        f"for comparison: DALI tuned by hand, {QUEUES} queues, files read", queues=QUEUES, system="dali_tuned_read"
    ),
    "once_more": Lever("defaults, once more"),
}
_NONE = Lever("none")


def lever_of(case: Case) -> Lever:
    """What is changed, or a lever that changes nothing."""
    return LEVERS[case.lever] if case.lever else _NONE


# Systems


@dataclass(frozen=True)
class Loader:
    """Where batches come from.

    Attributes:
        title: what the tables call it.
        imports: the modules to import before CUDA is initialised.
        build: a case to a function that starts one epoch.
        for_compiled: whether it is measured beside a compiled model.
        every_core_count: whether it is measured for every number of cores, or for the largest only.
        short: whether half the time will do, to warm up as well.
        cannot: why it cannot be measured here with a set of pictures; empty where it can.
        exits: whether its process ends by itself when the work is done.
        workers: as `systems.System.workers`.
    """

    title: str
    imports: tuple[str, ...]
    build: Callable[[Case], Epoch]
    for_compiled: bool = False
    every_core_count: bool = True
    short: bool = False
    cannot: Callable[[str], str] = lambda _: ""
    exits: bool = True
    workers: bool = False


def synthetic(case: Case) -> Epoch:
    """The same batch again and again, already as the model wants it: what the step can reach at most."""
    return repeat_batch(*_any_batch(case), case.length)


def _any_batch(case: Case) -> tuple["torch.Tensor", "torch.Tensor"]:
    import torch

    device, size = torch.device("cuda" if systems.has_gpu() else "cpu"), case.job(0).size
    images = torch.randn(case.batch_size, 3, size, size, device=device)
    return images, torch.randint(CLASSES, (case.batch_size,), device=device)


def _stage(name: str, title: str) -> Loader:
    def build(case: Case) -> Epoch:
        (step,) = repeat_batch(*_any_batch(case), 1)()
        return stage(name, case.root, case.batch_size, step)

    return Loader(title, TORCHDALI, build, every_core_count=False)


def torchdali(case: Case) -> Epoch:
    """A training script after the one changed import, and what the lever changes."""
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader as DataLoader

    lever = lever_of(case)
    if not (lever.options or lever.half):
        return systems.torchdali(case.job(case.cores))
    dataset = ImageFolder(case.root, transform=_half(case.data) if lever.half else systems.transforms(case.data))
    loader = DataLoader(dataset, batch_size=case.batch_size, shuffle=True, drop_last=True, **lever.options)
    return lambda: iter(loader)


def _half(data: str) -> Any:
    import torch
    from torchvision.transforms import v2

    return v2.Compose([*systems.transforms(data).transforms, v2.ToDtype(torch.float16, scale=True)])


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches, each handed out when the next one was asked for."""
    rest = iter(batches)
    try:
        present = next(rest)
    except StopIteration:
        return
    for following in rest:
        yield present
        present = following
    yield present


def epochs_of(case: Case) -> Epoch:
    """What starts one epoch, with the lever."""
    epoch = SYSTEMS[case.system].build(case)
    return (lambda: one_ahead(epoch())) if lever_of(case).ahead else epoch


def _of_loader(name: str, every_core_count: bool = True, for_compiled: bool = False) -> Loader:
    """A system of the loader benchmark.

    Where threads were tried there, half the cores were the best number on 16 and on 4 of them.
    """
    system = LOADER[name]
    half = system.threads in ("half", "tried")

    def build(case: Case) -> Epoch:
        return system.build(case.job(max(1, case.cores // 2) if half else case.cores))

    return Loader(
        system.title,
        system.imports,
        build,
        for_compiled,
        every_core_count,
        cannot=system.cannot,
        exits=system.exits,
        workers=system.workers,
    )


SYSTEMS = {
    "synthetic": Loader("one batch on the GPU", ("torch",), synthetic, for_compiled=True, short=True),
    "torchdali": Loader(LOADER["torchdali"].title, TORCHDALI, torchdali, for_compiled=True),
    "dali_tuned": _of_loader("dali_tuned", for_compiled=True),
    "dali_documented": _of_loader("dali_documented"),
    **{
        name: _of_loader(name, every_core_count=False)
        for name in LOADER
        if name not in ("torchdali", "dali_tuned", "dali_documented")
    },
}
SYSTEMS |= {name: _stage(name, title) for name, title in STAGES.items()}
DEFAULT = ("synthetic", "torchdali", "dali_tuned", "dali_documented", "dali_proxy", "dataloader_v2")
