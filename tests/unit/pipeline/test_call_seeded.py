"""Functions on a batch are called with seeded generators, unless they can draw nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchdali.pipeline.fallback import call_seeded
from torchdali.transforms.rng import Draws, epoch_key

CPU = torch.device("cpu")


class Methods:
    """A method has its object, and with it whatever that can call."""

    def __call__(self, samples: Any) -> Any:
        return samples, random.random()

    def lists(self, samples: Any) -> Any:
        return self(samples)


def shadowing() -> Callable[[Any], Any]:
    """Return a function whose ``zip`` is not Python's."""
    names: dict[str, Any] = {"zip": lambda *_: [random.random()]}
    exec("def collate(samples):\n    return tuple(zip(*samples))", names)
    return names["collate"]


def enclosing() -> Callable[[Any], Any]:
    draw = random.random
    return lambda samples: (samples, draw())


class Wrapped:
    """Looks like the function that it holds, and draws."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __call__(self, samples: Any) -> Any:
        return self.function(samples), random.random()


def draw_by_keyword(samples: Any, *, draw: Any = random.random) -> Any:
    return samples, draw()


REARRANGING = [
    lambda samples: tuple(zip(*samples, strict=True)),
    lambda samples: [samples[0], samples[1][0]],
    list,
]
DRAWING = [
    lambda samples: (samples, random.random()),
    lambda samples: (samples, np.random.rand()),  # noqa: NPY002
    lambda samples: (samples, torch.rand(1).item()),
    lambda samples: (lambda: random.random())(),
    lambda samples, draw=random.random: (samples, draw()),
    draw_by_keyword,
    Methods().lists,
    Wrapped(list),
    Wrapped(lambda samples: samples),
    shadowing(),
    enclosing(),
]


def make_draws(epoch: int = 0) -> Draws:
    return Draws(epoch_key(1, epoch), np.arange(2), np.zeros(2, np.int64))


@pytest.mark.parametrize("function", REARRANGING)
def test_functions_that_draw_nothing_cost_nothing(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = function([(1, 2), (3, 4)])
    monkeypatch.setattr("torchdali.pipeline.fallback.fork_generators", None)
    assert call_seeded(function, [(1, 2), (3, 4)], draws=make_draws(), device=CPU) == expected


@pytest.mark.parametrize("function", DRAWING)
def test_functions_that_draw_are_seeded_and_leave_the_generators_alone(function: Any) -> None:
    def call(epoch: int) -> Any:
        return call_seeded(function, [(1, 2), (3, 4)], draws=make_draws(epoch), device=CPU)

    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[union-attr] # noqa: NPY002

    before = states()
    assert call(0) == call(0) != call(1)
    assert states() == before
