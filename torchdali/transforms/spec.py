"""Types of images, parameters and inputs, as known before any image was read."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Kind = Literal["pil", "image", "video", "tensor", "array", "waveform", "volume"]
"""What torchvision would hold: a PIL image, a ``tv_tensors.Image``, ``Video``, a plain tensor or an HWC array.

Rules treat arrays as PIL images, and a video as images that are its frames. A waveform is a plain tensor (C, T), and in
DALI an image of height 1. A volume is a plain tensor (C, D, H, W), and in DALI (D, H, W, C).
"""

First = Literal["conversion", "RGB", "rule", "torch"]
"""First transform of a chain: a conversion from PIL image to tensor, RGB, another rule, or one without a rule."""

Fidelity = Literal["exact", "fast"]


class InputKind(enum.Enum):
    """What the graph is fed for the samples of a batch. Its value is the name of the graph's input.

    Attributes:
        FILES: Paths of image files, one ``(N, L)`` uint8 array, padded with NUL.
        ENCODED: The bytes of image files, one ``(L,)`` uint8 array for each.
        PLACES: Where the bytes of image files lie in larger arrays, as :class:`torchdali.sources.places.Places`.
        PIXELS: Images, HWC, one array or tensor for each or one for all.
        PACKED: Images of any size as bytes, one ``(N, L)`` uint8 array or tensor; an image, then padding.
    """

    FILES = "files"
    ENCODED = "encoded"
    PLACES = "places"
    PIXELS = "pixels"
    PACKED = "packed"

    def __str__(self) -> str:
        return self.value

    @property
    def is_encoded(self) -> bool:
        """Whether the images must be decoded: they have headers, may be truncated, and may need PIL."""
        return self in (InputKind.FILES, InputKind.ENCODED, InputKind.PLACES)


IntArray = npt.NDArray[np.int64]
Params = dict[str, npt.NDArray[Any]]
"""Parameters of one transform for one batch. The first axis of each array is the batch."""

Sample = Mapping[str, Any]
"""Parameters of one transform for one sample: ``array[i]`` of each of :data:`Params`."""

Inputs = dict[str, npt.NDArray[Any]]


class SampleTransformError(Exception):
    """Raised by ``draw`` or ``move``: one sample of the batch cannot be transformed.

    Attributes:
        row: Row of the sample in the batch.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


_SLOW = 3e-3
"""Storage is slow if a thread waits for a file for more seconds than this: ``benchmarks/results/levers-h200.md``."""


class InputStats(NamedTuple):
    """Statistics of the files read so far, which decide the number of threads.

    Attributes:
        non_engine: Share of files that the GPU's JPEG engine does not decode.
        wait: Seconds for which a thread waits for one file from the storage; 0 if it is not measured yet.
        is_on_network: Whether the files lie on a network file system.
    """

    non_engine: float = 0.0
    wait: float = 0.0
    is_on_network: bool = False

    @property
    def is_slow(self) -> bool:
        """Whether a thread waits long for a file. A network file system counts as slow until that is measured."""
        return self.wait > _SLOW or (self.is_on_network and not self.wait)


NO_INPUT_STATS = InputStats()


@dataclass(frozen=True)
class Spec:
    """An image at one place in the chain of transforms.

    Attributes:
        kind: What torchvision would hold here.
        dtype: Element type.
        channels: Number of channels.
        size: ``(height, width)`` if all samples have the same, else None.
        device: Device on which DALI holds the image.
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
        """Return the spec of an image from a dataset. Its float values are unknown."""
        return cls(kind, dtype, channels, unit=not dtype.is_floating_point)

    def with_fill(self, values: Iterable[float]) -> Spec:
        """Return the spec of the image after some of its values became one of these."""
        floating = self.dtype.is_floating_point
        return replace(self, unit=self.unit and (not floating or all(0 <= x <= 1 for x in values)))

    @property
    def dtype_name(self) -> str:
        """The element type as numpy names it."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        if self.kind == "waveform":
            return f"{self.dtype_name} ({self.channels}, T)"
        if self.kind == "volume":
            return f"{self.dtype_name} ({self.channels}, D, H, W)"
        height, width = self.size or ("H", "W")
        frames = "T, " if self.kind == "video" else ""
        return f"{self.dtype_name} ({frames}{self.channels}, {height}, {width})"


def check_fidelity(fidelity: Any) -> None:
    """Raise ValueError unless the value is a :data:`Fidelity`."""
    if fidelity not in ("exact", "fast"):
        raise ValueError(f"fidelity must be 'exact' or 'fast', got {fidelity!r}")
