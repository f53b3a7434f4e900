"""What is measured of a folder: loaders alone and beside a training step, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch.utils.data import DataLoader

from torchdali import DALILoader
from torchdali.tools.bench import children, folder, loading, training
from torchdali.tools.bench.gauges import Gpu, surroundings

__all__ = ["LOADERS", "SYNTHETIC", "Case", "measure_case"]

SYNTHETIC = "synthetic"
LOADERS = {
    "torchdali": "DALILoader",
    "tensors": "DataLoader, tensors",
    "pil": "DataLoader, PIL",
    SYNTHETIC: "one batch, again and again",
}
_WARM_STEPS = 10


@dataclass(frozen=True)
class Case:
    """One loader to measure.

    Attributes:
        loader: a name in :data:`LOADERS`.
        root: the folder of class folders.
        transform: ``FILE:NAME``, or None for the standard one.
        batch_size: images in a batch.
        length: batches in an epoch.
        cores: how many cores the process may use.
        seconds: how long to measure.
        model: what trains beside it, torchvision's name; None where nothing does.
    """

    loader: str
    root: Path
    transform: str | None
    batch_size: int
    length: int
    cores: int
    seconds: float
    model: str | None = None


def measure_case(case: Case, result: Path) -> None:
    """Measures one case in this process and writes the figures to `result` as JSON."""
    torch.set_num_threads(case.cores)  # torch was imported before the process had given up the other cores
    gpu = Gpu()
    about = surroundings(("torch", "torchvision", "torchdali"))
    if case.model is not None:
        children.write({**about, **_beside(case, case.model, gpu)}, result)
        return
    dataset = folder.dataset(case.root, folder.loaded(case.transform), case.loader == "tensors")
    loaders: list[DALILoader[Any]] = []

    def build() -> loading.Epoch:
        if case.loader != "torchdali":
            return _dataloader(dataset, case, gpu)
        loaders.append(DALILoader[Any](dataset, batch_size=case.batch_size, shuffle=True, drop_last=True))
        return lambda: iter(loaders[0])

    figures, batch = loading.measure(build, gpu, case.batch_size, case.seconds, warmup=case.seconds)
    figures["batch"] = f"{tuple(batch[0].shape)}, {batch[0].dtype}, {batch[0].device}"
    children.write({**about, **figures}, result)  # whatever becomes of the probe
    if loaders and (probe := loaders[0].stats(probe=True).probe):
        children.write({**about, **figures, "alone": asdict(probe)}, result)


def _beside(case: Case, name: str, gpu: Gpu) -> dict[str, Any]:
    dataset = folder.dataset(case.root, folder.loaded(case.transform), case.loader == "tensors")
    classes = max(2, len(dataset.classes))
    figures, _ = training.measure(
        torchvision.models.get_model(name, weights=None, num_classes=classes),
        _epochs(dataset, case, classes, gpu),
        gpu,
        batch_size=case.batch_size,
        length=case.length,
        seconds=case.seconds,
        warmup=_WARM_STEPS if gpu.present else 1,
        settle=case.seconds / 2 if gpu.present else 0.0,
        patience=case.seconds,
    )
    return figures


def _epochs(dataset: Any, case: Case, classes: int, gpu: Gpu) -> loading.Epoch:
    if case.loader == "torchdali":
        loader: DALILoader[Any] = DALILoader(dataset, batch_size=case.batch_size, shuffle=True, drop_last=True)
        return lambda: iter(loader)
    if case.loader != SYNTHETIC:
        return _dataloader(dataset, case, gpu)
    image = dataset[0][0]
    if not (isinstance(image, torch.Tensor) and image.is_floating_point() and image.ndim == 3):
        raise TypeError("beside a training step the transform must give float tensors (C, H, W)")
    device = torch.device("cuda" if gpu.present else "cpu")
    images = torch.randn(case.batch_size, *image.shape, device=device)
    return training.one_batch(images, torch.randint(classes, (case.batch_size,), device=device), case.length)


def _dataloader(dataset: Any, case: Case, gpu: Gpu) -> loading.Epoch:
    """DataLoader as scripts write it: a worker a core, its batches moved to the GPU."""
    device = torch.device("cuda" if gpu.present else "cpu")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=case.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=case.cores,
        pin_memory=gpu.present,
        persistent_workers=True,
    )

    def epoch() -> Iterator[Any]:
        for images, labels in loader:
            yield [images.to(device, non_blocking=True), labels.to(device, non_blocking=True)]

    return epoch
