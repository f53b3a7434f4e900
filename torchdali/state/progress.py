"""Progress of an epoch: plain values that outlive the epoch's iterator."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torchdali.state.generators import Generators, States
from torchdali.state.stream import StreamProgress

__all__ = ["Checkpoint", "EpochProgress"]


@dataclass
class Checkpoint:
    """A loaded state that was checked.

    Attributes:
        state: The dictionary. Its keys are those of the first release, so that old states can be loaded.
        rng_now: The generators' states when it was taken.
        rng_at_start: The generators' states just before the epoch's iterator was made.
        rng_at_first_request: As in :class:`EpochProgress`.
        streams: As in :class:`EpochProgress`.
    """

    state: dict[str, Any]
    rng_now: States
    rng_at_start: States
    rng_at_first_request: States
    streams: dict[int, StreamProgress]

    @property
    def in_progress(self) -> bool:
        """Whether it was taken within an epoch."""
        return bool(self.state["begun"])

    @property
    def num_yielded(self) -> int:
        """Number of batches that the epoch had yielded."""
        return self.state["batches"]

    @property
    def base_seed(self) -> int | None:
        """The seed of DataLoader's workers, or None if it was not drawn yet."""
        return self.state["base_seed"]

    def sampler_state(self, path: str) -> dict[str, Any]:
        """Return what is saved of a sampler."""
        return self.state["samplers"].get(path, {})


@dataclass
class EpochProgress:
    """Progress of one epoch.

    Attributes:
        generators: The generators that the order of samples depends on.
        rng_at_start: Their states just before the epoch's iterator was made.
        epoch: The epoch's number, which may be part of its random key.
        samplers: The epochs of the samplers that have one.
        num_iterators: How often the sampler was asked for an iterator.
        drew_base_seed: Whether the base seed was drawn for this epoch.
        base_seed: The seed of DataLoader's workers.
        start: Number of samples, in the order that all ranks share, that were consumed by another number of ranks.
        num_requested: How often the sampler was asked for indices.
        num_yielded: Number of batches that were yielded.
        rng_at_first_request: The states that the sampler drew from at its first request, if other code had changed them
            since the epoch began.
        is_disturbed: Whether other code changed a generator between two later draws of the sampler.
        drawn_from: Names of the generators that were drawn from.
        first_states: The states of stateful samplers at the start of the epoch.
        kept_states: The same after each number of requests that ``state_dict()`` may still need.
        streams: For an ``IterableDataset``, the progress of each worker that has yielded a batch.
        worker: The worker of the next batch.
        finished: Whether the epoch has come to its end.
        failure: What ``state_dict`` of a sampler raised; empty if nothing.
        checkpoint: The checkpoint to resume from, or None.
    """

    generators: Generators
    rng_at_start: States
    epoch: int
    samplers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    num_iterators: int = 1
    drew_base_seed: bool = True
    base_seed: int | None = None
    start: int = 0
    num_requested: int = 0
    num_yielded: int = 0
    rng_at_first_request: States = field(default_factory=States)
    is_disturbed: bool = False
    drawn_from: set[str] = field(default_factory=set[str])
    first_states: dict[str, Any] = field(default_factory=dict[str, Any])
    kept_states: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque[tuple[int, dict[str, Any]]])
    streams: dict[int, StreamProgress] = field(default_factory=dict[int, StreamProgress])
    worker: int = 0
    finished: bool = False
    failure: str = ""
    checkpoint: Checkpoint | None = None

    def find_failure(self) -> str:
        """Return what ``state_dict`` of the dataset, its iterator or a sampler raised; empty if nothing."""
        return next((x.state["failed"] for x in self.streams.values() if "failed" in x.state), self.failure)

    def advance_stream(self, worker: int, num_workers: int, samples: int, state: dict[str, Any]) -> None:
        """Count a worker's batch, or the exception that it raised instead."""
        self.streams[worker] = self.streams.get(worker, StreamProgress()).advance(samples, state)
        self.worker = (worker + 1) % max(num_workers, 1)

    def keep_states(self, states: dict[str, Any]) -> None:
        """Keep the samplers' states after the latest request, and drop those that are no longer needed."""
        if states:
            self.first_states = self.first_states or states
            self.kept_states.append((self.num_requested, states))
        while self.kept_states and self.kept_states[0][0] < self.num_yielded:
            self.kept_states.popleft()

    def sampler_states(self) -> dict[str, Any]:
        """Return the samplers' states just after the batches that were yielded had been requested."""
        return dict(next((states for requested, states in self.kept_states if requested == self.num_yielded), ()))
