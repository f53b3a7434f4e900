"""No signal and no sample leaves anybody waiting for ever for what workers and the main process tell each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PER_BATCH, Script, assert_pairs, in_order
from helpers.crops import DOES, EXACT, Crops, Truth, every_use, with_workers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(60)

in_workers = pytest.mark.parametrize(
    "does", [DOES["batch_transform"], DOES["nothing"]], ids=["batch_transform", "nothing"]
)


def until_end(loader: DataLoader[Any]) -> Iterator[Any]:
    """Batches, and what was raised in the place of them."""
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except RuntimeError as error:
            yield str(error)


# What cannot be sent


class Locked(Crops):
    """Whose seventh sample cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, threading.Lock() if index == 7 else label


@in_workers
@with_workers
def test_a_batch_that_cannot_be_sent_is_an_error_in_its_turn(workers: Any, does: Any) -> None:
    """It would never come, and DataLoader waits for it for ever."""
    loader = DALILoader(Locked(), PER_BATCH, collate_fn=list, device="cpu", **workers, **does)
    for _ in range(2):
        found = list(until_end(loader))
        labels = [one if isinstance(one, str) else [label for _, label in one] for one in found]
        assert labels[:2] + labels[3:] == in_order()[:2] + in_order()[3:]
        assert "a batch could not be sent from its worker (TypeError: cannot pickle '_thread.lock' object)" in labels[2]


def refuse_in_words_of_its_own(index: int, image: Any) -> Any:
    class OwnError(Exception):
        pass

    if index == 7:
        raise OwnError("mine")
    return image


@every_use
@with_workers
def test_an_exception_that_cannot_be_sent_is_told_in_words(workers: Any, does: Any) -> None:
    loader = DALILoader(Crops(refuse_in_words_of_its_own), PER_BATCH, device="cpu", **workers, **does)
    found = list(until_end(loader))
    assert "OwnError: mine" in found.pop(2)
    assert_pairs(found, Truth(does.get("transform")), in_order()[:2] + in_order()[3:])


class Slow:
    """Cannot be pickled, which takes until the worker has put into its queue what comes after it."""

    def __reduce__(self) -> Any:
        time.sleep(0.5)
        raise TypeError("slow")


def with_slow(at: int) -> Callable[[int, Any], Any]:
    """A fault that puts such a thing in the place of an image, once for each worker."""
    left = [at]
    return lambda index, image: Slow() if index in left and left.pop() is not None else image


class Stream(IterableDataset[Any]):
    """The same samples as a stream."""

    def __init__(self, dataset: Crops) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return map(self.dataset.__getitem__, range(len(self.dataset)))


@in_workers
@pytest.mark.parametrize("dataset", [Crops(with_slow(5), 6), Stream(Crops(with_slow(5), 6))], ids=["map", "stream"])
def test_the_last_batch_comes_though_it_cannot_be_sent(dataset: Any, does: Any) -> None:
    """A worker says that its stream is over before the thread that sends knows."""
    loader = DALILoader(dataset, 3, collate_fn=list, num_workers=1, device="cpu", **does)
    found = list(until_end(loader))
    assert [label for _, label in found.pop(0)] == [0, 1, 2]
    assert len(found) == 1
    assert "a batch could not be sent from its worker" in found[0]


@in_workers
def test_what_could_not_be_sent_of_an_epoch_that_was_left_is_not_of_the_next(does: Any) -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "device": "cpu", **does}
    loader = DALILoader(Crops(with_slow(4)), PER_BATCH, collate_fn=list, **options)
    iterator = iter(loader)
    next(iterator)
    found = list(until_end(loader))
    assert [[label for _, label in batch] for batch in found] == in_order()


class OfAttributes(dict[str, Any]):
    """As many a configuration has them: what is not there raises KeyError."""

    __getattr__ = dict.__getitem__


