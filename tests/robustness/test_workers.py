"""How worker processes begin, and whose an interrupt is."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PER_BATCH, Script, assert_pairs, in_order
from helpers.crops import DOES, EXACT, Crops, Truth, with_workers

from torchdali import DALILoader
from torchdali.workers.startup import WorkerInit


@with_workers
@pytest.mark.parametrize("does", [DOES["transform"], DOES["batch_transform"]], ids=["transform", "batch_transform"])
def test_workers_leave_interrupts_to_the_parent(workers: Any, does: Any) -> None:
    """A terminal's interrupt that the parent survives, as a notebook does, ends no worker."""
    loader = DALILoader(Crops(count=120), PER_BATCH, device="cpu", **workers, **does)
    iterator = iter(loader)
    taken = [next(iterator), next(iterator)]  # one of each worker: none is still being started
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGINT)
    taken += iterator
    assert_pairs(taken, Truth(does.get("transform")), in_order(0, 120))


def end(number: int, frame: Any) -> None:
    os._exit(3)


def with_its_own_handler(index: int, image: Any) -> Any:
    assert signal.getsignal(signal.SIGINT) is end
    return image


def test_a_handler_of_interrupts_that_workers_inherit_stays() -> None:
    before = signal.signal(signal.SIGINT, end)
    try:
        batches = list(DALILoader(Crops(with_its_own_handler), PER_BATCH, transform=EXACT, device="cpu", num_workers=1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(batches) == 8


# While workers are started

HIT = """
import ctypes, functools, os, signal, sys
sys.path.insert(0, sys.argv[1])
from conftest import assert_pairs, in_order
from helpers.crops import EXACT, WORKERS, Crops, Truth
from torchdali import DALILoader

# Of C, as a terminal's: Python looks for it when os.fork() has returned.
hit = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGINT)
os.register_at_fork(**{sys.argv[2]: hit})
forks = []
os.register_at_fork(before=lambda: forks.append(1))
me = os.getpid()
loader = DALILoader(Crops(), 3, transform=EXACT, device="cpu", **WORKERS[sys.argv[3]])
try:
    assert_pairs(loader, Truth(), in_order())
except KeyboardInterrupt:
    print("interrupted", os.getpid() == me, len(forks))
print("done", os.getpid() == me)
"""


def test_an_interrupt_does_not_leave_a_fork_in_the_worker(run_script: Script) -> None:
    """It would go on as the parent: os.fork() raises it where nothing but the script's own code catches it."""
    done = run_script(HIT, Path(__file__).parents[1], "after_in_child", "workers")
    assert (done.returncode, done.stdout) == (0, "done True\n"), done.stderr


def test_an_interrupt_waits_until_workers_have_started(run_script: Script) -> None:
    done = run_script(HIT, Path(__file__).parents[1], "after_in_parent", "persistent")
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted True 2\ndone True\n", "")


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


@with_workers
def test_an_interrupted_start_leaves_no_worker_behind(hit_once: list[Any], workers: Any) -> None:
    loader = DALILoader(Crops(), PER_BATCH, transform=EXACT, device="cpu", **workers)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert len(hit_once) == 2
    assert [worker.exitcode for worker in hit_once] == [0, 0]
    assert_pairs(loader, Truth(), in_order())


# Workers that never begin

NEVER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from conftest import assert_pairs, in_order
from helpers.crops import DOES, WORKERS, Crops, Truth
import torchdali.workers.processes
from torchdali import DALILoader

torchdali.workers.processes._START_TIMEOUT = 1.0
does = DOES[sys.argv[3]]
truth, forks, hangs = Truth(does.get("transform")), [], {2}
os.register_at_fork(before=lambda: forks.append(1), after_in_child=lambda: len(forks) in hangs and time.sleep(1000))

def slow(worker):
    time.sleep(2)

loader = DALILoader(Crops(), 3, device="cpu", **WORKERS[sys.argv[2]], **does)
iterator = iter(loader)
one, other = iterator._workers
for _ in range(2):
    try:
        assert_pairs(iterator, truth, in_order())
    except RuntimeError as error:
        print(str(error).replace(str(other.pid), "OTHER"))
print(one.is_alive(), other.exitcode)
if does or sys.argv[2] == "workers":  # persistent workers of DataLoader's own kind stay as they are
    assert_pairs(loader, truth, in_order())
del iterator, loader
loader = DALILoader(Crops(), 3, device="cpu", worker_init_fn=slow, **WORKERS[sys.argv[2]], **does)
assert_pairs(loader, truth, in_order())
print("done")
"""


def test_a_worker_that_never_begins_is_named_and_ended(run_script: Script) -> None:
    """One that is only slow, in its ``worker_init_fn``, is waited for."""
    done = run_script(NEVER, Path(__file__).parents[1], "persistent", "transform")
    assert done.returncode == 0, done.stderr
    first, again, alive, end = done.stdout.splitlines()
    assert again == first
    assert first.startswith("DataLoader worker (pid OTHER) did not begin within 1 s after the fork. Most likely")
    assert (alive, end) == ("True -9", "done")


def test_only_what_a_worker_inherited_is_kept_from_the_garbage_collector() -> None:
    """Classes of nanobind's that stay are told of on the terminal when the worker ends."""
    assert WorkerInit(None)._is_forked
    assert not pickle.loads(pickle.dumps(WorkerInit(None)))._is_forked  # as a spawned worker gets it
    loader = DALILoader(Crops(objects_that_stay), PER_BATCH, transform=EXACT, num_workers=1, device="cpu")
    images, _ = next(iter(loader))
    assert images.unique().tolist() == [True]


def objects_that_stay(index: int, image: Any) -> Any:
    image[:] = gc.get_freeze_count() > 0
    return image
