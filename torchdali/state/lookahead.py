"""Ask a sampler further ahead than DataLoader would, and leave its generators as DataLoader would."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torchdali.state.generators import States
from torchdali.state.progress import EpochProgress

__all__ = ["SamplerLookahead"]


class SamplerLookahead:
    """Counts requests to a sampler, and can undo what early requests drew from a generator of its own.

    A shuffling sampler draws from its generator when it starts and when it ends. If an epoch is left early, the sampler
    may have been asked to its end where DataLoader would have stopped before. Then the next epoch would have another
    order.

    Args:
        loader: The ``DataLoader``. The number of its workers says how far DataLoader itself looks ahead.
        progress: The epoch's progress, which is updated.
        stateful: Samplers, and iterators of them, that have a ``state_dict``.
    """

    def __init__(self, loader: Any, progress: EpochProgress, stateful: Mapping[str, Any]) -> None:
        self._progress, self._generators, self._stateful = progress, progress.generators, stateful
        self._before: deque[States] = deque()
        self._after: States = {}
        self._last = self._generators.states()
        self._record_draws(progress.rng_at_start, self._last)
        self._ahead = (loader.prefetch_factor or 0) * loader.num_workers
        self._num_yielded = progress.num_yielded
        self._keep_states()

    def restart(self, first_states: Mapping[str, Any], states: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Args:
            first_states: The samplers' states at the start of the epoch.
            states: Their states at the checkpoint. Samplers may return others until they are asked again.
        """
        self._num_yielded = self._progress.num_yielded
        self._last = self._generators.states()
        self._progress.kept_states.clear()
        self._progress.first_states = dict(first_states)
        self._progress.keep_states(dict(states))

    def request(self, sampler: Callable[[], Any]) -> Any:
        """Return one index batch. Raise what the sampler raises."""
        before = self._generators.states()
        if self._generators.own:
            self._before.append(self._select_own(before))
        self._progress.num_requested += 1
        try:
            return sampler()
        finally:
            self._record_request(before, self._generators.states())
            self._keep_states()

    def _record_request(self, before: States, after: States) -> None:
        """Record the states that the sampler drew from, if other code has changed them since its last draw."""
        drawn = self._record_draws(before, after)
        changed = {name: before[name] for name in drawn if before[name] != self._last[name]}
        if changed and self._progress.num_requested == 1:
            self._progress.rng_at_first_request = changed
        elif changed:
            self._progress.is_disturbed = True
        self._last, self._after = after, self._select_own(after)

    def _record_draws(self, before: States, after: States) -> list[str]:
        names = [name for name, state in before.items() if state != after.get(name)]
        self._progress.drawn_from.update(names)
        return names

    def _select_own(self, states: States) -> States:
        return {name: states[name] for name in self._generators.own}

    def _keep_states(self) -> None:
        try:
            states = {path: copy.deepcopy(owner.state_dict()) for path, owner in self._stateful.items()}
        except Exception as error:  # noqa: BLE001 - only a script that saves the loader's state needs to know
            self._progress.failure = f"{type(error).__name__}: {error}"
        else:
            self._progress.keep_states(states)

    def count_yielded(self) -> None:
        """Count a batch that was yielded. DataLoader would then have made one more request."""
        self._num_yielded += 1
        self._drop_requests_of_dataloader()

    def rewind(self) -> None:
        """End the epoch early: rewind the generators to where DataLoader would have left them.

        Generators that other code has used since stay as they are.
        """
        self._drop_requests_of_dataloader()
        if self._before and self._select_own(self._generators.states()) == self._after:
            self._generators.set(self._before[0])
            self._progress.num_requested -= len(self._before)
        self._before.clear()

    def _drop_requests_of_dataloader(self) -> None:
        while self._before and self._progress.num_requested - len(self._before) < self._num_yielded + self._ahead:
            self._before.popleft()
