"""What ``torch.compile`` leaves alone in the functions that it compiles, as it leaves torch's DataLoader alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

__all__ = ["uncompiled"]

_Function = TypeVar("_Function", bound=Callable[..., object])


def uncompiled(function: _Function) -> _Function:
    """The same function, which runs as it is written, and so does all that it calls."""
    return cast("Callable[[_Function], _Function]", torch.compiler.disable)(function)
