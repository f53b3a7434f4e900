"""What a loader chooses by itself: DALI's threads and the batches in flight. Neither changes what is in a batch.

What would change it is not tuned. Which images the card's JPEG engine decodes follows from the card and the file alone,
because the engine's pixels are not quite those of the CUDA decoder: all baseline JPEGs where there is an engine.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchdali.pipeline import jpeg_engine
from torchdali.runtime import machine
from torchdali.transforms.spec import NOTHING_SEEN, InputKind, InputStats

__all__ = ["WAITING", "DefaultInt", "Threads", "check_numbers", "fitting_window", "pinned_bytes"]

_FEW = 4
"""Threads that keep a JPEG engine busy.

On one H200 with 16 cores 4 threads made 27,300 images/s and 16 made 27,700; a ResNet-18 beside them reached 92.4 and
91.0 % of what it does alone, because every thread takes the driver's lock from the one that launches its kernels.
"""

_MORE = 56
"""Threads that decode as fast as the JPEG engine what is not for it: 2.1 ms an image on a core, 37 us in the engine."""

WAITING = 16
"""Threads that read headers, and files where storage is slow: each waits for one, and none works meanwhile."""

_SLOW = 3e-3
"""Seconds for which a file keeps a thread waiting where storage is slow: ``benchmarks/results/levers-h200.md``."""

_WINDOW = 6

_PINNED_BATCHES = 4
_PINNED_BESIDE = 2**25
"""Batches beyond the window, and bytes, with which DALI's pool did not grow: ``benchmarks/results/levers-h200.md``."""
_PINNED_MOST = 2**30


class DefaultInt(int):
    """The ``prefetch_factor`` that DataLoader puts where none was given, for who makes a loader of another's."""

    def __reduce__(self) -> Any:
        """Saved, it is a number, which ``torch.load(weights_only=True)`` takes."""
        return int, (int(self),)


class Threads:
    """The number of DALI's CPU threads.

    Args:
        asked: The user's; 0 lets it be chosen.
        device: Where DALI runs.
        input_kind: What the graph is fed.
    """

    def __init__(self, asked: int, device: torch.device, input_kind: InputKind) -> None:
        self._asked = asked
        self._cores = machine.available_cores()
        self._decodes = input_kind.is_encoded
        self._reads = input_kind is InputKind.FILES
        self._gpu = device.type == "cuda"
        self._engine = self._gpu and self._decodes and jpeg_engine.has_jpeg_engine(device)

    def number(self, seen: InputStats = NOTHING_SEEN) -> int:
        """How many threads to build a pipeline with.

        Args:
            seen: What is known of the files by now.
        """
        if self._asked:
            return self._asked
        return max(self._working(seen.beside), WAITING if self._awaits(seen) else 0)

    def _working(self, beside: float) -> int:
        """Threads that decode or launch kernels as fast as they can be decoded."""
        if not self._gpu or (self._decodes and not self._engine):
            return self._cores
        return min(self._cores, max(_FEW, math.ceil(_MORE * beside)))

    def _awaits(self, seen: InputStats) -> bool:
        return self._reads and seen.wait > _SLOW

    def why(self, seen: InputStats = NOTHING_SEEN) -> str:
        """Where the number comes from, for ``explain()``."""
        beside = seen.beside
        if self._asked:
            return "num_workers"
        cores = f"{self._cores} cores that this process may use"
        if self._awaits(seen) and self._working(beside) < WAITING:
            return f"chosen: storage keeps a thread waiting {seen.wait * 1000:.1f} ms for a file; of {cores}"
        if not self._gpu:
            return f"chosen: the {cores}"
        if not self._decodes:
            return f"chosen: nothing is decoded; of {cores}"
        if not self._engine:
            return f"chosen: the {cores}; the card has no JPEG engine, so CUDA kernels and these threads decode"
        if _MORE * beside <= _FEW:
            return f"chosen: what keeps the card's JPEG engine busy; of {cores}"
        return f"chosen: {beside:.0%} of the files seen are not for the card's JPEG engine; of {cores}"


def check_numbers(**numbers: Any) -> None:
    """Raises TypeError of what is no whole number, and what DataLoader raises of a ``prefetch_factor`` of 0."""
    for name, number in numbers.items():
        if number and not hasattr(number, "__index__"):
            raise TypeError(f"{name} is a whole number, not {number!r}")
    if numbers.get("prefetch_factor") == 0:
        raise AssertionError("prefetch_factor must be greater than 0")


def fitting_window(batch_bytes: int, memory: int, most: int = 2**30) -> int:
    """How many batches are in flight: as many as fit ``memory`` bytes and ``most``, at least 2 and at most 6."""
    return max(2, min(_WINDOW, min(memory, most) // max(batch_bytes, 1)))


def pinned_bytes(batch: int, window: int) -> int:
    """Pinned memory that DALI takes for the files that it reads, to have it before they come.

    DALI's pool takes twice as much each time that it grows. The driver holds up all of the process for the last time,
    100 to 200 ms on an H200, which then is in the midst of a training; and the pool has become larger than it need be.

    Args:
        batch: Bytes of a batch's files; 0 where it reads none.
        window: Batches in flight.
    """
    return min((window + _PINNED_BATCHES) * batch + _PINNED_BESIDE, _PINNED_MOST) if batch else 0
