"""Where an epoch is: what is known of it longer than its iterator lives."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torchdali.state.generators import Generators, States

__all__ = ["Checkpoint", "EpochProgress", "StreamProgress"]

_MOST = 8
"""Times that others may have changed a generator between two draws of the sampler."""


@dataclass
class StreamProgress:
    """Where a worker's part of an ``IterableDataset`` is.

    Attributes:
        batches: How many of it had their turn.
        samples: How many samples it was asked for in these.
        state: What the dataset and its iterator say of themselves, by these names; and whether it has "ended". Where
            they say nothing, how often it "raised" an exception.
    """

    batches: int = 0
    samples: int = 0
    state: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def known(self) -> bool:
        """Whether the dataset or its iterator says where it is."""
        return "dataset" in self.state or "iterator" in self.state

    def after(self, samples: int, state: dict[str, Any]) -> StreamProgress:
        """Where it is a batch later."""
        return StreamProgress(self.batches + 1, self.samples + samples, state)


@dataclass
class Checkpoint:
    """A state that was checked.

    Attributes:
        given: The state.
        now: The generators' states when it was taken.
        made: Their states when the epoch's iterator was about to be made.
        draws: As in :class:`EpochProgress`.
        streams: As in :class:`EpochProgress`.
    """

    given: dict[str, Any]
    now: States
    made: States
    draws: list[tuple[int, States]]
    streams: dict[int, StreamProgress]

    @property
    def begun(self) -> bool:
        """Whether it is of an epoch under way."""
        return bool(self.given["begun"])

    @property
    def batches(self) -> int:
        """How many were delivered."""
        return self.given["batches"]

    @property
    def base_seed(self) -> int | None:
        """What DataLoader seeds the epoch's workers with, where it is drawn already."""
        return self.given["base_seed"]

    def of_sampler(self, path: str) -> dict[str, Any]:
        """What it says of a sampler."""
        return self.given["samplers"].get(path, {})


@dataclass
class EpochProgress:
    """Where an epoch is.

    Attributes:
        generators: What the order of its samples depends on.
        made: Their states when the epoch's iterator was about to be made.
        epoch: The epoch's number, which may be a part of its random key.
        samplers: The epochs of the samplers that have one.
        iterators: How often the sampler was asked for an iterator.
        seeded: Whether the base seed was drawn for this epoch.
        base_seed: What DataLoader seeds its workers with.
        start: Samples of the order that the ranks share which had been delivered when there were others.
        asked: How often the sampler was asked for indices.
        delivered: Batches whose turn has come.
        draws: Where the sampler drew from generators that others had changed since it last did: how often it had been
            asked before, and what it found.
        used: Names of the generators that were drawn from.
        first: The states of samplers that have one, at the epoch's begin.
        kept: The same after each number of batches that may come to be asked about.
        streams: Of an ``IterableDataset``, where the workers are that have delivered anything.
        worker: The worker of which the next batch comes, if it has any.
        over: Whether the epoch has come to its end.
        saved: What is to be gone on from.
    """

    generators: Generators
    made: States
    epoch: int
    samplers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    iterators: int = 1
    seeded: bool = True
    base_seed: int | None = None
    start: int = 0
    asked: int = 0
    delivered: int = 0
    draws: list[tuple[int, States]] = field(default_factory=list[tuple[int, States]])
    used: set[str] = field(default_factory=set[str])
    first: dict[str, Any] = field(default_factory=dict[str, Any])
    kept: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque[tuple[int, dict[str, Any]]])
    streams: dict[int, StreamProgress] = field(default_factory=dict[int, StreamProgress])
    worker: int = 0
    over: bool = False
    saved: Checkpoint | None = None

    @property
    def disturbed(self) -> bool:
        """Whether others draw from the sampler's generator too often to follow."""
        return len(self.draws) > _MOST

    def stream_delivered(self, worker: int, workers: int, samples: int, state: dict[str, Any]) -> None:
        """A worker's batch was delivered, or the exception in its place."""
        self.streams[worker] = self.streams.get(worker, StreamProgress()).after(samples, state)
        self.worker = (worker + 1) % max(workers, 1)

    def keep(self, states: dict[str, Any]) -> None:
        """Remembers what samplers say of themselves now, as long as it may be asked for."""
        if states:
            self.first = self.first or states
            self.kept.append((self.asked, states))
        while self.kept and self.kept[0][0] < self.delivered:
            self.kept.popleft()

    def sampler_states(self) -> dict[str, Any]:
        """What the samplers said when the batches that were delivered had been asked for."""
        return dict(next((states for asked, states in self.kept if asked == self.delivered), ()))

    def took_back(self, count: int) -> None:
        """The last times that the sampler was asked are undone."""
        self.asked -= count
        self.draws = [(asked, found) for asked, found in self.draws if asked < self.asked]
