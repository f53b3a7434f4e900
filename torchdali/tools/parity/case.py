"""A case of the parity certificate."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A chain and its bounds.

    Attributes:
        chain: The transforms.
        max_abs: Bound of the largest absolute difference of a value.
        max_abs_interior: Bound of the same without a border of 4 pixels.
        mean_abs: Bound of the mean absolute difference.
        why: Reason, in one line, if a bound is looser than what the transform promises.
        devices: Devices on which the chain runs in DALI.
        refused: Why the installed torchvision refuses the chain. Empty if it does not.
    """

    chain: list[Any]
    max_abs: float
    max_abs_interior: float
    mean_abs: float
    why: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    refused: str = ""
