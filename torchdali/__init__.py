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
    lightning, accelerate    the same loader in these frameworks
    tools         the command line
"""

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
from torchdali.runtime.machine import set_connections
from torchdali.sources import ImageIndex, image_size

__all__ = [
    "BatchShapeError",
    "CompiledTransform",
    "DALILoader",
    "DALIUnavailableError",
    "ImageIndex",
    "PipelineError",
    "SampleError",
    "TorchDALIError",
    "TransformError",
    "UnsupportedDatasetError",
    "compile",
    "image_size",
]

__version__ = "0.1.0"

set_connections()
