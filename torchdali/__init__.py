"""A drop-in replacement for ``torch.utils.data.DataLoader`` on NVIDIA DALI.

::

    from torchdali import DALILoader as DataLoader      # the one changed line

:func:`compile` makes of a transform alone a function from images to a batch.
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
from torchdali.sources import ImageIndex

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
]

__version__ = "0.1.0"

set_connections()
