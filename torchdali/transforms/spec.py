"""What is known of an image between two transforms, before any image has been seen."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "NOTHING_SEEN",
    "Fidelity",
    "First",
    "InputKind",
    "InputStats",
    "Inputs",
    "IntArray",
    "Kind",
    "Params",
    "Sample",
    "Spec",
    "check_fidelity",
]

Kind = Literal["pil", "image", "tensor", "array"]
"""What torchvision would be holding: a PIL image, a ``tv_tensors.Image``, a plain tensor, an array HWC.

Rules know no arrays, which are PIL images to them.
"""

First = Literal["conversion", "rule", "torch"]
"""What the transforms begin with: what makes tensors of PIL images, another rule, or a transform without a rule."""

Fidelity = Literal["exact", "fast"]


class InputKind(enum.Enum):
    """What the graph is fed for the samples of a batch. Its value is the name of the graph's input.

    Attributes:
        FILES: Paths of image files, one ``(N, L)`` uint8 array, padded with NUL.
        ENCODED: The bytes of image files, one ``(L,)`` uint8 array for each.
        PIXELS: Images, HWC, one array or tensor for each or one for all.
        PACKED: Images of any size as bytes, one ``(N, L)`` uint8 array or tensor; an image, then padding.
    """

    FILES = "files"
    ENCODED = "encoded"
    PIXELS = "pixels"
    PACKED = "packed"

    def __str__(self) -> str:
        return self.value

    @property
    def is_encoded(self) -> bool:
        """Whether the images must be decoded: they have headers, may be truncated, and may need PIL."""
        return self in (InputKind.FILES, InputKind.ENCODED)


IntArray = npt.NDArray[np.int64]
Params = dict[str, npt.NDArray[Any]]
"""Parameters of one transform for one batch: each array has the batch in front."""

Sample = Mapping[str, Any]
"""The same parameters for one sample: what is left of :data:`Params` after ``array[i]``."""

Inputs = dict[str, npt.NDArray[Any]]


class InputStats(NamedTuple):
    """What the files that were seen so far say of the threads that they need.

    Attributes:
        beside: The share of them that are not for a card's JPEG engine.
        wait: Seconds for which one keeps a thread waiting until the storage gives it.
    """

    beside: float = 0.0
    wait: float = 0.0


NOTHING_SEEN = InputStats()


@dataclass(frozen=True)
class Spec:
    """An image at one place in the chain of transforms.

    Attributes:
        kind: What torchvision would be holding here.
        dtype: Element type.
        channels: Number of channels.
        size: ``(height, width)`` where it is the same for every sample, else None.
        device: Where DALI has it.
        unit: Whether floating-point values are in [0, 1].
    """

    kind: Kind = "pil"
    dtype: torch.dtype = torch.uint8
    channels: int = 3
    size: tuple[int, int] | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    unit: bool = True

    @classmethod
    def from_input(cls, kind: Kind, dtype: torch.dtype, channels: int) -> Spec:
        """An image that a dataset gives, into whose values nobody has looked."""
        return cls(kind, dtype, channels, unit=not dtype.is_floating_point)

    def with_fill(self, values: Iterable[float]) -> Spec:
        """The image after some of it became one of these values."""
        floating = self.dtype.is_floating_point
        return replace(self, unit=self.unit and (not floating or all(0 <= x <= 1 for x in values)))

    def __str__(self) -> str:
        height, width = self.size or ("H", "W")
        return f"{str(self.dtype).removeprefix('torch.')} ({self.channels}, {height}, {width})"


def check_fidelity(fidelity: Any) -> None:
    """Raises ValueError of what is no :data:`Fidelity`."""
    if fidelity not in ("exact", "fast"):
        raise ValueError(f"fidelity is 'exact' or 'fast', not {fidelity!r}")
