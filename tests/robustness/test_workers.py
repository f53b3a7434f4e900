"""How worker processes begin, and whose an interrupt is."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PER_BATCH, Script, assert_pairs, in_order
from helpers.crops import DOES, EXACT, Crops, Truth, with_workers

from torchdali import DALILoader
from torchdali.workers.processes import _find_dead
from torchdali.workers.startup import WorkerStartup


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


def set_end(worker: int) -> None:
    signal.signal(signal.SIGINT, end)


def with_its_own_handler(index: int, image: Any) -> Any:
    assert signal.getsignal(signal.SIGINT) is end
    return image


def test_a_workers_own_handler_of_interrupts_stays() -> None:
    dataset = Crops(with_its_own_handler)
    loader = DALILoader(dataset, PER_BATCH, transform=EXACT, device="cpu", num_workers=1, worker_init_fn=set_end)
    assert_pairs(loader, Truth(), in_order())


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
of_workers = pytest.mark.parametrize("workers", ["workers", "persistent"])


@of_workers
def test_an_interrupt_does_not_leave_a_fork_in_the_worker(run_script: Script, workers: str) -> None:
    """It would go on as the parent: os.fork() raises it where nothing but the script's own code catches it."""
    done = run_script(HIT, Path(__file__).parents[1], "after_in_child", workers)
    assert (done.returncode, done.stdout) == (0, "done True\n"), done.stderr


@of_workers
def test_an_interrupt_waits_until_workers_have_started(run_script: Script, workers: str) -> None:
    done = run_script(HIT, Path(__file__).parents[1], "after_in_parent", workers)
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


def test_a_handler_of_the_users_own_is_called_afterwards(hit_once: list[Any]) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(len(hit_once)))
    try:
        assert_pairs(DALILoader(Crops(), PER_BATCH, transform=EXACT, device="cpu", num_workers=2), Truth(), in_order())
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [2]


class Endless:
    """A sampler that is interrupted for want of an end."""

    def __iter__(self) -> Iterator[int]:
        signal.raise_signal(signal.SIGINT)
        yield from iter(int, 1)


def test_a_sampler_can_be_interrupted() -> None:
    loader = DALILoader(Crops(), PER_BATCH, sampler=Endless(), transform=EXACT, device="cpu", num_workers=2)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Ringing:
    """A module in one of whose functions an alarm comes, as it is called or when it is done, once."""

    def __init__(self, module: Any, name: str, number: int, done: bool) -> None:
        self._module, self._name, self._number, self._done = module, name, number, done

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if name != self._name:
            return function

        def ringing(*given: Any) -> Any:
            self._number -= 1
            rings = self._number == -1
            if rings and not self._done:
                signal.raise_signal(signal.SIGALRM)
            result = function(*given)
            if rings and self._done:
                signal.raise_signal(signal.SIGALRM)
            return result

        return ringing


def out_of_time(*_: Any) -> None:
    raise TimeoutError


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    "place", [("signal", "signal", 0), ("signal", "signal", 1), ("gc", "disable", 0), ("gc", "enable", 0)]
)
def test_an_alarm_as_interrupts_begin_or_end_to_wait_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch, place: tuple[str, str, int], done: bool
) -> None:
    handler, before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGALRM, out_of_time)
    modules = {"signal": signal, "gc": gc}
    try:
        with monkeypatch.context() as patch:
            patch.setattr(f"torchdali.workers.startup.{place[0]}", Ringing(modules[place[0]], *place[1:], done))
            with pytest.raises(TimeoutError), WorkerStartup():
                pass
        assert signal.getsignal(signal.SIGINT) is handler
        assert gc.isenabled()
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


# Workers that never begin

NEVER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from conftest import assert_pairs, in_order
from helpers.crops import DOES, WORKERS, Crops, Truth
import torchdali.workers.processes
from torchdali import DALILoader

torchdali.workers.processes._BEGIN_WITHIN = 1.0
does = DOES[sys.argv[3]]
truth, forks, hangs = Truth(does.get("transform")), [], {2}
os.register_at_fork(before=lambda: forks.append(1), after_in_child=lambda: len(forks) in hangs and time.sleep(1000))

def slow(worker):
    time.sleep(6)

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


@pytest.mark.parametrize(("workers", "does"), [("persistent", "transform"), ("workers", "nothing")])
def test_a_worker_that_never_begins_is_named_and_ended(run_script: Script, workers: str, does: str) -> None:
    """One that is only slow, in its ``worker_init_fn``, is waited for."""
    done = run_script(NEVER, Path(__file__).parents[1], workers, does)
    assert done.returncode == 0, done.stderr
    first, again, alive, end = done.stdout.splitlines()
    assert again == first
    assert first.startswith("DataLoader worker (pid OTHER) did not begin within 1 s after the fork. Most likely")
    assert (alive, end) == ("True -9", "done")


# Workers that are just ending


class Ending:
    """A worker whose end is told by its sentinel and not yet by the system."""

    pid = 7
    exitcode: int | None = None

    def __init__(self) -> None:
        self.sentinel, end = os.pipe()
        os.close(end)

    def join(self) -> None:
        self.exitcode = 0


def test_one_that_is_ending_is_named_when_its_connection_broke() -> None:
    worker, broken = Ending(), ConnectionResetError()
    try:
        assert _find_dead([worker], broken) == "DataLoader worker (pid 7) exited with code 0"
    finally:
        os.close(worker.sentinel)


def objects_that_stay(index: int, image: Any) -> Any:
    image[:] = gc.get_freeze_count() > 0
    return image


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("start", "stay"), [("fork", True), ("spawn", False)])
def test_only_what_a_worker_inherited_is_kept_from_the_garbage_collector(start: str, stay: bool) -> None:
    """Classes of nanobind's that stay are told of on the terminal when the worker ends."""
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": start, "device": "cpu"}
    images, _ = next(iter(DALILoader(Crops(objects_that_stay), PER_BATCH, transform=EXACT, **options)))
    assert images.unique().tolist() == [stay]
