"""What a case of the parity certificate is."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Case"]


class Case(NamedTuple):
    """A chain and its bounds.

    Attributes:
        chain: The transforms.
        anywhere: Bound of the largest difference of a value.
        inside: The same, but for a border of 4 pixels.
        mean: Bound of the mean difference.
        why: Where a bound is looser than what ``design.py`` promises, the reason, in one line.
        devices: Where the chain runs in DALI.
        refused: Why the installed torchvision refuses the chain; empty where it does not.
    """

    chain: list[Any]
    anywhere: float
    inside: float
    mean: float
    why: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    refused: str = ""
