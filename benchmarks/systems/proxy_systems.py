"""The systems of the proxy benchmark: datasets in worker processes, what follows on the GPU (or, torch's, not).

All get the same samples of `proxy_datasets` and give the batches that `systems` describes.
A system is built with `(root, batch_size, workers, source, length, persistent)`: the kind of image, the number of
samples in an epoch, and whether the workers stay between epochs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.systems.proxy_datasets import Pictures, files
from benchmarks.systems.systems import (
    RANGES,
    SIZE,
    TORCH,
    TORCHDALI,
    Epoch,
    Job,
    System,
    dataloader,
    decoded_crop,
    has_gpu,
    mirrored_normalized,
    transforms,
)

Build = Callable[[Path, int, int, str, int, bool], Epoch]


@dataclass(frozen=True)
class Proxy:
    """How one system is called, what it imports and how it is built.

    Attributes:
        title: what the tables call it.
        imports: the modules to import before the clock starts.
        build: `(root, batch_size, workers, source, length, persistent)` to a function that starts one epoch.
        sources: what it is measured with.
        workers: how many worker processes to try on so many cores, the likely best first.
        exits: whether its process ends by itself when the work is done.
    """

    title: str
    imports: tuple[str, ...]
    build: Build
    sources: tuple[str, ...]
    workers: Callable[[int], tuple[int, ...]]
    exits: bool = True

    def system(self, source: str, length: int, persistent: bool = True) -> System:
        """It with one kind of image, as the loader benchmark's are."""

        def build(job: Job) -> Epoch:
            return self.build(job.root, job.batch_size, job.threads, source, length, persistent)

        return System(self.title, self.imports, build)


def torchdali(root: Path, batch_size: int, workers: int, source: str, length: int, persistent: bool) -> Epoch:
    """DALILoader with a transform, and DataLoader's own arguments."""
    from torchdali import DALILoader as DataLoader

    loader = DataLoader(
        Pictures(root, source, length),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=persistent,
        transform=transforms(),
    )
    return lambda: iter(loader)


def lifted(root: Path, batch_size: int, workers: int, source: str, length: int, persistent: bool) -> Epoch:  # noqa: ARG001
    """The yardstick: an image folder, for which DALILoader needs no workers; no option of torchdali's own."""
    from torch.utils.data import Subset
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader as DataLoader

    dataset: Any = ImageFolder(root, transform=transforms())
    if length != len(dataset):
        places = {path: place for place, (path, _) in enumerate(dataset.samples)}
        order = [places[str(path)] for path in files(root)]
        dataset = Subset(dataset, [order[place % len(order)] for place in range(length)])
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    return lambda: iter(loader)


def nvidia(root: Path, batch_size: int, workers: int, source: str, length: int, persistent: bool) -> Epoch:
    """DALI's own proxy as its documentation shows it, with the JPEG engine set as in 'DALI tuned by hand'."""
    import os

    import torch
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch.experimental import proxy

    gpu = has_gpu()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # the best for 'DALI tuned by hand' on 4 and on 16 cores
    options = {"batch_size": batch_size, "num_threads": threads, "device_id": 0 if gpu else None}

    @pipeline_def(**options, prefetch_queue_depth=2 * workers, seed=12)
    def pipeline() -> Any:
        decoded = source in ("pil", "arrays")
        given = fn.external_source(name="images", no_copy=True, **({"layout": "HWC"} if decoded else {}))
        if decoded:
            return mirrored_normalized(fn.random_resized_crop(given.gpu() if gpu else given, size=SIZE, **RANGES))
        encoded = fn.io.file.read(given) if source == "paths" else given
        images = decoded_crop(encoded, {"hw_decoder_load": 1.0} if gpu else {})
        return mirrored_normalized(fn.resize(images, resize_x=SIZE, resize_y=SIZE))

    server = proxy.DALIServer(pipeline())
    loader = proxy.DataLoader(
        server,
        Pictures(root, source, length, partial(_handed_over, server.proxy)),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context="fork",  # it cannot be pickled
    )
    server.start_thread()
    device = torch.device("cuda" if gpu else "cpu")

    def epoch() -> Iterator[Any]:
        for images, labels in loader:
            yield [images, labels.to(device, non_blocking=True)]

    return epoch


def _handed_over(proxy: Callable[[Any], Any], image: Any) -> Any:
    """What the proxy makes of an image: it takes arrays only."""
    import numpy as np

    if isinstance(image, Path):
        return proxy(np.frombuffer(str(image).encode(), dtype=np.int8))
    if isinstance(image, bytes):
        return proxy(np.frombuffer(image, dtype=np.uint8))
    return proxy(np.asarray(image))


def torch_v2(root: Path, batch_size: int, workers: int, source: str, length: int, persistent: bool) -> Epoch:
    """DataLoader with all work in the workers: torchvision's decoder and v2 transforms on tensors."""
    from torchvision.transforms import v2

    transform = transforms()
    if source == "bytes":
        transform = v2.Compose([_decode, *transform.transforms])
    return dataloader(Pictures(root, source, length, transform), batch_size, workers, persistent)


def _decode(encoded: bytes) -> Any:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    # a copy, because torch warns of bytes that cannot be written
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
    "lifted": Proxy(
        "**torchdali**, lifted",
        TORCHDALI,
        lifted,
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
