"""CUDA events that a forked process may inherit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Event", "OwnedByProcess"]


class OwnedByProcess:
    """Freed only by the process that made it. A forked process leaks its copy instead.

    This is no :class:`torchdali.runtime.lifecycle.Resource`, because that needs weak references. In torch 2.11 a weak
    reference to a CUDA event outlives the event, and then refers to freed memory. This pull request mends it:
    https://github.com/pytorch/pytorch/pull/183403.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self._process = os.getpid()

    # The defaults are needed at interpreter exit, when the module's names are already gone.
    def __del__(
        self,
        own: Callable[[], int] = os.getpid,
        keep: Callable[[Any], Any] = ctypes.pythonapi.Py_IncRef,
        reference: Callable[[Any], Any] = ctypes.py_object,
    ) -> None:
        if self._process != own():
            keep(reference(self))


class Event(OwnedByProcess, torch.cuda.Event):
    """A ``torch.cuda.Event`` that a forked process does not free.

    To free an event, torch calls CUDA. CUDA refuses that in a forked process, and then torch aborts the process.
    """
