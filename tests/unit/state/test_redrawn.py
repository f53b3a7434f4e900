"""A sampler with replacement is passed over many indices at a time, and goes on as torch's would."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from torchdali.state import redrawn as module
from torchdali.state.redrawn import Redrawn, redrawn


def sampler(count: int, generator: Any) -> RandomSampler:
    return RandomSampler(range(1000), replacement=True, num_samples=count, generator=generator)


@pytest.mark.parametrize("given", [True, False], ids=["its own generator", "the global one"])
@pytest.mark.parametrize("asked", [0, 1, 31, 32, 40])
@pytest.mark.parametrize("passed", [0, 1, 31, 32, 33, 64, 200, 1000])
@pytest.mark.parametrize("count", [1, 32, 96, 100, 333])
def test_what_follows_is_what_would_have_followed(
    monkeypatch: pytest.MonkeyPatch, count: int, passed: int, asked: int, given: bool
) -> None:
    """And generators are where they would be, after each index."""
    monkeypatch.setattr(module, "_CHUNK", 64)
    seen: list[Any] = []
    for make in (iter, redrawn):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(5) if given else None
        indices: Any = make(sampler(count, generator))
        first = list(islice(indices, asked))
        if isinstance(indices, Redrawn):
            over = [index for some in indices.take(passed) for index in some.tolist()]
        else:
            over = list(islice(indices, passed))
        states: list[Any] = [first, over]
        for index in (*indices, None):
            where = generator or torch.default_generator
            states.append((index, where.get_state().tolist()))
        seen.append(states)
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore:.*data_source:UserWarning")
def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(RandomSampler):
        pass

    others = [RandomSampler(range(9)), Own(range(9), replacement=True), SequentialSampler(range(9)), [1, 2]]
    assert not any(isinstance(redrawn(one), Redrawn) for one in others)
    assert isinstance(redrawn(sampler(9, None)), Redrawn)
    monkeypatch.setattr(module, "_AT_ONCE", 16)  # as where torch draws in another way one day
    module._as_torchs.cache_clear()
    assert module._as_torchs()  # which makes no difference to the numbers
    draw = Redrawn._draw
    monkeypatch.setattr(Redrawn, "_draw", lambda self, count: draw(self, count) // 2)
    module._as_torchs.cache_clear()
    assert not isinstance(redrawn(sampler(9, None)), Redrawn)
    module._as_torchs.cache_clear()
