"""The exceptions that torchdali raises.

::

    TorchDALIError
    ├── DALIUnavailableError (ImportError)   DALI is missing, or does not fit this machine
    ├── UnsupportedDatasetError (TypeError)  a dataset whose samples only its __getitem__ can make
    ├── TransformError (ValueError)          a chain of transforms that cannot make a batch
    ├── SampleError (RuntimeError)           one sample is missing, damaged or unreadable
    ├── BatchShapeError (RuntimeError)       the images of a batch differ in shape
    └── PipelineError (RuntimeError)         DALI failed although all files of the batch are readable

Each also derives from a built-in type: the one closest to what ``torch.utils.data.DataLoader`` raises.
"""

from __future__ import annotations

__all__ = [
    "BatchShapeError",
    "DALIUnavailableError",
    "OptionError",
    "PipelineError",
    "SampleError",
    "TorchDALIError",
    "TransformError",
    "UnsupportedDatasetError",
]


class TorchDALIError(Exception):
    """Base of every error that torchdali raises itself."""


class DALIUnavailableError(TorchDALIError, ImportError):
    """NVIDIA DALI cannot be imported or used on this machine; the message says what to install."""


class UnsupportedDatasetError(TorchDALIError, TypeError):
    """The dataset is not native: only its ``__getitem__`` can make its samples. A loader is worker-fed then."""


class TransformError(TorchDALIError, ValueError):
    """The chain of transforms does not end in something that can be batched."""


class BatchShapeError(TorchDALIError, RuntimeError):
    """The images of one batch have different shapes, so that they cannot be stacked."""


class PipelineError(TorchDALIError, RuntimeError):
    """DALI failed on a batch although PIL reads all of its files."""


class SampleError(TorchDALIError, RuntimeError):
    """One sample could not be read or decoded.

    Attributes:
        index: The sample's index in the loader's dataset.
        path: The file's path. For an image that is in no file, its kind and where it is.
        reason: The fault.
    """

    def __init__(self, index: int, path: str, reason: str) -> None:
        super().__init__(index, path, reason)
        self.index = index
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.index} ({self.path}): {self.reason}"


class OptionError(ValueError):
    """An option of a command is wrong. Unlike a ``ValueError`` of the user's code, it needs no traceback."""
