"""Events of CUDA's streams, which a forked process inherits."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Event", "OwnedByProcess"]


class OwnedByProcess:
    """What only the process that made it frees; in one that was forked it stays, whoever drops it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._process = os.getpid()

    # Names of the module are gone before the last objects, when the interpreter ends.
    def __del__(
        self,
        own: Callable[[], int] = os.getpid,
        keep: Callable[[Any], Any] = ctypes.pythonapi.Py_IncRef,
        reference: Callable[[Any], Any] = ctypes.py_object,
    ) -> None:
        if self._process != own():
            keep(reference(self))


class Event(OwnedByProcess, torch.cuda.Event):
    """As ``torch.cuda.Event``.

    To free one, torch calls CUDA, which refuses that to forked processes, and torch then aborts the process.
    """
