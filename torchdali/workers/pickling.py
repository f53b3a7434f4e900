"""Pickle what crosses between workers and the main process before it enters a queue.

A queue of ``multiprocessing`` pickles in a thread of its own. What cannot be pickled is printed there and never
arrives, and whoever waits for it hangs. Pickled before, it is an ordinary exception of the batch that it belongs to.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch._utils import ExceptionWrapper

from torchdali.runtime.exceptions import EpochEndedError

__all__ = ["Pickled", "PicklingCollate", "Sealed", "make_picklable", "pickle_batch", "pickle_indices"]

Value = TypeVar("Value")

_NUMPY_DTYPES = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.float32, torch.float64),
}


class Pickled:
    """An object that is pickled now. The receiver unpickles the object itself.

    Args:
        value: Any object.
        tensors_by_value: Whether tensors on the CPU are copied. Else each crosses as torch sends it, in shared memory
            and by a file descriptor, of which a process has few.

    Raises:
        Exception: What a part of the object raises because it cannot be pickled.
    """

    def __init__(self, value: Any, tensors_by_value: bool = True) -> None:
        self._pickled = _dump(value, tensors_by_value)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


class Sealed(Generic[Value]):
    """An object that crosses to another process as bytes, and is unpickled there when it is first needed.

    Args:
        value: The object. Its tensors are copied.
    """

    def __init__(self, value: Value) -> None:
        self._value, self._pickled = value, b""

    def open(self) -> Value:
        """Return the object."""
        if self._pickled:
            self._value, self._pickled = pickle.loads(self._pickled), b""
        return self._value

    def __getstate__(self) -> dict[str, Any]:
        return {"_value": None, "_pickled": self._pickled or _dump(self._value, tensors_by_value=True)}


class PicklingCollate:
    """A worker's ``collate_fn`` that pickles what the user's returns.

    Args:
        collate_fn: The user's.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate = collate_fn

    def __call__(self, samples: Any) -> Pickled:
        """Collate and pickle samples."""
        return pickle_batch(self._collate(samples))


def pickle_batch(batch: Any, tensors_by_value: bool = False) -> Pickled:
    """Pickle a batch, or what belongs to it, in its worker.

    Raises:
        RuntimeError: It cannot be pickled.
    """
    try:
        return Pickled(batch, tensors_by_value)
    except Exception as error:
        raise RuntimeError(
            f"a batch could not be sent from its worker ({type(error).__name__}: {error}); leave out in the dataset or "
            "in collate_fn what cannot be pickled, or set num_workers=0; of too many open files, raise the limit "
            "(ulimit -n)"
        ) from error


def pickle_indices(indices: Any) -> Pickled:
    """Pickle the indices of a batch in the main process.

    Raises:
        EpochEndedError: They cannot be pickled.
    """
    try:
        return Pickled(indices)
    except Exception as error:
        raise EpochEndedError(
            f"the indices of a batch could not be sent to a worker ({type(error).__name__}: {error}); leave out in the "
            "sampler what cannot be pickled, or set num_workers=0"
        ) from error


def make_picklable(failure: ExceptionWrapper) -> ExceptionWrapper:
    """Replace the class of a worker's exception by RuntimeError if that class cannot be pickled. Its text stays."""
    try:
        ForkingPickler.dumps(failure.exc_type)
    except Exception:  # noqa: BLE001 - whatever a metaclass raises
        failure.exc_type = RuntimeError
    return failure


def _dump(value: Any, tensors_by_value: bool) -> bytes:
    stream = io.BytesIO()
    (_ByValuePickler if tensors_by_value else ForkingPickler)(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


class _ByValuePickler(ForkingPickler):
    """The pickler of ``multiprocessing``, except that tensors on the CPU are copied."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type == "cpu" and obj.layout == torch.strided:
            return NotImplemented if obj.is_nested else _reduce_tensor(obj)
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            # A typed storage warns when it is asked for its device.
            untyped: Any = getattr(obj, "_untyped_storage", obj)
            if untyped.device.type == "cpu":
                return _reduce_storage(untyped) if obj is untyped else cast("Any", obj).__reduce__()
        return NotImplemented


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Reduce the storage of a tensor of uint16 and other types that torch itself saves and does not load again."""
    return _make_storage, (torch.empty(0, dtype=torch.uint8).set_(cast("Any", storage)).numpy(),)


def _make_storage(data: Any) -> Any:
    """Return a storage in the class that torch expects when it builds a tensor again."""
    untyped = torch.from_numpy(data).untyped_storage()
    return torch.TypedStorage(wrap_storage=untyped, dtype=torch.uint8, _internal=True)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if type(tensor) is torch.Tensor and tensor.dtype in _NUMPY_DTYPES and not tensor.requires_grad:
        return torch.from_numpy, (np.ascontiguousarray(tensor.resolve_neg().numpy()).reshape(tensor.shape),)
    if tensor.untyped_storage().nbytes() > tensor.nbytes:  # else the whole storage that it is a view of would cross
        tensor = tensor.clone()
    return cast("Any", tensor).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
