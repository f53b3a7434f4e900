"""Asking a sampler ahead, against the state in which its generator is when only DataLoader asks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from torchdali.state.generators import Generators
from torchdali.state.lookahead import SamplerLookahead
from torchdali.state.progress import EpochProgress

SAMPLES, BATCH = 13, 2
BATCHES = 7


class Lazy:
    """Draws each index when it is asked."""

    def __init__(self, generator=None):
        self.generator = generator

    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(100, (), generator=self.generator))


def shuffling(generator):
    return RandomSampler(range(SAMPLES), generator=generator)


def lookahead(sampler, workers=0, prefetch=None, stateful=None):
    """A lookahead over a loader of integers, its progress, and what asks once more."""
    batches = BatchSampler(sampler, BATCH, drop_last=False)
    loader = DataLoader(range(SAMPLES), batch_sampler=batches, num_workers=workers, prefetch_factor=prefetch)
    generators = Generators(loader)
    progress = EpochProgress(generators, generators.states(), 0)
    ahead, iterator = SamplerLookahead(loader, progress, stateful or {}), iter(batches)
    return ahead, progress, lambda: ahead.request(lambda: next(iterator))


@pytest.mark.parametrize("kind", [shuffling, Lazy])
@pytest.mark.parametrize("ahead_of_dataloader", [0, 2])
@pytest.mark.parametrize("taken", range(BATCHES))
def test_generators_are_left_where_dataloader_leaves_them(kind, ahead_of_dataloader, taken):
    """DataLoader asks once a batch, and with workers ``prefetch_factor`` times a worker ahead."""
    generator, of_torch = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    ahead, progress, ask = lookahead(kind(generator), ahead_of_dataloader, 2 if ahead_of_dataloader else None)
    oracle = iter(BatchSampler(kind(of_torch), BATCH, drop_last=False))
    asked = [ask() for _ in range(BATCHES)]
    with pytest.raises(StopIteration):
        ask()
    for _ in range(taken):
        ahead.count_yielded()
    by_dataloader = min(taken + 2 * ahead_of_dataloader, BATCHES + 1)
    assert asked[: min(by_dataloader, BATCHES)] == [next(oracle) for _ in range(min(by_dataloader, BATCHES))]
    if by_dataloader > BATCHES:
        assert next(oracle, None) is None
    ahead.rewind()
    assert torch.equal(generator.get_state(), of_torch.get_state())
    assert progress.num_requested == by_dataloader


def test_a_generator_that_others_drew_from_is_left_alone():
    generator = torch.Generator().manual_seed(3)
    ahead, progress, ask = lookahead(shuffling(generator))
    ask()
    torch.rand(1, generator=generator)
    state = generator.get_state()
    ahead.rewind()
    assert torch.equal(generator.get_state(), state)
    assert progress.num_requested == 1


def test_the_global_generator_is_not_rewound():
    """Others draw from it, too."""
    ahead, _, ask = lookahead(Lazy())
    ask()
    state = torch.get_rng_state()
    ahead.rewind()
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_that_were_drawn_from_are_named():
    own = torch.Generator().manual_seed(1)
    _, progress, ask = lookahead(Lazy(own))
    ask()
    assert progress.drawn_from == {"batch_sampler.sampler.generator"}
    _, progress, ask = lookahead(Lazy())
    ask()
    assert progress.drawn_from == {"torch"}


def test_the_states_at_the_first_request_are_kept_if_others_changed_them():
    _, progress, ask = lookahead(Lazy())
    torch.manual_seed(7)
    found = torch.get_rng_state().numpy().tobytes()
    ask()
    ask()
    assert progress.rng_at_first_request == {"torch": found}
    assert not progress.is_disturbed


@pytest.mark.parametrize(("kind", "disturbed"), [(Lazy, True), (lambda: RandomSampler(range(SAMPLES)), False)])
def test_only_a_sampler_that_draws_again_is_disturbed_by_others(kind, disturbed):
    _, progress, ask = lookahead(kind())
    ask()
    torch.rand(1)
    assert not progress.is_disturbed
    ask()
    assert progress.rng_at_first_request == {}
    assert progress.is_disturbed is disturbed


class Counting:
    """A sampler that says how often it was asked."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def __iter__(self):
        for self.count in range(1, SAMPLES + 1):
            yield self.count


def test_states_of_samplers_are_kept_until_their_batch_was_handed_out():
    sampler = Counting()
    ahead, progress, ask = lookahead(sampler, stateful={"sampler": sampler})
    for _ in range(4):
        ask()
    for progress.num_yielded in range(5):
        ahead.count_yielded()
        assert progress.sampler_states() == {"sampler": {"count": 2 * progress.num_yielded}}
    assert progress.first_states == {"sampler": {"count": 0}}


def test_after_a_resume_it_counts_from_there():
    sampler = Counting()
    ahead, progress, ask = lookahead(sampler, stateful={"sampler": sampler})
    progress.num_requested = progress.num_yielded = 5
    ahead.restart({"sampler": {"count": -1}}, {"sampler": {"count": 10}})
    assert progress.sampler_states() == {"sampler": {"count": 10}}
    assert progress.first_states == {"sampler": {"count": -1}}
    ask()
    assert progress.num_requested == 6


def test_an_exception_of_the_sampler_counts_as_asked():
    ahead, progress, _ = lookahead(Lazy())
    with pytest.raises(ZeroDivisionError):
        ahead.request(lambda: 1 // 0)
    assert progress.num_requested == 1
