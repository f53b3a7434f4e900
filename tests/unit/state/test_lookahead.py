"""SamplerLookahead leaves a sampler's generator where DataLoader leaves it."""

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
    """Draws an index at each request."""

    def __init__(self, generator=None):
        self.generator = generator

    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(100, (), generator=self.generator))


def shuffling(generator):
    return RandomSampler(range(SAMPLES), generator=generator)


def lookahead(sampler, workers=0, prefetch=None, stateful=None):
    """Return a lookahead over a loader of integers, its progress, and a function that requests a batch."""
    batches = BatchSampler(sampler, BATCH, drop_last=False)
    loader = DataLoader(range(SAMPLES), batch_sampler=batches, num_workers=workers, prefetch_factor=prefetch)
    generators = Generators(loader)
    progress = EpochProgress(generators, generators.states(), 0)
    ahead, iterator = SamplerLookahead(loader, progress, stateful or {}), iter(batches)
    return ahead, progress, lambda: ahead.request(lambda: next(iterator))


@pytest.mark.parametrize("kind", [shuffling, Lazy])
@pytest.mark.parametrize("workers", [0, 2])
def test_generators_are_left_where_dataloader_leaves_them(kind, workers):
    """DataLoader asks once a batch, and with workers ``prefetch_factor`` times a worker ahead."""
    for yielded in range(BATCHES):
        generator, of_torch = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        ahead, progress, ask = lookahead(kind(generator), workers, 2 if workers else None)
        oracle = iter(BatchSampler(kind(of_torch), BATCH, drop_last=False))
        batches = [ask() for _ in range(BATCHES)]
        with pytest.raises(StopIteration):
            ask()
        for _ in range(yielded):
            ahead.count_yielded()
        requests = min(yielded + 2 * workers, BATCHES + 1)
        expected = [next(oracle, None) for _ in range(requests)]
        assert [*batches, None][:requests] == expected
        ahead.rewind()
        assert torch.equal(generator.get_state(), of_torch.get_state())
        assert progress.num_requested == requests


def test_a_generator_that_others_drew_from_is_not_rewound():
    """Others always draw from the global one, too."""
    generator = torch.Generator().manual_seed(3)
    ahead, progress, ask = lookahead(shuffling(generator))
    ask()
    torch.rand(1, generator=generator)
    state = generator.get_state()
    ahead.rewind()
    assert torch.equal(generator.get_state(), state)
    assert progress.num_requested == 1
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
    state = torch.get_rng_state().numpy().tobytes()
    ask()
    ask()
    assert progress.rng_at_first_request == {"torch": state}
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
    """A sampler whose state is the number of its requests."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def __iter__(self):
        for self.count in range(1, SAMPLES + 1):
            yield self.count


def test_states_of_samplers_are_kept_until_their_batch_is_yielded():
    sampler = Counting()
    ahead, progress, ask = lookahead(sampler, stateful={"sampler": sampler})
    for _ in range(4):
        ask()
    for progress.num_yielded in range(5):
        ahead.count_yielded()
        assert progress.sampler_states() == {"sampler": {"count": 2 * progress.num_yielded}}
    assert progress.first_states == {"sampler": {"count": 0}}


def test_a_resumed_epoch_counts_from_its_checkpoint():
    sampler = Counting()
    ahead, progress, ask = lookahead(sampler, stateful={"sampler": sampler})
    progress.num_requested = progress.num_yielded = 5
    ahead.restart({"sampler": {"count": -1}}, {"sampler": {"count": 10}})
    assert progress.sampler_states() == {"sampler": {"count": 10}}
    assert progress.first_states == {"sampler": {"count": -1}}
    ask()
    assert progress.num_requested == 6


def test_a_request_that_raises_counts():
    ahead, progress, _ = lookahead(Lazy())
    with pytest.raises(ZeroDivisionError):
        ahead.request(lambda: 1 // 0)
    assert progress.num_requested == 1
