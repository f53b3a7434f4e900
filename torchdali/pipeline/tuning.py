"""Choose the number of DALI's threads and of batches in flight. Neither changes the contents of a batch.

Nothing that changes them is tuned. For example, the pixels of the card's JPEG engine differ a little from those of the
CUDA decoder. So only the card and the file determine where an image is decoded: an engine gets all baseline JPEGs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchdali.pipeline import jpeg_engine
from torchdali.runtime import machine
from torchdali.transforms.spec import NO_INPUT_STATS, InputKind, InputStats

__all__ = [
    "WAITING",
    "DefaultInt",
    "Threads",
    "check_numbers",
    "choose_decode_bytes",
    "choose_pinned_bytes",
    "choose_prefetch_depth",
]

_FEW = 4
"""Number of threads that keep a JPEG engine busy.

On one H200 with 16 cores, 4 threads made 27,300 images/s and 16 made 27,700. Beside them a ResNet-18 reached 92.4 and
91.0 % of its own speed, because all threads compete with the training for the driver's lock.
"""

_MORE = 56
"""Threads that decode other images as fast as the JPEG engine its own: 2.1 ms an image on a core, 37 us in the engine.
"""

WAITING = 16
"""Number of threads that read headers, or files from slow storage. Each waits for one file and uses no core."""

_PREFETCH_DEPTH = 6

_PINNED_BATCHES = 4
_PINNED_EXTRA = 2**25
"""With these batches and bytes beyond the batches in flight DALI's pool did not grow:
``benchmarks/results/levers-h200.md``."""
_PINNED_MAX = 2**30


class DefaultInt(int):
    """The ``prefetch_factor`` that DataLoader sets if the user gave none. Frameworks that copy a loader pass it on."""

    def __reduce__(self) -> Any:
        """Return the plain number, which ``torch.load(weights_only=True)`` accepts."""
        return int, (int(self),)


class Threads:
    """The number of DALI's CPU threads.

    Args:
        requested: The user's number. With 0 it is chosen.
        device: Where DALI runs.
        input_kind: How samples are fed.
    """

    def __init__(self, requested: int, device: torch.device, input_kind: InputKind) -> None:
        self._requested, self._device = requested, device
        self._cores = machine.count_available_cores()
        self._decodes = input_kind.is_encoded
        self._reads = input_kind is InputKind.FILES
        self._gpu = device.type == "cuda"
        self._engine = self._gpu and self._decodes and jpeg_engine.has_jpeg_engine(device)

    def adapt_to_input(self, input_kind: InputKind) -> Threads:
        """Return the same for samples that are fed in another way."""
        return Threads(self._requested, self._device, input_kind)

    def choose(self, stats: InputStats = NO_INPUT_STATS) -> int:
        """Return the number of threads for a new pipeline.

        Args:
            stats: Statistics of the files that were read so far.
        """
        if self._requested:
            return self._requested
        return max(self._count_working(stats.non_engine), WAITING if self._is_storage_slow(stats) else 0)

    def needs_few(self, stats: InputStats) -> bool:
        """Return whether the card's JPEG engine decodes nearly all files, so that cores are idle."""
        return self._engine and _MORE * stats.non_engine <= _FEW

    def _count_working(self, non_engine: float) -> int:
        """Return the number of threads that decode, or keep the GPU busy."""
        if not self._gpu or (self._decodes and not self._engine):
            return self._cores
        return min(self._cores, max(_FEW, math.ceil(_MORE * non_engine)))

    def _is_storage_slow(self, stats: InputStats) -> bool:
        return self._reads and stats.is_slow

    def explain(self, stats: InputStats = NO_INPUT_STATS) -> str:
        """Return the reason for the number, for ``explain()``."""
        non_engine = stats.non_engine
        if self._requested:
            return "num_workers"
        cores = f"{self._cores} cores that this process may use"
        if self._is_storage_slow(stats) and self._count_working(non_engine) < WAITING:
            if not stats.wait:
                return f"chosen: files lie on a network file system, whose speed is not known yet; of {cores}"
            return f"chosen: storage keeps a thread waiting {stats.wait * 1000:.1f} ms for a file; of {cores}"
        if not self._gpu:
            return f"chosen: the {cores}"
        if not self._decodes:
            return f"chosen: nothing is decoded; of {cores}"
        if not self._engine:
            return f"chosen: the {cores}; the card has no JPEG engine, so CUDA kernels and these threads decode"
        if self.needs_few(stats):
            return f"chosen: what keeps the card's JPEG engine busy; of {cores}"
        return f"chosen: {non_engine:.0%} of the files seen are not for the card's JPEG engine; of {cores}"


def check_numbers(**numbers: Any) -> None:
    """Raise TypeError if a number is no int, and DataLoader's error for a ``prefetch_factor`` of 0."""
    for name, number in numbers.items():
        if number and not hasattr(number, "__index__"):
            raise TypeError(f"{name} must be an int, got {number!r}")
    if numbers.get("prefetch_factor") == 0:
        raise AssertionError("prefetch_factor must be greater than 0")


def choose_prefetch_depth(batch_bytes: int, memory: int, limit: int = 2**30) -> int:
    """Return the number of batches in flight: as many as fit ``memory`` and ``limit`` bytes, from 2 to 6."""
    return max(2, min(_PREFETCH_DEPTH, min(memory, limit) // max(batch_bytes, 1)))


def choose_decode_bytes(memory: int) -> int:
    """Return how many bytes the files and decoded images of a run may take: a 128th of ``memory``, within bounds.

    The bounds are 192 MiB and 1 GiB. 256 images of ImageNet take 170 MB, so that an ordinary batch is one run.
    """
    return max(3 * 2**26, min(memory // 128, 2**30))


def choose_pinned_bytes(batch: int, prefetch_depth: int) -> int:
    """Return how much pinned memory to reserve for the files that DALI reads.

    DALI's pool doubles each time that it grows. Then the driver stops the whole process, on an H200 for 100 to 200 ms
    during the training, and the pool becomes larger than necessary.

    Args:
        batch: Bytes of a batch's files; 0 if it reads none.
        prefetch_depth: Batches in flight.
    """
    return min((prefetch_depth + _PINNED_BATCHES) * batch + _PINNED_EXTRA, _PINNED_MAX) if batch else 0
