"""Measure one loader on a folder, alone or beside a training step, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch.utils.data import DataLoader

from torchdali import DALILoader
from torchdali.tools.bench import loading, training
from torchdali.tools.bench.folder import load_transform, make_dataset
from torchdali.tools.bench.metrics import Gpu, describe_environment
from torchdali.tools.bench.subprocesses import write_figures

SYNTHETIC = "synthetic"
LOADERS = {
    "torchdali": "DALILoader",
    "tensors": "DataLoader, tensors",
    "pil": "DataLoader, PIL",
    SYNTHETIC: "one batch, repeated",
}
_WARM_STEPS = 10


@dataclass(frozen=True)
class Case:
    """One loader to measure.

    Attributes:
        loader: Name in :data:`LOADERS`.
        root: Folder of class folders.
        transform: ``FILE:NAME``, or None for ImageNet's training transform.
        batch_size: Number of images in a batch.
        length: Number of batches in an epoch.
        cores: Number of cores that the process may use.
        seconds: How long to measure.
        model: torchvision's name of the model to train, or None to measure the loader alone.
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
    """Measure a case in this process, and write the figures to ``result`` as JSON."""
    torch.set_num_threads(case.cores)  # torch was imported when the process still had all cores
    gpu = Gpu()
    environment = describe_environment(("torch", "torchvision", "torchdali"))
    dataset = make_dataset(case.root, load_transform(case.transform), case.loader == "tensors")
    if case.model is not None:
        write_figures({**environment, **_measure_training(case, case.model, dataset, gpu)}, result)
        return
    loaders: list[Any] = []

    def build() -> loading.Epoch:
        loaders.append(_make_loader(dataset, case, gpu))
        return lambda: _iterate(loaders[0], gpu)

    figures, batch = loading.measure(build, gpu, case.batch_size, case.seconds, warmup=case.seconds)
    figures["batch"] = f"{tuple(batch[0].shape)}, {batch[0].dtype}, {batch[0].device}"
    write_figures({**environment, **figures}, result)  # in case the probe fails
    if isinstance(loaders[0], DALILoader) and (probe := loaders[0].stats(probe=True).probe):
        write_figures({**environment, **figures, "alone": asdict(probe)}, result)


def _measure_training(case: Case, model: str, dataset: Any, gpu: Gpu) -> dict[str, Any]:
    classes = max(2, len(dataset.classes))
    if case.loader == SYNTHETIC:
        epoch = _synthetic_epoch(dataset[0][0], case, classes, gpu)
    else:
        loader = _make_loader(dataset, case, gpu)
        epoch = lambda: _iterate(loader, gpu)  # noqa: E731
    figures, _ = training.measure(
        torchvision.models.get_model(model, weights=None, num_classes=classes),
        epoch,
        gpu,
        batch_size=case.batch_size,
        length=case.length,
        seconds=case.seconds,
        warmup=_WARM_STEPS if gpu.present else 1,
        settle=case.seconds / 2 if gpu.present else 0.0,
        patience=case.seconds,
    )
    return figures


def _synthetic_epoch(image: Any, case: Case, classes: int, gpu: Gpu) -> loading.Epoch:
    if not (isinstance(image, torch.Tensor) and image.is_floating_point() and image.ndim == 3):
        raise TypeError("with --train, the transform must return float tensors (C, H, W)")
    device = torch.device("cuda" if gpu.present else "cpu")
    images = torch.randn(case.batch_size, *image.shape, device=device)
    return training.repeat_batch(images, torch.randint(classes, (case.batch_size,), device=device), case.length)


def _make_loader(dataset: Any, case: Case, gpu: Gpu) -> DataLoader[Any]:
    """Return a ``DALILoader``, or a ``DataLoader`` as scripts write it, with one worker for each core."""
    if case.loader == "torchdali":
        return DALILoader(dataset, batch_size=case.batch_size, shuffle=True, drop_last=True)
    return DataLoader(
        dataset,
        batch_size=case.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=case.cores,
        pin_memory=gpu.present,
        persistent_workers=True,
    )


def _iterate(loader: DataLoader[Any], gpu: Gpu) -> Iterator[Any]:
    """Start an epoch. Move the batches of a ``DataLoader`` to the GPU."""
    if isinstance(loader, DALILoader):
        return iter(loader)
    device = torch.device("cuda" if gpu.present else "cpu")
    return ([images.to(device, non_blocking=True), labels.to(device, non_blocking=True)] for images, labels in loader)
