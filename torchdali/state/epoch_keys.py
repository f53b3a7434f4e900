"""The random keys of a loader's epochs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchdali.transforms.rng import Words, epoch_key

__all__ = ["AGAIN", "EpochKeys"]

AGAIN = 2**20
"""What the number of an epoch grows by each time a loader comes round again within one of a Trainer's, so that no later
epoch has that one."""


class EpochKeys:
    """The random keys of a loader's epochs.

    Args:
        seed: The user's; None takes DataLoader's base seed.

    Attributes:
        epochs: The number of the next one.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self.epochs = 0

    def next(self, base_seed: int, samplers: Iterable[Any], persistent_workers: bool) -> Words:
        """Return the key of the next epoch, and count it.

        Args:
            base_seed: The seed of the epoch's workers in ``DataLoader``.
            samplers: The samplers with a ``set_epoch``, which may know the number of the epoch.
            persistent_workers: The loader's argument. Then all epochs have the same base seed.
        """
        number, self.epochs = self.epochs, self.epochs + 1
        if self._seed is None:
            return epoch_key(base_seed, number if persistent_workers else 0)
        for sampler in samplers:
            if hasattr(sampler, "epoch"):
                return epoch_key(self._seed, int(sampler.epoch) + number // AGAIN * AGAIN)
        return epoch_key(self._seed, number)
