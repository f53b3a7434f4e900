"""The generators of a sampler are found wherever it has them, and their states go through text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from torchdali.state.generators import Generators, from_text, to_text

KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda rng: torch.rand(1, generator=rng).item()),
    "python": (lambda: random.Random(1), lambda rng: rng.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda rng: rng.random()),
    "numpy's Mersenne twister": (lambda: np.random.Generator(np.random.MT19937(1)), lambda rng: rng.random()),
    "numpy's of old": (lambda: np.random.RandomState(1), lambda rng: rng.rand()),
}


class Order:
    """A sampler with a generator in an attribute of any name."""

    def __init__(self, rng: Any) -> None:
        self.whatever = rng

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_generator_is_found_and_its_state_restored(kind: str) -> None:
    make, draw = KINDS[kind]
    rng = make()
    draw(rng)
    generators = Generators(DataLoader(range(4), sampler=Order(rng)))  # pyright: ignore
    assert list(generators.own) == ["sampler.whatever"]
    states = {name: from_text(to_text(state)) for name, state in generators.states().items()}
    true = [draw(rng) for _ in range(3)]
    assert states.keys() == {"sampler.whatever", "torch", "python", "numpy"}
    generators.set(states)
    assert [draw(rng) for _ in range(3)] == true
