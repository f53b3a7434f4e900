"""No signal and no sample leaves anybody waiting for ever for what workers and the main process tell each other."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from conftest import PER_BATCH, Script, assert_pairs, in_order
from helpers.crops import DOES, WORKERS, Crops, Truth, every_way_with_workers
from torch.utils.data import DataLoader

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(60)


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


@pytest.mark.parametrize("does", [{}, DOES["transform"]], ids=["plain", "fed"])
def test_workers_end_though_the_collector_finds_their_iterator(does: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for the word to end: the collector has stopped the thread that sends it."""
    joined: list[int | None] = []
    join = BaseProcess.join

    def record(self: BaseProcess, timeout: float | None = None) -> None:
        join(self, timeout)
        joined.append(self.exitcode)

    monkeypatch.setattr(BaseProcess, "join", record)
    iterator: Any = iter(DALILoader(Crops(), PER_BATCH, num_workers=2, device="cpu", **does))
    next(iterator)
    iterator.itself = iterator
    del iterator
    gc.collect()
    assert joined == [0, 0]


# What cannot be sent


class Locked(Crops):
    """Whose seventh sample cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, threading.Lock() if index == 7 else label


@pytest.mark.parametrize(
    ("workers", "does"),
    [(WORKERS["workers"], {}), (WORKERS["persistent"], DOES["batch_transform"])],
    ids=["plain", "fed"],
)
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


@every_way_with_workers
def test_an_exception_that_cannot_be_sent_is_told_in_words_and_keeps_no_worker(workers: Any, does: Any) -> None:
    """In a cycle with its traceback, it would hold the iterator until the garbage collector comes."""
    loader = DALILoader(Crops(refuse_in_words_of_its_own), PER_BATCH, device="cpu", **workers, **does)
    gc.collect()
    gc.disable()
    try:
        found = list(until_end(loader))
        assert "OwnError: mine" in found.pop(2)
        assert_pairs(found, Truth(does.get("transform")), in_order()[:2] + in_order()[3:])
        del loader
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_indices_that_cannot_be_sent_end_the_epoch() -> None:
    """DataLoader waits for such a batch for ever."""
    options: Any = {"sampler": [*range(9), threading.Lock()], "batch_size": 3}
    loader = DALILoader(Crops(), device="cpu", **options, **WORKERS["persistent"])
    batches = until_end(loader)
    with pytest.raises(RuntimeError, match=r"the indices of a batch could not be sent to a worker \(TypeError: cannot"):
        next(batches)
    loader.batch_sampler.sampler.pop()  # pyright: ignore
    assert_pairs(loader, Truth(None), in_order()[:3])


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
