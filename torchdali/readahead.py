"""Asking a sampler further ahead than DataLoader would, and leaving its generators as DataLoader would."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ReadAhead"]


class ReadAhead:
    """Counts how often a sampler was asked, and takes back what asking too early drew from a given generator.

    A shuffling sampler draws from its generator when it starts and when it ends. An epoch that is left early may have
    asked the sampler to its end where DataLoader would not have, and the next epoch's order would be another one.

    Args:
        loader: The ``DataLoader``, whose generators and workers count.
    """

    def __init__(self, loader: Any) -> None:
        owners = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        found = [getattr(owner, "generator", None) for owner in owners]
        self._generators = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self._before: deque[list[torch.Tensor]] = deque()
        self._after: list[torch.Tensor] = []
        self._ahead = (loader.prefetch_factor or 0) * loader.num_workers
        self._asked = self._taken = 0

    def ask(self, sampler: Callable[[], Any]) -> Any:
        """One index batch; whatever the sampler raises."""
        if not self._generators:
            return sampler()
        self._before.append(self._states())
        self._asked += 1
        try:
            return sampler()
        finally:
            self._after = self._states()

    def take(self) -> None:
        """A batch was handed out, so that DataLoader would have asked once more."""
        self._taken += 1
        self._forget_what_dataloader_asked()

    def leave(self) -> None:
        """The epoch ends here. Generators that nobody else used meanwhile go back to where DataLoader had left them."""
        self._forget_what_dataloader_asked()
        if self._before and all(map(torch.equal, self._states(), self._after)):
            for generator, state in zip(self._generators, self._before[0], strict=True):
                generator.set_state(state)
        self._before.clear()

    def _forget_what_dataloader_asked(self) -> None:
        while self._before and self._asked - len(self._before) < self._taken + self._ahead:
            self._before.popleft()

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]
