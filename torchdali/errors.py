"""What torchdali raises.

::

    TorchDALIError
    ├── DALIUnavailableError (ImportError)   DALI is missing, or does not fit this machine
    ├── UnsupportedDatasetError (TypeError)  a dataset that cannot be read without asking it for samples
    ├── TransformError (ValueError)          a chain of transforms that cannot make a batch
    ├── SampleError (RuntimeError)           one sample is missing, damaged or unreadable
    ├── BatchShapeError (RuntimeError)       the images of a batch differ in shape
    └── PipelineError (RuntimeError)         DALI failed, and no file is to blame

Each also derives from the built-in type that comes closest to what ``torch.utils.data.DataLoader`` raises.
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
    """The dataset cannot be read without calling its ``__getitem__``; a loader asks it for samples then."""


class TransformError(TorchDALIError, ValueError):
    """The transforms, taken together, do not end in something that can be batched."""


class BatchShapeError(TorchDALIError, RuntimeError):
    """The images of one batch have different shapes, so that they cannot be stacked."""


class PipelineError(TorchDALIError, RuntimeError):
    """DALI failed on a batch although PIL reads all of its files."""


class SampleError(TorchDALIError, RuntimeError):
    """One sample could not be read or decoded.

    Attributes:
        index: The sample's index in the loader's dataset.
        path: The file's path; of an image that is in no file, what it is and where.
        reason: What is wrong with it.
    """

    def __init__(self, index: int, path: str, reason: str) -> None:
        super().__init__(index, path, reason)
        self.index = index
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.index} ({self.path}): {self.reason}"


class OptionError(ValueError):
    """What a command was given is wrong. A ``ValueError`` of the user's own code is none, and keeps its traceback."""
