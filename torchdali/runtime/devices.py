"""The GPU that is this process's own, and calls on it that leave no trace on another one."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["failed", "local_rank", "on", "own"]

_HERE: AbstractContextManager[None] = nullcontext()


def local_rank() -> int | None:
    """The number of this process among those of its host, as ``torchrun`` and others set it; None where nobody did."""
    number = os.environ.get("LOCAL_RANK", "")
    return int(number) if number.isdecimal() else None


def own() -> torch.device:
    """Torch's current CUDA device; where that is the first one, as it is if nobody chose, LOCAL_RANK's.

    LOCAL_RANK does not count where torch does not see as many devices, because each process sees its own alone.
    """
    index, local = torch.cuda.current_device(), local_rank()
    if index == 0 and local is not None and local < torch.cuda.device_count():
        index = local
    return torch.device("cuda", index)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Makes a CUDA device the current one for a block; nothing is done for the CPU.

    Many calls that have nothing to do with the current device make a context on it all the same, which takes some
    hundred MiB there: pinning memory, asking for an event, making a stream current.
    """
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def failed(index: int | None) -> bool:
    """Whether an error has put a CUDA device out of use for the rest of the process; without a number, the CPU."""
    try:
        if index is not None:
            torch.cuda.current_stream(index).query()
    except RuntimeError:  # with which every call of CUDA ends from then on
        return True
    return False
