"""A rank's share of the samples, and its epochs, are those of torch's DistributedSampler."""

from __future__ import annotations

import warnings

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from torchdali.state import sharding
from torchdali.state.sharding import Shard, Sharding, find_epoch_aware_samplers, get_rank_and_world_size

DATA = range(10)


def loader(dataset=DATA, **options):
    made = DataLoader(dataset, **options)
    made.seed = 7
    return made


def in_group(monkeypatch, rank=1, world=3):
    monkeypatch.setattr(sharding, "get_rank_and_world_size", lambda: (rank, world))


def test_a_single_process_has_no_group():
    assert get_rank_and_world_size() is None


def test_a_shard_is_a_distributed_sampler_that_counts_its_epochs():
    shard, of_torch = Shard(DATA, 3, 1, seed=7), DistributedSampler(DATA, 3, 1, seed=7)
    for epoch in (0, 1, 2):
        assert shard.next_epoch == epoch
        shard.begin_epoch()
        of_torch.set_epoch(epoch)
        assert list(shard) == list(of_torch)
    shard.set_epoch(8)
    for epoch in (8, 9):
        assert shard.next_epoch == epoch
        shard.begin_epoch()
        assert shard.epoch == epoch


@pytest.mark.parametrize(("shuffle", "batch_size"), [(False, None), (True, 2)])
def test_the_loader_gets_its_ranks_share(monkeypatch, shuffle, batch_size):
    ours = loader(batch_size=batch_size, shuffle=shuffle)
    in_group(monkeypatch)
    Sharding("auto", ours, shuffle, None)
    of_torch = DistributedSampler(DATA, 3, 1, shuffle, seed=7)
    assert list(ours.sampler) == list(of_torch)
    if batch_size:
        assert list(ours.batch_sampler) == list(BatchSampler(of_torch, 2, drop_last=False))


def test_a_share_is_made_for_each_process_group(monkeypatch):
    ours = loader()
    made = Sharding("auto", ours, None, None)
    assert type(ours.sampler) is SequentialSampler
    in_group(monkeypatch)
    made.set_sampler(ours)
    shard = ours.sampler
    shard.set_epoch(4)
    shard.begin_epoch()
    made.set_sampler(ours)
    assert ours.sampler is shard
    in_group(monkeypatch, rank=0, world=2)
    made.set_sampler(ours)
    assert (ours.sampler.rank, ours.sampler.num_replicas, ours.sampler.next_epoch) == (0, 2, 5)


def test_without_auto_the_sampler_stays(monkeypatch):
    ours = loader()
    in_group(monkeypatch)
    Sharding(None, ours, None, None).set_sampler(ours)
    assert type(ours.sampler) is SequentialSampler


def test_an_epoch_is_counted_in_the_share_or_warned_of_once_without_one(monkeypatch):
    in_group(monkeypatch)
    ours = loader()
    made = Sharding("auto", ours, None, None)
    for epoch in range(3):
        made.begin_epoch(ours)
        assert ours.sampler.epoch == epoch
    same = Sharding(None, loader(), None, None)
    with pytest.warns(UserWarning, match="3 processes"):
        same.begin_epoch(loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.begin_epoch(loader())
        Sharding(None, loader(), None, "sampler").begin_epoch(loader())


def test_a_missing_process_group_is_warned_of(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 2.*init_process_group"):
        Sharding("auto", loader(), None, None).begin_epoch(loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sharding(None, loader(), None, None).begin_epoch(loader())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    ("dataset", "given", "text"),
    [
        (DATA, "sampler", "must be None with sampler=, got 'auto'; leave one of them out"),
        (DATA, "batch_sampler", "must be None with batch_sampler=, got 'auto'; leave one of them out"),
        (Stream(), None, "for an IterableDataset, .* got 'auto'; let the dataset skip"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(dataset, given, text):
    with pytest.raises(ValueError, match=text):
        Sharding("auto", loader(dataset), None, given)


class Batches(BatchSampler):
    """A batch sampler with epochs of its own."""

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_each_sampler_with_epochs_is_told_its_epoch():
    shard = DistributedSampler(DATA, 2, 0)
    batches = Batches(shard, 2, drop_last=False)
    assert find_epoch_aware_samplers(loader()) == []
    assert find_epoch_aware_samplers(loader(sampler=shard, batch_size=2)) == [shard]
    ours = loader(batch_sampler=batches)
    Sharding(None, ours, None, "batch_sampler").set_epoch(ours, 6)
    assert (shard.epoch, batches.epoch) == (6, 6)
