"""Cases of the parity certificate, and what is measured of those beside the cases of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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


class GroupCase(NamedTuple):
    """A chain of a group, and its bounds.

    Attributes:
        chain: The transforms.
        bounds: Bounds of the group's figures, in their order; more than there are figures do not matter.
        why: Reason, in one line, if a bound is not 0.
    """

    chain: Sequence[Any]
    bounds: Sequence[float] = (0.0, 0.0, 0.0)
    why: str = ""


@dataclass(frozen=True)
class GroupDifferences:
    """Differences of one chain of a group from the reference, on one device.

    Attributes:
        figures: What is measured, by name.
        error: Why nothing was measured, or empty.
    """

    figures: dict[str, float] = field(default_factory=dict[str, float])
    error: str = ""