@with_workers
def test_batches_that_raise_whatever_is_asked_of_them_may_be_unsendable(workers: Any) -> None:
    made = [OfAttributes(index=i, lock=threading.Lock() if i == 2 else None) for i in range(6)]
    loader = DALILoader(made, batch_size=None, device="cpu", collate_fn=OfAttributes, **workers)
    found = list(until_end(loader))
    assert "a batch could not be sent from its worker" in found.pop(2)
    assert [batch["index"] for batch in found] == [0, 1, 3, 4, 5]


def with_lock(index: int, image: Any) -> Any:
    return threading.Lock() if index == 4 else image


def test_a_stream_goes_on_where_it_was_though_a_batch_could_not_be_sent() -> None:
    def loader() -> DALILoader[Any]:
        return DALILoader(Stream(Crops(with_lock, 12)), 2, collate_fn=list, num_workers=1, device="cpu")

    first, second = loader(), loader()
    found = list(islice(until_end(first), 4))
    assert [type(batch) for batch in found] == [list, list, str, list]
    second.load_state_dict(first.state_dict())
    assert [[label for _, label in batch] for batch in second] == [[8, 9], [10, 11]]


@with_workers
def test_a_streams_exception_that_cannot_be_sent_is_told_in_words(workers: Any) -> None:
    dataset = Stream(Crops(refuse_in_words_of_its_own))
    found = list(islice(until_end(DALILoader(dataset, PER_BATCH, device="cpu", **workers)), 6))
    assert any("OwnError: mine" in batch for batch in found if isinstance(batch, str))


class Leaving(Crops):
    """With something in every second sample that keeps it from being sent, beside an image that lies in a block."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        held = OfLock({"image": image, "label": label, "worker": os.getpid()})
        held.lock = threading.Lock() if index % 2 else None
        return held


class OfLock(dict[str, Any]):
    lock: Any = None


def test_blocks_of_batches_that_cannot_be_sent_are_used_again() -> None:
    loader = DALILoader(Leaving(count=60), 1, transform=EXACT, num_workers=1, device="cpu")
    memory = (Path("/proc", str(int(one["worker"])), "maps") for one in until_end(loader) if not isinstance(one, str))
    counts = [maps.read_text().count("memfd:torchdali") for maps in memory]
    assert len(counts) == 30
    assert max(counts[10:]) <= max(counts[:10]) + 2, counts


class Indices(BatchSampler):
    """One of whose batches of indices cannot be pickled."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[Any]:
        for batch in in_order():
            index: Any = threading.Lock() if batch[0] == 6 else batch[0]
            yield [index, *batch[1:]] if self.whole else index

    def __len__(self) -> int:
        return len(in_order())


@every_use
@with_workers
@pytest.mark.parametrize("whole", [True, False])
def test_indices_that_cannot_be_sent_are_an_error_in_their_turn(whole: bool, workers: Any, does: Any) -> None:
    """DataLoader waits for such a batch for ever."""
    given: Any = {"batch_sampler": Indices(whole)} if whole else {"batch_size": None, "sampler": Indices(whole)}
    if not whole:
        does = {"transform": EXACT} if "transform" in does else {}
    loader = DALILoader(Crops(), device="cpu", **given, **workers, **does)
    for _ in range(2):
        found = list(until_end(loader))
        assert "the indices of a batch could not be sent to a worker (TypeError: cannot pickle" in found.pop(2)
        labels = [torch.as_tensor(label).reshape(-1).tolist() for _, label in found]
        assert labels == [batch if whole else batch[:1] for batch in in_order() if batch[0] != 6]


# Workers that are killed with a lock in their hands


# Interruptions


KILLED = """
import os, signal, sys, time
from torchdali import DALILoader

loader = DALILoader(range(100), 1, num_workers=2, device="cpu", collate_fn=lambda _: bytes(3_000_000))
iterator = iter(loader)
next(iterator)
print(*(worker.pid for worker in iterator._workers), flush=True)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_of_a_process_that_was_killed_end_though_nobody_reads_what_they_send(run_script: Script) -> None:
    """DataLoader's wait in the pipe for ever, with all their memory."""
    pids = run_script(KILLED).stdout.split()
    assert len(pids) == 2
    until = time.monotonic() + 40
    while (left := [pid for pid in pids if Path("/proc", pid, "cmdline").exists()]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
