"""Arguments that choose batches and workers, as DataLoader takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

NONE: dict[str, Any] = {"num_workers": 0}
TWO: dict[str, Any] = {"num_workers": 2}
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
WORKERS = [
    pytest.param(NONE, id="0 workers"),
    pytest.param(TWO, id="2 workers"),
    pytest.param(PERSISTENT, id="2 persistent"),
]


class Uneven:
    """A batch sampler of no fixed size that draws as it goes, and has no length."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count, self.generator = count, generator

    def __iter__(self) -> Iterator[list[int]]:
        for size in (3, 1, 7, 2, 5):
            yield torch.randint(self.count, (size,), generator=self.generator).tolist()


class Eager:
    """A sampler that draws when it is asked for an iterator, not when that is asked for an index."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count, self.generator = count, generator

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count, generator=self.generator).tolist())


class EagerBatches(Eager):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(self.count, generator=self.generator).view(-1, 4).tolist())


def weighted(count: int, generator: torch.Generator | None, replacement: bool) -> WeightedRandomSampler:
    return WeightedRandomSampler(np.arange(1, count + 1), count, replacement, generator)


def subset_random(count: int, generator: torch.Generator | None) -> SubsetRandomSampler:
    return SubsetRandomSampler(range(2, count, 2), generator)


def distributed(count: int, *, shuffle: bool) -> DistributedSampler[Any]:
    return DistributedSampler(range(count), num_replicas=2, rank=1, shuffle=shuffle, seed=3)  # pyright: ignore


Arguments = dict[str, Any]

ARGUMENTS: dict[str, Callable[[int, torch.Generator | None], Arguments]] = {
    "nothing": lambda n, g: {},
    "batch_size": lambda n, g: {"batch_size": 5},
    "shuffle": lambda n, g: {"batch_size": 5, "shuffle": True},
    "shuffle, drop_last": lambda n, g: {"batch_size": 5, "shuffle": True, "drop_last": True},
    "batch_size=None": lambda n, g: {"batch_size": None},
    "batch_size=None, shuffle": lambda n, g: {"batch_size": None, "shuffle": True},
    "sequential": lambda n, g: {"batch_size": 7, "sampler": SequentialSampler(range(n))},
    "random": lambda n, g: {"batch_size": 7, "sampler": RandomSampler(range(n), generator=g)},
    "random, many": lambda n, g: {"batch_size": 7, "sampler": RandomSampler(range(n), num_samples=2 * n + 3)},
    "replacement": lambda n, g: {"batch_size": 6, "sampler": RandomSampler(range(n), True, 70, g)},
    "weighted": lambda n, g: {"batch_size": 5, "sampler": weighted(n, g, replacement=True)},
    "weighted, once": lambda n, g: {"batch_size": 5, "sampler": weighted(n, g, replacement=False)},
    "subset": lambda n, g: {"batch_size": 4, "sampler": subset_random(n, g)},
    "distributed": lambda n, g: {"batch_size": 5, "sampler": distributed(n, shuffle=True)},
    "distributed in order": lambda n, g: {"batch_size": 5, "sampler": distributed(n, shuffle=False)},
    "uneven batches": lambda n, g: {"batch_sampler": Uneven(n, g)},
    "lists": lambda n, g: {"batch_sampler": [[0], [3, 3, 2], list(range(n)), [1]]},
    "tensors": lambda n, g: {"batch_size": 5, "sampler": torch.arange(n - 1, -1, -1)},
    "numpy integers": lambda n, g: {"batch_size": 5, "sampler": np.random.default_rng(1).permutation(n)},
    "negative": lambda n, g: {"batch_size": 5, "sampler": range(-1, -n - 1, -1)},
    "drawn at iter": lambda n, g: {"batch_size": 5, "sampler": Eager(n, g)},
    "drawn at iter, batch_size=None": lambda n, g: {"batch_size": None, "sampler": Eager(n, g)},
    "batches drawn at iter": lambda n, g: {"batch_sampler": EagerBatches(n, g)},
}

# Every order without workers, every third with each kind of workers, because forks take time. One of each is quick.
COMBINED = [
    pytest.param(
        arguments,
        *workers.values,
        own,
        id=f"{name}-{workers.id}-{'generator' if own else 'torch.manual_seed'}",
        marks=[pytest.mark.slow] * (place > 0 and number > 2),
    )
    for number, (name, arguments) in enumerate(ARGUMENTS.items())
    for place, workers in enumerate(WORKERS)
    for own in [bool((number + place) % 2)]
    if place == 0 or number % 3 == place
]
