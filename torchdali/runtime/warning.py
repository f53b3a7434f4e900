"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_user"]

_LIBRARIES = ("torchdali", "torch", "contextlib", "pytorch_lightning", "lightning", "accelerate")


def warn_user(message: str) -> None:
    """Warn at the innermost frame that is in none of the libraries between the loader and the user's script."""
    frame, level = sys._getframe(1), 2  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 - as warnings does
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
