"""Models, systems and levers of the training benchmark.

The systems are those of `systems`, with the numbers of threads that were best in the loader benchmark. *synthetic*
repeats one batch on the GPU. Modules are imported where they are used, as in `systems`.
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
from benchmarks.systems.training_stages import STAGES, make_stage
from torchdali.tools.bench.training import repeat_batch

if TYPE_CHECKING:
    import torch

CLASSES = 1000
QUEUES = 32
"""Number of hardware queues that torchdali sets. The driver's default is 8."""


@dataclass(frozen=True)
class Case:
    """One line of the full table, and how to measure it.

    Attributes:
        model: Name in :data:`MODELS`.
        system: Name in :data:`SYSTEMS`.
        lever: Name in :data:`LEVERS`, or empty.
        cores: Number of cores that the process may use.
        queues: Value of ``CUDA_DEVICE_MAX_CONNECTIONS``, or None to leave it unset.
        root: Folder of class folders.
        batch_size: Number of images in a batch.
        length: Number of batches in an epoch.
        seconds: How long to measure, rounded to whole epochs.
        warmup: Number of steps before that.
        patience: Seconds after which the warm-up ends even if the last steps were slow.
        cudnn_benchmark: Whether cuDNN tries its kernels and uses the fastest.
        data: Set of pictures.
        passes: As `systems.Job.passes`.
        settle: Seconds of training before it is measured.
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
        """Return the job of a system, with a number of threads or workers."""
        return Job(self.root, self.batch_size, threads, self.data, self.passes)

    def label(self) -> dict[str, Any]:
        """Return its label in the results."""
        return {name: getattr(self, name) for name in ("model", "system", "lever", "cores", "queues")}


# Models


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        title: Title in the tables.
        make: Function that makes it, on the CPU.
        compiled: Whether ``torch.compile`` compiles it.
    """

    title: str
    make: Callable[[], "torch.nn.Module"]
    compiled: bool = False


def _resnet(name: str) -> "torch.nn.Module":
    import torchvision.models

    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES)


def _tiny() -> "torch.nn.Module":
    """Return a tiny model, to try the harness without a GPU."""
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
    """One change from the defaults.

    Attributes:
        title: Title in the tables.
        options: Arguments of the loader.
        queues: Value of ``CUDA_DEVICE_MAX_CONNECTIONS``, or None to leave it unset.
        half: Whether images are float16.
        high_priority: Whether the training runs on a stream of high priority.
        ahead: Whether the next batch is requested before the current step is launched.
        before: Function called once in the process, before the loader is made, or None.
        system: System that it is tried with.
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
    """Make DALI's pools larger than a loader needs, so that they do not grow during the training."""
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
    "ahead": Lever("each batch requested one step ahead", ahead=True),
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


def get_lever(case: Case) -> Lever:
    """Return the case's lever, or one that changes nothing."""
    return LEVERS[case.lever] if case.lever else _NONE


# Systems


@dataclass(frozen=True)
class Loader:
    """A system of the training benchmark.

    Attributes:
        title: Title in the tables.
        imports: Modules to import before CUDA is initialised.
        build: Function from a case to an `Epoch`.
        for_compiled: Whether it is measured beside a compiled model.
        every_core_count: Whether it is measured for every number of cores, or for the largest only.
        short: Whether half the time is enough, also to warm up.
        why_not: Function from a set of pictures to the reason why it cannot be measured here, or an empty string.
        exits: Whether its process ends by itself when the work is done.
        workers: As `systems.System.workers`.
    """

    title: str
    imports: tuple[str, ...]
    build: Callable[[Case], Epoch]
    for_compiled: bool = False
    every_core_count: bool = True
    short: bool = False
    why_not: Callable[[str], str] = lambda _: ""
    exits: bool = True
    workers: bool = False


def synthetic(case: Case) -> Epoch:
    """Repeat one batch, already in the model's format: the fastest that the step can be."""
    return repeat_batch(*_make_batch(case), case.length)


def _make_batch(case: Case) -> tuple["torch.Tensor", "torch.Tensor"]:
    import torch

    device, size = torch.device("cuda" if systems.has_gpu() else "cpu"), case.job(0).size
    images = torch.randn(case.batch_size, 3, size, size, device=device)
    return images, torch.randint(CLASSES, (case.batch_size,), device=device)


def _stage(name: str, title: str) -> Loader:
    def build(case: Case) -> Epoch:
        (step,) = repeat_batch(*_make_batch(case), 1)()
        return make_stage(name, case.root, case.batch_size, step)

    return Loader(title, TORCHDALI, build, every_core_count=False)


def torchdali(case: Case) -> Epoch:
    """DALILoader in a training script after the one changed import, with the case's lever."""
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader as DataLoader

    lever = get_lever(case)
    if not (lever.options or lever.half):
        return systems.torchdali(case.job(case.cores))
    dataset = ImageFolder(case.root, transform=_half(case.data) if lever.half else systems.make_transforms(case.data))
    loader = DataLoader(dataset, batch_size=case.batch_size, shuffle=True, drop_last=True, **lever.options)
    return lambda: iter(loader)


def _half(data: str) -> Any:
    import torch
    from torchvision.transforms import v2

    return v2.Compose([*systems.make_transforms(data).transforms, v2.ToDtype(torch.float16, scale=True)])


def prefetch_one(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches. Request the next one before each is yielded."""
    rest = iter(batches)
    try:
        present = next(rest)
    except StopIteration:
        return
    for following in rest:
        yield present
        present = following
    yield present


def make_epochs(case: Case) -> Epoch:
    """Return the epochs of a case, with its lever."""
    epoch = SYSTEMS[case.system].build(case)
    return (lambda: prefetch_one(epoch())) if get_lever(case).ahead else epoch


def _from_loader(name: str, every_core_count: bool = True, for_compiled: bool = False) -> Loader:
    """Return a system of the loader benchmark.

    If threads are tried there, half the number of cores was best on 16 and on 4 cores.
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
        why_not=system.why_not,
        exits=system.exits,
        workers=system.workers,
    )


SYSTEMS = {
    "synthetic": Loader("one batch on the GPU", ("torch",), synthetic, for_compiled=True, short=True),
    "torchdali": Loader(LOADER["torchdali"].title, TORCHDALI, torchdali, for_compiled=True),
    "dali_tuned": _from_loader("dali_tuned", for_compiled=True),
    "dali_documented": _from_loader("dali_documented"),
    **{
        name: _from_loader(name, every_core_count=False)
        for name in LOADER
        if name not in ("torchdali", "dali_tuned", "dali_documented")
    },
}
SYSTEMS |= {name: _stage(name, title) for name, title in STAGES.items()}
DEFAULT = ("synthetic", "torchdali", "dali_tuned", "dali_documented", "dali_proxy", "dataloader_v2")
