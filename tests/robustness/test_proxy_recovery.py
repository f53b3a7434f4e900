"""Epochs of datasets that are asked for samples may be left, killed, interrupted and forked: the next one is right."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import nvidia.dali
import pytest
import torch
from conftest import PER_BATCH, Script, assert_pairs, in_order
from helpers.crops import DOES, EXACT, WORKERS, Crops, Truth, every_way, every_way_with_workers, raised
from torch.utils.data import DataLoader

from torchdali import DALILoader
from torchdali.workers.proxy import ParallelProxyIterator
from torchdali.workers.shared_memory import MappedFile

pytestmark = pytest.mark.timeout(60)


def until_raised(iterator: Iterator[Any], taken: list[Any]) -> Iterator[None]:
    """An iterator that first takes all there is."""
    taken.extend(iterator)
    yield


# Epochs that end early


@every_way
def test_after_a_break_anywhere_the_next_epoch_is_whole(workers: Any, does: Any, device: str) -> None:
    rng, truth = random.Random(0), Truth(does.get("transform"))
    loader = DALILoader(Crops(), PER_BATCH, shuffle=True, device=device, **workers, **does)
    for turn in range(3):
        iterator, after = iter(loader), rng.randint(0, 8)
        assert_pairs(itertools.islice(iterator, after), truth)
        if turn % 2:
            del iterator
        whole = list(loader)
        assert_pairs(whole, truth)
        assert sorted(torch.cat([labels for _, labels in whole]).tolist()) == list(range(24))


@every_way_with_workers
def test_an_iterator_that_is_left_ends_its_workers_at_once(workers: Any, does: Any) -> None:
    """The garbage collector, which may come late, would take the workers' queues apart before they were told to end."""
    loader = DALILoader(Crops(), PER_BATCH, device="cpu", on_error="skip", **workers, **does)
    gc.disable()
    try:
        iterator = iter(loader)
        assert_pairs(itertools.islice(iterator, 2), Truth(does.get("transform")), in_order()[:2])
        workers = iterator._workers
        del iterator, loader
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        gc.enable()


def test_a_persistent_iterator_starts_anew() -> None:
    """As DataLoader's, of which there is only one."""
    loader = DALILoader(Crops(), PER_BATCH, transform=EXACT, device="cpu", **WORKERS["persistent"])
    one = iter(loader)
    workers = [worker.pid for worker in one._workers]
    first = next(one)
    time.sleep(0.3)  # until other batches are there, too, which the next one is asked for with
    assert_pairs([first, next(one)], Truth(), in_order()[:2])
    other = iter(loader)
    assert other is one
    assert_pairs(itertools.islice(other, 3), Truth(), in_order()[:3])
    assert other.progress.num_yielded == 3
    assert_pairs(one, Truth(), in_order()[3:])
    assert next(one, None) is next(other, None) is None
    assert_pairs(loader, Truth(), in_order())
    assert [worker.pid for worker in one._workers] == workers


def test_an_iterator_outlives_its_loader() -> None:
    for workers in WORKERS.values():
        iterator = iter(DALILoader(Crops(), PER_BATCH, transform=EXACT, device="cpu", **workers))
        assert_pairs(iterator, Truth(), in_order())


# Workers that die


def slow(index: int, image: Any) -> Any:
    time.sleep(0.05)
    return image


def stuck(index: int, image: Any) -> Any:
    if index == 7:
        time.sleep(60)
    return image


@every_way_with_workers
@pytest.mark.parametrize("fault", [slow, stuck])
def test_a_killed_worker_is_named_at_once(fault: Any, workers: Any, does: Any, device: str) -> None:
    loader = DALILoader(Crops(fault), PER_BATCH, device=device, **workers, **does)
    iterator = iter(loader)
    batches = [next(iterator)]
    process = iterator._workers[0 if fault is stuck else 1]
    start = time.monotonic()
    threading.Timer(0.1, os.kill, (process.pid, signal.SIGKILL)).start()
    error = raised(RuntimeError, until_raised(iterator, batches))
    assert re.match(rf"DataLoader worker \(pid(\(s\))? {process.pid}\)", str(error))
    assert time.monotonic() - start < 5
    if isinstance(iterator, ParallelProxyIterator):
        assert "killed by signal" in str(error)
        assert_pairs(batches, Truth(does.get("transform")))
        raised(RuntimeError, until_raised(iterator, []))
        loader.dataset.fault = slow
        if fault is slow:
            assert_pairs(loader, Truth(does.get("transform")), in_order())


