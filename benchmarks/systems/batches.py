"""Describe a batch and the environment of a measured process."""

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
PACKAGES = ("torch", "torchvision", "nvidia.dali", "torchdali", "numpy", "kornia", "spdl", "ffcv")


def set_queues(imports: tuple[str, ...], queues: int | None = None) -> None:
    """Set the number of hardware queues that the system alone would have, before CUDA starts.

    The harness has imported torchdali, which sets 32. Other systems get the driver's own number, or `queues`.
    """
    os.environ.pop(VARIABLE, None)
    if queues is not None:
        os.environ[VARIABLE] = str(queues)
    if "torchdali" in imports:
        machine.set_connections()


def surroundings() -> dict[str, Any]:
    """Return versions, the GPU's name and environment variables."""
    return metrics.describe_environment(PACKAGES)


def describe(
    batch: Any, batch_size: int, size: int, output: str = "floats", dtype: "torch.dtype | None" = None
) -> dict[str, Any]:
    """Describe a batch, after checking that the system did the same work as the others.

    Args:
        batch: Images and labels.
        batch_size: Number of images.
        size: Side of an image, in pixels.
        output: As `System.output`.
        dtype: Element type of the images. By default it follows from `output`.
    """
    import torch

    images, labels = batch
    dtype = dtype or (torch.float32 if output == "floats" else torch.uint8)
    expected = (batch_size, size, size, 3) if output == "uint8 last" else (batch_size, 3, size, size)
    if tuple(images.shape) != expected or tuple(labels.shape) != (batch_size,):
        raise RuntimeError(f"images must be {expected}, got {tuple(images.shape)} and labels {tuple(labels.shape)}")
    if images.dtype != dtype:
        raise RuntimeError(f"images must be {dtype}, got {images.dtype}")
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


def import_modules(system: System) -> dict[str, float]:
    """Import the modules of a system, and return the seconds for each."""
    return {name: time_import(name) for name in system.imports}
