"""What a case of the parity certificate is."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Case"]


class Case(NamedTuple):
    """A chain and its bounds.

    Attributes:
        chain: The transforms.
        max_abs: Bound of the largest difference of a value.
        max_abs_interior: The same, but for a border of 4 pixels.
        mean_abs: Bound of the mean difference.
        why: Where a bound is looser than what ``design.py`` promises, the reason, in one line.
        devices: Where the chain runs in DALI.
        refused: Why the installed torchvision refuses the chain; empty where it does not.
    """

    chain: list[Any]
    max_abs: float
    max_abs_interior: float
    mean_abs: float
    why: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    refused: str = ""
