"""Systems of the proxy benchmark, with datasets in worker processes.

All get the samples of `proxy_datasets`, and return the batches that `systems` describes. A system is built with `(root,
batch_size, workers, source, length, persistent)`. `source` is the kind of image, `length` the number of samples in an
epoch, and `persistent` tells whether the workers stay between epochs.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.systems.proxy_datasets import Pictures, list_files
from benchmarks.systems.systems import (
    RANGES,
    SIZE,
    TORCH,
    TORCHDALI,
    Epoch,
    Job,
    System,
    add_normalize,
    add_random_crop,
    has_gpu,
    make_dataloader,
    make_epoch,
    make_transforms,
)

Build = Callable[[Path, int, int, str, int, bool], Epoch]


@dataclass(frozen=True)
class Proxy:
    """A system of the proxy benchmark.

    Attributes:
        title: Title in the tables.
        imports: Modules to import before the time is measured.
        build: Function of `(root, batch_size, workers, source, length, persistent)` that returns an `Epoch`.
        sources: Kinds of images that it is measured with.
        workers: Function from the number of cores to the numbers of workers to try, the likely best first.
        exits: Whether its process ends by itself when the work is done.
    """

    title: str
    imports: tuple[str, ...]
    build: Build
    sources: tuple[str, ...]
    workers: Callable[[int], tuple[int, ...]]
    exits: bool = True

    def make_system(self, source: str, length: int, persistent: bool = True) -> System:
        """Return a system as in the loader benchmark, with one kind of image."""

        def build(job: Job) -> Epoch:
            return self.build(job.root, job.batch_size, job.threads, source, length, persistent)

        return System(self.title, self.imports, build)


def torchdali(root: Path, batch_size: int, workers: int, source: str, length: int, persistent: bool) -> Epoch:
    """DALILoader with a transform, and DataLoader's arguments."""
    from torchdali import DALILoader as DataLoader

    loader = DataLoader(
        Pictures(root, source, length),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=persistent,
        transform=make_transforms(),
    )
    return lambda: iter(loader)


def native(root: Path, batch_size: int, workers: int, source: str, length: int, persistent: bool) -> Epoch:  # noqa: ARG001
    """DALILoader on an image folder, which it reads natively, without workers."""
    from torch.utils.data import Subset
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader as DataLoader

    dataset: Any = ImageFolder(root, transform=make_transforms())
    if length != len(dataset):
        rows = {path: i for i, (path, _) in enumerate(dataset.samples)}
        order = [rows[str(path)] for path in list_files(root)]
        dataset = Subset(dataset, [order[i % len(order)] for i in range(length)])
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    return lambda: iter(loader)


def nvidia(root: Path, batch_size: int, workers: int, source: str, length: int, persistent: bool) -> Epoch:
    """DALI's own proxy as in its documentation, with the JPEG engine set as in 'DALI tuned by hand'."""
    import os

    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch.experimental import proxy

    gpu = has_gpu()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # best for 'DALI tuned by hand' on 4 and on 16 cores
    options = {"batch_size": batch_size, "num_threads": threads, "device_id": 0 if gpu else None}

    @pipeline_def(**options, prefetch_queue_depth=2 * workers, seed=12)
    def pipeline() -> Any:
        decoded = source in ("pil", "arrays")
        images = fn.external_source(name="images", no_copy=True, **({"layout": "HWC"} if decoded else {}))
        if decoded:
            return add_normalize(fn.random_resized_crop(images.gpu() if gpu else images, size=SIZE, **RANGES))
        encoded = fn.io.file.read(images) if source == "paths" else images
        images = add_random_crop(encoded, {"hw_decoder_load": 1.0} if gpu else {})
        return add_normalize(fn.resize(images, resize_x=SIZE, resize_y=SIZE))

    server = proxy.DALIServer(pipeline())
    loader = proxy.DataLoader(
        server,
        Pictures(root, source, length, partial(_call_proxy, server.proxy)),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context="fork",  # it cannot be pickled
    )
    server.start_thread()
    epoch = make_epoch(loader)
    weakref.finalize(epoch, server.stop_thread)  # Python waits for its thread at exit
    return epoch


def _call_proxy(proxy: Callable[[Any], Any], image: Any) -> Any:
    """Call the proxy with an image as an array, the only type that it accepts."""
    import numpy as np

    if isinstance(image, Path):
        return proxy(np.frombuffer(str(image).encode(), dtype=np.int8))
    if isinstance(image, bytes):
        return proxy(np.frombuffer(image, dtype=np.uint8))
    return proxy(np.asarray(image))


def torch_v2(root: Path, batch_size: int, workers: int, source: str, length: int, persistent: bool) -> Epoch:
    """DataLoader with all work in the workers: torchvision's decoder and v2 transforms on tensors."""
    from torchvision.transforms import v2

    transform = make_transforms()
    if source == "bytes":
        transform = v2.Compose([_decode, *transform.transforms])
    return make_dataloader(Pictures(root, source, length, transform), batch_size, workers, persistent)


def _decode(encoded: bytes) -> Any:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    # A copy, because torch warns of read-only memory.
    return decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode=ImageReadMode.RGB)


_PROXY = "nvidia.dali.plugin.pytorch.experimental.proxy"

SYSTEMS = {
    "torchdali": Proxy(
        "**torchdali**",
        TORCHDALI,
        torchdali,
        ("bytes", "pil", "arrays", "paths"),
        lambda cores: (cores,),
    ),
    "native": Proxy(
        "**torchdali**, native",
        TORCHDALI,
        native,
        ("folder",),
        lambda _: (0,),
    ),
    "nvidia": Proxy(
        "DALI's proxy",
        (*TORCH, "nvidia.dali", _PROXY),
        nvidia,
        ("bytes", "pil", "arrays", "paths"),
        lambda cores: (max(1, cores // 2), cores) if cores > 1 else (1,),
        exits=False,
    ),
    "torch_v2": Proxy(
        "DataLoader, torchvision v2",
        TORCH,
        torch_v2,
        ("bytes", "pil", "arrays"),
        lambda cores: (cores,),
    ),
}
