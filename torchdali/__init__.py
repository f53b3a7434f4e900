"""A drop-in replacement for ``torch.utils.data.DataLoader`` on NVIDIA DALI.

::

    from torchdali import DALILoader as DataLoader      # the one changed line
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
from torchdali.machine import set_connections

__all__ = [
    "BatchShapeError",
    "DALILoader",
    "DALIUnavailableError",
    "PipelineError",
    "SampleError",
    "TorchDALIError",
    "TransformError",
    "UnsupportedDatasetError",
]

__version__ = "0.1.0"

set_connections()
