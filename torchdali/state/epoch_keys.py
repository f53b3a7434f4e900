"""The random keys of a loader's epochs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchdali.transforms.rng import Words, epoch_key

__all__ = ["EpochKeys"]

_REPEAT = 2**20
"""Added to the number of an epoch for each repeated pass within it. No later epoch has such a number."""
_RANK = 2**40
"""Added to the number of an epoch for each rank of a sampler that may give one sample to several ranks."""


class EpochKeys:
    """Counts epochs and makes their random keys.

    Args:
        seed: The loader's argument; with None the keys follow from ``DataLoader``'s base seed.

    Attributes:
        epochs: The number of the next epoch.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self.epochs = 0

    def repeat(self) -> None:
        """Count the next pass as a repetition of the epoch that has just ended, with a key of its own."""
        self.epochs += _REPEAT - 1

    def next(self, base_seed: int, samplers: Iterable[Any], persistent_workers: bool, rank: int = 0) -> Words:
        """Return the key of the next epoch, and count it.

        Args:
            base_seed: The seed of the epoch's workers in ``DataLoader``.
            samplers: The samplers with a ``set_epoch``, which may know the number of the epoch.
            persistent_workers: The loader's argument. With it all epochs have the same base seed.
            rank: The rank of a sampler that may give one sample to several ranks.
        """
        number, self.epochs = self.epochs, self.epochs + 1
        if self._seed is None:
            return epoch_key(base_seed, number if persistent_workers else 0)
        for sampler in samplers:
            if hasattr(sampler, "epoch"):
                return epoch_key(self._seed, int(sampler.epoch) + number // _REPEAT * _REPEAT + rank * _RANK)
        return epoch_key(self._seed, number + rank * _RANK)
