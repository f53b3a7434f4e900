"""Where an epoch is, counted by hand on plain values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from torchdali.state.generators import Generators
from torchdali.state.progress import Checkpoint, EpochProgress, StreamProgress


def progress_of(dataset=range(8), **options):
    generators = Generators(DataLoader(dataset, **options))
    return EpochProgress(generators, generators.states(), 0)


def test_a_stream_counts_batches_and_samples_and_keeps_the_latest_state():
    stream = StreamProgress()
    for samples in (3, 3, 2):
        stream = stream.advance(samples, {"iterator": samples})
    assert stream == StreamProgress(batches=3, samples=8, state={"iterator": 2})


@pytest.mark.parametrize(
    ("state", "known"), [({}, False), ({"raised": 2}, False), ({"iterator": 0}, True), ({"dataset": {}}, True)]
)
def test_only_a_dataset_or_its_iterator_says_where_a_stream_is(state, known):
    assert StreamProgress(state=state).has_state is known


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_from_the_workers_in_turn(workers):
    """As in DataLoader, where the main process counts as worker 0."""
    progress = progress_of()
    for worker in [*range(max(workers, 1))] * 2:
        assert progress.worker == worker
        progress.advance_stream(worker, workers, 2, {})
    assert progress.streams == dict.fromkeys(range(max(workers, 1)), StreamProgress(2, 4))


@pytest.mark.parametrize("ahead", range(4))
def test_the_states_are_those_at_the_last_batch_that_was_handed_out(ahead):
    progress = progress_of()
    progress.keep_states({"sampler": 0})
    for progress.num_requested in range(1, 7):
        progress.num_yielded = max(0, progress.num_requested - ahead)
        progress.keep_states({"sampler": progress.num_requested})
        assert progress.sampler_states() == {"sampler": progress.num_yielded}
        assert len(progress.kept_states) <= ahead + 1
    assert progress.first_states == {"sampler": 0}


def test_no_states_where_no_sampler_has_one():
    progress = progress_of()
    progress.keep_states({})
    assert progress.sampler_states() == {}
    assert progress.first_states == {}


def test_a_checkpoint_reads_the_state_that_it_was_given():
    given = {"begun": 1, "batches": 3, "base_seed": None, "samplers": {"sampler": {"epoch": 2}}}
    saved = Checkpoint(given, {}, {}, {}, {})
    assert SimpleNamespace(begun=saved.in_progress, batches=saved.num_yielded, seed=saved.base_seed) == SimpleNamespace(
        begun=True, batches=3, seed=None
    )
    assert saved.sampler_state("sampler") == {"epoch": 2}
    assert saved.sampler_state("batch_sampler") == {}
