"""A drop-in replacement for ``torch.utils.data.DataLoader`` on NVIDIA DALI.

::

    from torchdali import DALILoader as DataLoader      # the one changed line

:func:`compile` turns a transform into a function from images to a batch, without a dataset.

The package, from the ground up; each part imports only from those above it::

    errors        the exception tree
    runtime       the process and its GPU: threads, exit, devices
    transforms    torchvision's transforms, a rule for each
    sources       where bytes and pixels come from: folders, arrays, indexes
    samples       one sample: its tree, its images, what happens if it is bad
    pipeline      a plan of transforms, compiled to DALI's pipelines and run
    state         where an epoch is, so that it can be resumed
    workers       datasets whose samples worker processes make
    loader        DALILoader: options, session, epochs, explain() and stats()
    lightning, accelerate, ray    the same loader in these frameworks
    tools         the command line
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchdali.runtime.machine import set_connections

if TYPE_CHECKING:
    from torchdali.errors import (
        BatchShapeError,
        DALIUnavailableError,
        PipelineError,
        SampleError,
        TorchDALIError,
        TransformError,
        UnsupportedDatasetError,
    )
    from torchdali.loader import DALILoader
    from torchdali.pipeline.compiled import CompiledTransform, compile  # noqa: A004
    from torchdali.samples.padding import pad_collate
    from torchdali.sources import ImageIndex, image_size
    from torchdali.transforms import Batched, Operator

__all__ = [
    "BatchShapeError",
    "Batched",
    "CompiledTransform",
    "DALILoader",
    "DALIUnavailableError",
    "ImageIndex",
    "Operator",
    "PipelineError",
    "SampleError",
    "TorchDALIError",
    "TransformError",
    "UnsupportedDatasetError",
    "compile",
    "image_size",
    "pad_collate",
]

__version__ = "0.1.0"

_PACKAGES = ("errors", "loader", "pipeline", "runtime", "samples", "sources", "state", "transforms", "workers")
_MODULES = {
    "Batched": "torchdali.transforms",
    "CompiledTransform": "torchdali.pipeline.compiled",
    "DALILoader": "torchdali.loader",
    "ImageIndex": "torchdali.sources",
    "Operator": "torchdali.transforms",
    "compile": "torchdali.pipeline.compiled",
    "image_size": "torchdali.sources",
    "pad_collate": "torchdali.samples.padding",
}
"""The modules of public names. The others are exceptions."""

set_connections()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    A spawned worker imports this package to unpickle its arguments. It needs neither torchvision nor the loader.
    """
    if name in _PACKAGES:
        return import_module(f"torchdali.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "torchdali.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
