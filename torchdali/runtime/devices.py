"""The GPU that belongs to this process, and calls on it that leave no CUDA context on another one."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["find_own", "get_local_rank", "has_failed", "use"]

_HERE: AbstractContextManager[None] = nullcontext()


def get_local_rank() -> int | None:
    """Return this process's number among those of its host, as ``torchrun`` and others set it, or None."""
    number = os.environ.get("LOCAL_RANK", "")
    return int(number) if number.isdecimal() else None


def find_own() -> torch.device:
    """Return torch's current CUDA device. If that is the first one, the default, return LOCAL_RANK's instead.

    LOCAL_RANK is ignored if torch sees fewer devices, because then each process sees only its own.
    """
    index, local = torch.cuda.current_device(), get_local_rank()
    if index == 0 and local is not None and local < torch.cuda.device_count():
        index = local
    return torch.device("cuda", index)


def use(device: torch.device) -> AbstractContextManager[None]:
    """Make a CUDA device the current one for a block. For the CPU, do nothing.

    Many calls make a context on the current device although they do not use it, and that takes some hundred MiB.
    Examples are pinning memory, querying an event and making a stream current.
    """
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def has_failed(index: int | None) -> bool:
    """Return True if an error has made a CUDA device unusable for the rest of the process. None means the CPU."""
    try:
        if index is not None:
            torch.cuda.current_stream(index).query()
    except RuntimeError:  # after such an error every CUDA call raises it again
        return True
    return False
