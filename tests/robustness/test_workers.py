"""How worker processes begin, and whose an interrupt is."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PER_BATCH, Script, assert_pairs, in_order
from helpers.crops import DOES, EXACT, WORKERS, Crops, Truth, every_way_with_workers

from torchdali import DALILoader
from torchdali.workers import processes
from torchdali.workers.startup import StartupCheck, WorkerInit


@pytest.mark.parametrize(
    ("workers", "does"), [(WORKERS["workers"], DOES["transform"]), (WORKERS["persistent"], DOES["batch_transform"])]
)
def test_workers_leave_interrupts_to_the_parent(workers: Any, does: Any) -> None:
    """A terminal's interrupt that the parent survives, as a notebook does, ends no worker."""
    loader = DALILoader(Crops(count=120), PER_BATCH, device="cpu", **workers, **does)
    iterator = iter(loader)
    taken = [next(iterator), next(iterator)]  # one of each worker: none is still being started
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGINT)
    taken += iterator
    assert_pairs(taken, Truth(does.get("transform")), in_order(0, 120))


# While workers are started

HIT = """
import ctypes, functools, os, signal, sys
sys.path.insert(0, sys.argv[1])
from conftest import assert_pairs, in_order
from helpers.crops import EXACT, Crops, Truth
from torchdali import DALILoader

# Of C, as a terminal's: Python looks for it when os.fork() has returned.
hit = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGINT)
os.register_at_fork(after_in_child=hit)
me = os.getpid()
loader = DALILoader(Crops(), 3, transform=EXACT, device="cpu", num_workers=2)
try:
    assert_pairs(loader, Truth(), in_order())
except KeyboardInterrupt:
    print("interrupted")
print("done", os.getpid() == me)
"""


def test_an_interrupt_does_not_leave_a_fork_in_the_worker(run_script: Script) -> None:
    """It would go on as the parent: os.fork() raises it where nothing but the script's own code catches it."""
    done = run_script(HIT, Path(__file__).parents[1])
    assert (done.returncode, done.stdout) == (0, "done True\n"), done.stderr


def ignore(number: int, frame: Any) -> None:
    pass


def keep_handler(index: int, image: Any) -> Any:
    assert signal.signal(signal.SIGINT, ignore) is ignore
    return image


@pytest.mark.parametrize("is_pythons", [True, False])
def test_a_handler_of_interrupts_that_workers_inherit_stays(monkeypatch: pytest.MonkeyPatch, is_pythons: bool) -> None:
    """Also one that no Python code has set, for which Python returns None."""
    before = signal.signal(signal.SIGINT, ignore)
    if not is_pythons:
        monkeypatch.setattr(signal, "getsignal", lambda _: None)
    try:
        loader = DALILoader(Crops(keep_handler), PER_BATCH, transform=EXACT, device="cpu", num_workers=1)
        assert len(list(loader)) == 8
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def hit_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The workers that were started; the first one's start is interrupted."""
    started: list[Any] = []
    start = multiprocessing.process.BaseProcess.start

    def interrupted(worker: Any) -> None:
        start(worker)
        started.append(worker)
        if len(started) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    yield started
    assert signal.signal(signal.SIGINT, handler) is handler


@every_way_with_workers
def test_an_interrupted_start_leaves_no_worker_behind(hit_once: list[Any], workers: Any, does: Any) -> None:
    loader = DALILoader(Crops(), PER_BATCH, device="cpu", **workers, **does)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert len(hit_once) == 2
    assert [worker.exitcode for worker in hit_once] == [0, 0]
    assert_pairs(loader, Truth(does.get("transform")), in_order())


# Workers that never begin


def test_a_worker_that_never_begins_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = StartupCheck.__call__

    def hang(check: Any, worker: int) -> None:
        time.sleep(1000 if worker else 0)
        begin(check, worker)

    monkeypatch.setattr(processes, "_START_TIMEOUT", 0.5)
    monkeypatch.setattr(StartupCheck, "__call__", hang)
    loader = DALILoader(Crops(), PER_BATCH, transform=EXACT, device="cpu", **WORKERS["persistent"])
    iterator = iter(loader)
    one, other = iterator._workers
    text = rf"^DataLoader worker \(pid {other.pid}\) did not begin within 0.5 s after the fork. Most likely it waits"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            list(iterator)
    assert (one.is_alive(), other.exitcode) == (True, -signal.SIGKILL)
    monkeypatch.setattr(StartupCheck, "__call__", begin)
    loader.worker_init_fn = slow
    assert_pairs(loader, Truth(), in_order())


def slow(worker: int) -> None:
    """Take longer than a worker may take to begin."""
    time.sleep(1)


def test_only_what_a_worker_inherited_is_kept_from_the_garbage_collector() -> None:
    """Classes of nanobind's that stay are told of on the terminal when the worker ends."""
    assert WorkerInit(None, False)._is_forked
    assert not pickle.loads(pickle.dumps(WorkerInit(None, False)))._is_forked  # as a spawned worker gets it
    loader = DALILoader(Crops(objects_that_stay), PER_BATCH, transform=EXACT, num_workers=1, device="cpu")
    images, _ = next(iter(loader))
    assert images.unique().tolist() == [True]


def objects_that_stay(index: int, image: Any) -> Any:
    image[:] = gc.get_freeze_count() > 0
    return image
