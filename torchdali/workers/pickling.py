"""What of samples crosses from a worker, by value and in one piece.

What goes into a queue of ``multiprocessing`` is pickled by a thread of the queue's: what cannot be pickled is printed
there and never comes, and each tensor on the CPU takes a file descriptor, of which a process has few.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch

__all__ = ["Pickled"]

_NUMPYS = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.float32, torch.float64),
}


class Pickled:
    """An object that is pickled now and, on the other side, is what it was.

    Args:
        value: Any object.

    Raises:
        Exception: Whatever its parts raise where they cannot be pickled.
    """

    def __init__(self, value: Any) -> None:
        stream = io.BytesIO()
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
        self._pickled = stream.getvalue()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


class _Pickler(ForkingPickler):
    """As that of ``multiprocessing``, but that tensors on the CPU do not go into shared memory."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type == "cpu" and obj.layout == torch.strided:
            return _of_tensor(obj)
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            # A typed one warns where it is asked for its device.
            untyped: Any = getattr(obj, "_untyped_storage", obj)
            return cast("Any", obj).__reduce__() if untyped.device.type == "cpu" else NotImplemented
        return NotImplemented


def _of_tensor(tensor: torch.Tensor) -> Any:
    if type(tensor) is torch.Tensor and tensor.dtype in _NUMPYS and not tensor.requires_grad:
        return torch.from_numpy, (np.ascontiguousarray(tensor.resolve_neg().numpy()).reshape(tensor.shape),)
    if tensor.untyped_storage().nbytes() > tensor.nbytes:  # else all that it is a part of would cross
        tensor = tensor.clone()
    return cast("Any", tensor).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