def test_a_worker_that_ends_before_its_batch_is_read_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed a moment before its parent can see its end."""

    def close_first(mapped: MappedFile, file: int, key: tuple[int, int], capacity: int) -> None:
        for i, worker in enumerate(iterator._workers):
            threading.Timer(0.2 + 0.3 * i, os.kill, (worker.pid, signal.SIGKILL)).start()
        monkeypatch.undo()
        MappedFile(2**20, key, capacity)

    monkeypatch.setattr(MappedFile, "__init__", close_first)
    iterator = iter(DALILoader(Crops(), PER_BATCH, transform=EXACT, num_workers=2, device="cpu"))
    assert "is killed by signal" in str(raised(RuntimeError, until_raised(iterator, [])))
    for _ in range(60):  # torch's handler of SIGCHLD raises wherever Python is
        time.sleep(0.01)


def at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, do: Callable[[], Any]) -> None:
    """Does something once, after a call of a method."""
    method, calls = getattr(owner, name), iter(range(10**6))

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if next(calls) == call:
            do()
        return result

    monkeypatch.setattr(owner, name, changed)


# Interruptions


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [WORKERS["none"], WORKERS["persistent"]], ids=["none", "persistent"])
def test_an_interrupt_ends_the_epoch_and_the_next_one_is_whole(
    monkeypatch: pytest.MonkeyPatch, workers: Any, device: str
) -> None:
    loader = DALILoader(Crops(), PER_BATCH, transform=EXACT, device=device, **workers)
    iterator, taken = iter(loader), []
    at(
        monkeypatch,
        *((type(iterator), "_receive") if workers else (nvidia.dali.Pipeline, "share_outputs")),
        4,
        interrupted,
    )
    raised(KeyboardInterrupt, until_raised(iterator, taken))
    assert "interrupted" in str(raised(RuntimeError, iterator))
    assert_pairs(taken, Truth())
    assert_pairs(loader, Truth(), in_order())


@pytest.mark.parametrize("does", [DOES["transform"], DOES["nothing"]], ids=["transform", "nothing"])
def test_timeout_is_dataloaders(does: Any) -> None:
    loader = DALILoader(Crops(stuck), PER_BATCH, num_workers=2, timeout=1, device="cpu", **does)
    iterator, start = iter(loader), time.monotonic()
    assert_pairs(itertools.islice(iterator, 2), Truth(does.get("transform")), in_order()[:2])
    for _ in range(2):
        assert str(raised(RuntimeError, iterator)) == "DataLoader timed out after 1 seconds"
    assert 0.9 < time.monotonic() - start < 5
    for worker in iterator._workers:
        worker.kill()
    with contextlib.suppress(RuntimeError):  # torch notices
        time.sleep(1)
    loader.dataset.fault = Crops().fault
    assert_pairs(loader, Truth(does.get("transform")), in_order())


# Forks

FORKS = """
import faulthandler, gc, itertools, os, sys
sys.path.insert(0, sys.argv[1])
from conftest import assert_pairs, in_order
from helpers.crops import EXACT, WORKERS, Crops, Truth
from torchdali import DALILoader
from torch.utils.data import DataLoader

truth, labels = Truth(EXACT), in_order(0, 120)

def new():
    return DALILoader(Crops(count=120), 3, transform=EXACT, device="cpu", **WORKERS["workers"])

loader = new()
iterator = iter(loader)
assert_pairs(itertools.islice(iterator, 2), truth, labels[:2])

def drops_what_it_inherited():
    global iterator, loader
    del iterator, loader
    gc.collect()

def makes_a_loader_of_its_own():
    drops_what_it_inherited()
    for _ in range(3):
        assert_pairs(new(), truth, labels)

def iterates_over_the_same_loader():
    for _ in range(2):
        assert_pairs(loader, truth, labels)

def goes_on_with_the_iterator():
    for _ in range(2):
        try:
            next(iterator)
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError

for child in (drops_what_it_inherited, makes_a_loader_of_its_own, iterates_over_the_same_loader,
              goes_on_with_the_iterator):
    process = os.fork()
    if not process:
        faulthandler.dump_traceback_later(10, exit=True)  # which is what a child that hangs ends with
        child()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, child.__name__
assert len(list(DataLoader(Crops(), 4, num_workers=2, collate_fn=len))) == 6
assert_pairs(iterator, truth, labels[2:])
assert_pairs(loader, truth, labels)
print("done")
"""


def test_forked_processes_end_well(run_script: Script) -> None:
    here = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    done = run_script(FORKS, here, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "done\n")


def test_dataloaders_iterator_in_the_same_process_is_not_disturbed() -> None:
    """torch watches the workers of all loaders with one handler."""
    theirs = iter(DataLoader(Crops(), PER_BATCH, num_workers=1))
    first = next(theirs)
    assert_pairs(DALILoader(Crops(), PER_BATCH, transform=EXACT, num_workers=2, device="cpu"), Truth(), in_order())
    assert_pairs([first, *theirs], Truth(None), in_order())


def test_threads_may_share_an_iterator() -> None:
    """Each batch comes to one of them."""
    iterator = iter(DALILoader(Crops(count=48), transform=EXACT, num_workers=2, device="cpu"))
    taken: list[Any] = []
    threads = [threading.Thread(target=taken.extend, args=(iterator,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_pairs(sorted(taken, key=lambda batch: int(batch[1])), Truth(), [[label] for label in range(48)])
