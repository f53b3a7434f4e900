"""CUDA events that a forked process may inherit."""

from __future__ import annotations

from typing import Any

import torch

from torchdali.runtime.lifecycle import Resource

__all__ = ["Event"]


class Event(Resource, torch.cuda.Event):
    """A ``torch.cuda.Event`` that a forked process does not free.

    To free an event, torch calls CUDA. CUDA refuses that in a forked process, and then torch aborts the process.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
