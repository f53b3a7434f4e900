"""What a measured process says beside its figures: what a batch looks like, and in which surroundings it was made."""

import importlib
import os
import time
from typing import TYPE_CHECKING, Any

from benchmarks.systems.systems import System
from torchdali.runtime import machine
from torchdali.tools.bench import metrics

if TYPE_CHECKING:
    import torch

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
VERSIONED = ("torch", "torchvision", "nvidia.dali", "torchdali", "numpy", "kornia", "spdl", "ffcv")


def set_queues(imports: tuple[str, ...], queues: int | None = None) -> None:
    """Hardware queues as the system alone would have them, before CUDA starts.

    The harness itself has imported torchdali, which asks the driver for 32. Another system gets the driver's own
    number, or `queues` where it is given.
    """
    os.environ.pop(VARIABLE, None)
    if queues is not None:
        os.environ[VARIABLE] = str(queues)
    if "torchdali" in imports:
        machine.set_connections()


def surroundings() -> dict[str, Any]:
    """Versions, the GPU's name and settings of the environment."""
    return metrics.describe_environment(VERSIONED)


def describe(
    batch: Any, batch_size: int, size: int, output: str = "floats", dtype: "torch.dtype | None" = None
) -> dict[str, Any]:
    """What a batch looks like, after checking that this system did the work that all are compared by.

    Args:
        batch: images and labels.
        batch_size: how many of each.
        size: the side of an image.
        output: as `System.output`.
        dtype: of the images; by default what follows from `output`.
    """
    import torch

    images, labels = batch
    dtype = dtype or (torch.float32 if output == "floats" else torch.uint8)
    expected = (batch_size, size, size, 3) if output == "uint8 last" else (batch_size, 3, size, size)
    if tuple(images.shape) != expected or tuple(labels.shape) != (batch_size,):
        raise RuntimeError(f"images of {tuple(images.shape)} and labels of {tuple(labels.shape)}")
    if images.dtype != dtype:
        raise RuntimeError(f"images of {images.dtype}")
    if torch.cuda.is_available() and not (images.is_cuda and labels.is_cuda):
        raise RuntimeError(f"images on {images.device}, labels on {labels.device}")
    values = images.float()
    return {
        "shape": list(images.shape),
        "dtype": str(images.dtype),
        "device": str(images.device),
        "contiguous": images.is_contiguous(),
        "labels": f"{labels.dtype} on {labels.device}, {len(set(labels.tolist()))} different",
        "mean": round(values.mean().item(), 3),
        "std": round(values.std().item(), 3),
    }


def time_import(name: str) -> float:
    """Import a module, and return the seconds that it took."""
    start = time.perf_counter()
    importlib.import_module(name)
    return round(time.perf_counter() - start, 4)


def imported(system: System) -> dict[str, float]:
    """Imports what a system needs: the seconds for each module."""
    return {name: time_import(name) for name in system.imports}
