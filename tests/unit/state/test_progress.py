"""The progress of an epoch is plain values, counted here by hand."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from torchdali.state.generators import Generators
from torchdali.state.progress import Checkpoint, EpochProgress
from torchdali.state.stream import StreamProgress


def progress_of(dataset=range(8), **options):
    generators = Generators(DataLoader(dataset, **options))
    return EpochProgress(generators, generators.states(), 0)


def test_a_stream_counts_batches_and_samples_and_keeps_the_latest_state():
    stream = StreamProgress()
    for samples in (3, 3, 2):
        stream = stream.advance(samples, {"iterator": samples})
    assert stream == StreamProgress(batches=3, samples=8, state={"iterator": 2})

    states = ({}, {"raised": 2}, {"iterator": 0}, {"dataset": {}})
    assert [StreamProgress(state=state).has_state for state in states] == [False, False, True, True]


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_come_from_the_workers_in_turn(workers):
    """As in DataLoader, where the main process counts as worker 0."""
    progress = progress_of()
    for worker in [*range(max(workers, 1))] * 2:
        assert progress.worker == worker
        progress.advance_stream(worker, workers, 2, {})
    assert progress.streams == dict.fromkeys(range(max(workers, 1)), StreamProgress(2, 4))


@pytest.mark.parametrize("ahead", [0, 3])
def test_the_states_are_those_of_the_last_batch_that_was_yielded(ahead):
    progress = progress_of()
    progress.keep_states({"sampler": 0})
    for progress.num_requested in range(1, 7):
        progress.num_yielded = max(0, progress.num_requested - ahead)
        progress.keep_states({"sampler": progress.num_requested})
        assert progress.sampler_states() == {"sampler": progress.num_yielded}
        assert len(progress.kept_states) <= ahead + 1
    assert progress.first_states == {"sampler": 0}
    progress = progress_of()
    progress.keep_states({})
    assert progress.sampler_states() == {}
    assert progress.first_states == {}


def test_a_checkpoint_reads_its_state():
    state = {"begun": 1, "batches": 3, "base_seed": None, "samplers": {"sampler": {"epoch": 2}}}
    saved = Checkpoint(state, {}, {}, {}, {})
    assert (saved.in_progress, saved.num_yielded, saved.base_seed) == (True, 3, None)
    assert saved.sampler_state("sampler") == {"epoch": 2}
    assert saved.sampler_state("batch_sampler") == {}
