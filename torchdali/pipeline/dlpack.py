"""DALI's outputs as torch tensors, without a copy.

The contract:

*Memory.* A tensor that is returned here shares DALI's memory and owns it. The memory goes back to DALI's pool when the
last reference is dropped, even after the pipeline was closed. This requires pipelines with dynamic execution. Without
it the next batch would overwrite this one.

*Streams.* The outputs are bound to torch's current CUDA stream at the time when the batch is taken. Work on that
stream, and on streams that wait for it, sees complete data. The host does not wait. When the batch is dropped, its
memory is reused after the work that was queued on that stream until then. The usual rule for tensors that cross streams
applies. Code that reads a batch on another stream must wait first (``other.wait_stream(torch.cuda.current_stream())``).
It must also keep the batch until it has read it, or let the first stream wait for the other one. DALI 2.4 does more,
because DLPack does not tell it which streams used the memory: a thread waits for the whole device before the memory is
reused (https://github.com/dmlc/dlpack/issues/176). This is not promised here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Images", "get_stream", "to_array", "to_torch"]

Images = torch.Tensor | list[torch.Tensor]
"""A batch of images: one tensor, or one per sample if shapes differ."""


def get_stream(device: torch.device) -> Any:
    """Return the stream for ``Pipeline.share_outputs``: torch's current stream, or None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def to_torch(outputs: Any, stream: Any) -> Images:
    """Return a DALI ``TensorList`` as one tensor, the batch dimension first; or one tensor per sample if shapes differ.

    Args:
        outputs: An output of ``share_outputs``.
        stream: The stream that it was bound to, from :func:`get_stream`.
    """
    if outputs.is_dense_tensor() or len({tuple(shape) for shape in outputs.shape()}) == 1:
        return _adopt(outputs.as_tensor(), stream)
    if outputs.ndim() == 1:  # packed for a cache: DALI is slow to make a tensor for each sample
        lengths: list[int] = [length for (length,) in outputs.shape()]
        batch = _adopt(outputs.as_reshaped_tensor([sum(lengths)]), stream)
        return list(torch.split(batch, lengths))
    return [_adopt(outputs[i], stream) for i in range(len(outputs))]


def _adopt(tensor: Any, stream: Any) -> torch.Tensor:
    # Passing a capsule takes a quarter of the time that torch.from_dlpack takes to get one. In DLPack's protocol CUDA's
    # default stream has the number 1.
    capsule = tensor.__dlpack__(stream=stream.cuda_stream or 1) if stream else tensor.__dlpack__()
    return torch.from_dlpack(capsule)


def to_array(outputs: Any) -> npt.NDArray[Any]:
    """Return a copy of a dense CPU ``TensorList`` as an array."""
    array: npt.NDArray[Any] = np.array(outputs.as_tensor())
    return array
