"""Asking a sampler further ahead than DataLoader would, and leaving its generators as DataLoader would."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torchdali.state.context import LoaderView
from torchdali.state.generators import States
from torchdali.state.progress import EpochProgress

__all__ = ["SamplerLookahead"]


class SamplerLookahead:
    """Counts how often a sampler was asked, and takes back what asking too early drew from a given generator.

    A shuffling sampler draws from its generator when it starts and when it ends. An epoch that is left early may have
    asked the sampler to its end where DataLoader would not have, and the next epoch's order would be another one.

    Args:
        view: The arguments of the ``DataLoader``, whose workers count.
        place: Where the epoch is, which is kept.
        stateful: Samplers, and iterators of them, that have a ``state_dict``.
    """

    def __init__(self, view: LoaderView, place: EpochProgress, stateful: Mapping[str, Any]) -> None:
        self._place, self._generators, self._stateful = place, place.generators, stateful
        self._before: deque[States] = deque()
        self._after: States = {}
        self._last = self._generators.states()
        self._drawn(place.made, self._last)
        self._ahead = (view.prefetch_factor or 0) * view.num_workers
        self._taken = place.delivered
        self._keep()

    def resumed(self, first: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """The epoch goes on from another place.

        Args:
            first: What the samplers had said at the epoch's begin.
            kept: What they had said in that place; they need not know it before they are asked.
        """
        self._taken = self._place.delivered
        self._last = self._generators.states()
        self._place.kept.clear()
        self._place.first = dict(first)
        self._place.keep(dict(kept))

    def ask(self, sampler: Callable[[], Any]) -> Any:
        """One index batch; whatever the sampler raises."""
        before = self._generators.states()
        if self._generators.own:
            self._before.append(self._own(before))
        self._place.asked += 1
        try:
            return sampler()
        finally:
            self._note(before, self._generators.states())
            self._keep()

    def _note(self, before: States, after: States) -> None:
        """Keeps what the sampler found where it drew, if that does not follow from what it drew before."""
        drawn = self._drawn(before, after)
        found = {name: before[name] for name in drawn if before[name] != self._last[name]}
        if found and not self._place.disturbed:
            self._place.draws.append((self._place.asked - 1, found))
        self._last, self._after = after, self._own(after)

    def _drawn(self, before: States, after: States) -> list[str]:
        names = [name for name, state in before.items() if state != after.get(name)]
        self._place.used.update(names)
        return names

    def _own(self, states: States) -> States:
        return {name: states[name] for name in self._generators.own}

    def _keep(self) -> None:
        self._place.keep({path: copy.deepcopy(one.state_dict()) for path, one in self._stateful.items()})

    def take(self) -> None:
        """A batch was handed out, so that DataLoader would have asked once more."""
        self._taken += 1
        self._forget_what_dataloader_asked()

    def leave(self) -> None:
        """The epoch ends here. Generators that nobody else used meanwhile go back to where DataLoader had left them."""
        self._forget_what_dataloader_asked()
        if self._before and self._own(self._generators.states()) == self._after:
            self._generators.set(self._before[0])
            self._place.took_back(len(self._before))
        self._before.clear()

    def _forget_what_dataloader_asked(self) -> None:
        while self._before and self._place.asked - len(self._before) < self._taken + self._ahead:
            self._before.popleft()
