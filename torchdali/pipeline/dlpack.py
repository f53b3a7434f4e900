"""DALI's outputs as torch tensors, without a copy.

The contract:

*Memory.* A tensor handed out here shares DALI's memory and owns it: the memory goes back to DALI's pool when the
last reference is dropped, also after the pipeline is gone. This holds because pipelines are built with dynamic
execution; without it the next batch would overwrite this one.

*Streams.* The outputs are bound to the CUDA stream that is torch's current one when the batch is taken. Work on
that stream, and on streams that wait for it, sees complete data, and the host does not wait. When the batch is
dropped, its memory is reused after the work that was queued on that stream by then. So, as with every tensor of
torch that crosses streams: code that reads a batch on another stream waits first
(``other.wait_stream(torch.cuda.current_stream())``) and keeps the batch, or lets the first stream wait in
turn, until it has read. DALI 2.4 does more than that: a thread of its own waits for the whole device before it takes
the memory back, since DLPack says nothing of streams at the end. It is not promised here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Images", "stream_of", "to_array", "to_torch"]

Images = torch.Tensor | list[torch.Tensor]
"""A batch of them: one tensor, or one a sample where shapes differ."""


def stream_of(device: torch.device) -> Any:
    """What ``Pipeline.share_outputs`` is to bind the outputs to: torch's current stream, or None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def to_torch(outputs: Any, stream: Any) -> Images:
    """A DALI ``TensorList`` as one tensor with the batch in front; one tensor a sample where shapes differ.

    Args:
        outputs: What ``share_outputs`` gave.
        stream: The stream that it was bound to, of :func:`stream_of`.
    """
    if outputs.is_dense_tensor() or len({tuple(shape) for shape in outputs.shape()}) == 1:
        return _adopt(outputs.as_tensor(), stream)
    if outputs.ndim() == 1:  # a cache's, for whom parts of one tensor will do: DALI takes its time for each
        lengths: list[int] = [length for (length,) in outputs.shape()]
        whole = _adopt(outputs.as_reshaped_tensor([sum(lengths)]), stream)
        return list(torch.split(whole, lengths))
    return [_adopt(outputs[i], stream) for i in range(len(outputs))]


def _adopt(tensor: Any, stream: Any) -> torch.Tensor:
    # A capsule made here costs a quarter of letting torch.from_dlpack ask for it. In DLPack's protocol
    # CUDA's default stream has the number 1.
    capsule = tensor.__dlpack__(stream=stream.cuda_stream or 1) if stream else tensor.__dlpack__()
    return torch.from_dlpack(capsule)


def to_array(outputs: Any) -> npt.NDArray[Any]:
    """A dense CPU ``TensorList`` as an array."""
    array: npt.NDArray[Any] = np.array(outputs.as_tensor())
    return array
