"""Epochs may be left, interrupted, timed out and forked: the next one is right, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import nvidia.dali
import PIL.Image
import pytest
from conftest import PER_BATCH, Numbered, Script, assert_pairs, in_order
from helpers.crops import EXACT, Crops, Truth
from helpers.proxied import PathSamples
from torch.utils.data import DistributedSampler
from torchvision.datasets import ImageFolder

from torchdali import DALILoader, SampleError
from torchdali.pipeline.feed import Prefetcher

pytestmark = pytest.mark.timeout(50)


def until_error(iterator: Iterator[Any]) -> list[Any]:
    """What is left of an epoch that may have come to an early end."""
    batches: list[Any] = []
    with contextlib.suppress(RuntimeError):
        batches.extend(iterator)
    return batches


# Epochs that end early


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_break_anywhere_the_next_epoch_is_whole(dataset: ImageFolder, workers: int, device: str) -> None:
    loader = DALILoader(dataset, PER_BATCH, num_workers=workers, device=device)
    for after in range(9):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(min(after, 8))), dataset, in_order()[:after])
        if after % 2:
            del iterator
        assert_pairs(loader, dataset, in_order())


def test_iterators_may_be_interleaved(dataset: ImageFolder, device: str) -> None:
    loader = DALILoader(dataset, PER_BATCH, device=device)
    one, other, taken = iter(loader), iter(loader), ([], [])
    for turn in (0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1):
        taken[turn].append(next((one, other)[turn]))
    for batches in taken:
        assert_pairs(batches, dataset, in_order())
    assert_pairs((pair[i] for i, pair in enumerate(zip(loader, loader, strict=True)) for i in (0, 1)), dataset)
    assert next(one, None) is next(other, None) is None
    assert len(loader._session.native_plan.pool._idle) == 1, "the other one's threads and memory are given back"


def test_iterator_outlives_its_loader(dataset: ImageFolder, device: str) -> None:
    loader = DALILoader(dataset, PER_BATCH, device=device)
    iterator = iter(loader)
    first = next(iterator)
    del loader
    gc.collect()
    assert_pairs([first, *iterator], dataset, in_order())


def test_finished_iterator_stays_finished(dataset: ImageFolder) -> None:
    iterator = iter(DALILoader(dataset, PER_BATCH, device="cpu"))
    assert_pairs(iterator, dataset, in_order())
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


# Interruptions


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, after: bool) -> None:
    """Raises KeyboardInterrupt once, before or after a call of a method."""
    method, calls = getattr(owner, name), iter(range(10**6))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == call
        if now and not after:
            raise KeyboardInterrupt
        result = method(*args, **kwargs)
        if now:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("name", ["feed_input", "schedule_run", "share_outputs", "release_outputs"])
def test_an_interrupt_ends_the_epoch_and_the_next_one_is_whole(
    monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, name: str, device: str
) -> None:
    loader = DALILoader(dataset, PER_BATCH, device=device)
    iterator, taken = iter(loader), []
    interrupt(monkeypatch, nvidia.dali.Pipeline, name, 4, after=True)
    with pytest.raises(KeyboardInterrupt):
        taken.extend(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted; this epoch cannot go on, a new one can be started"):
            next(iterator)
    assert_pairs(taken, dataset)
    assert_pairs(loader, dataset, in_order())


class TooLongError(Exception):
    """What a handler of the user's raises."""


def handler(*_: Any) -> None:
    raise TooLongError


PLACES = [(nvidia.dali.Pipeline, "feed_input"), (nvidia.dali.Pipeline, "share_outputs"), (Prefetcher, "_advance")]


@pytest.mark.parametrize("kind", ["native", "worker-fed", "cached"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_what_a_signal_handler_raises_pairs_no_picture_with_another_label(
    monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, place: tuple[Any, str], kind: str
) -> None:
    """It may be raised some batches later, as the error of a batch."""
    method, calls = getattr(*place), iter(range(10**6))

    def signalled(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if next(calls) == 3:
            signal.raise_signal(signal.SIGUSR1)
        return result

    given = PathSamples(dataset) if kind == "worker-fed" else dataset
    options: dict[str, Any] = {"worker-fed": {"transform": dataset.transform}, "cached": {"cache": "device"}}
    loader = DALILoader(cast("Any", given), PER_BATCH, device="cpu", **options.get(kind, {}))
    iterator, taken, raised = iter(loader), [], []
    monkeypatch.setattr(*place, signalled)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        while not raised or raised[-1] is TooLongError:
            try:
                taken.extend(iterator)
                break
            except (TooLongError, RuntimeError) as error:
                raised.append(type(error))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert TooLongError in raised
    assert_pairs(taken, dataset)
    assert_pairs(loader, dataset, in_order())


def test_timeout_is_dataloaders_and_the_next_epoch_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, device: str
) -> None:
    loader = DALILoader(dataset, PER_BATCH, num_workers=1, timeout=1.5, device=device)
    go_on, share = threading.Event(), nvidia.dali.Pipeline.share_outputs
    with monkeypatch.context() as slow:
        slow.setattr(nvidia.dali.Pipeline, "share_outputs", lambda *args, **kw: (go_on.wait(30), share(*args, **kw))[1])
        iterator, start = iter(loader), time.monotonic()
        with pytest.raises(RuntimeError, match=r"timed out after 1\.5 seconds"):
            next(iterator)
        assert 1.4 < time.monotonic() - start < 5
    assert_pairs(loader, dataset, in_order())
    go_on.set()
    assert_pairs(until_error(iterator), dataset)
    del iterator
    assert_pairs(loader, dataset, in_order())


def test_a_wait_that_gets_no_thread_pairs_no_picture_with_another_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that nobody waited for would be taken for the next one."""
    loader = DALILoader(Crops(), PER_BATCH, transform=EXACT, timeout=20, device="cpu", num_workers=1)
    start, refused = threading.Thread.start, iter([False, True])

    def maybe(thread: threading.Thread) -> None:
        if thread.name == "torchdali-wait" and next(refused, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", maybe)
    assert_pairs(loader, Truth(), in_order())
    assert next(refused, None) is None


def test_timeout_of_slow_storage(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    go_on = threading.Event()
    loader = DALILoader(dataset, PER_BATCH, num_workers=1, timeout=0.3, device="cpu")
    with monkeypatch.context() as slow:
        slow.setattr(type(loader._session.reader), "read_header", lambda *_: go_on.wait(30))
        with pytest.raises(RuntimeError, match="timed out"):
            next(iter(loader))
        go_on.set()
    assert_pairs(loader, dataset, in_order())


def alarmed(*_: Any) -> None:
    raise TimeoutError("of the user's own")


@pytest.mark.parametrize("cache", [None, "host", "device"])
def test_an_alarm_while_storage_is_waited_for_is_not_taken_for_the_timeout(
    monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, cache: Any
) -> None:
    loader = DALILoader(dataset, PER_BATCH, num_workers=1, timeout=30, cache=cache, device="cpu")
    wait = Future.result

    def hit(future: Any, timeout: float | None = None) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return wait(future, timeout)

    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        with monkeypatch.context() as slow:
            slow.setattr(Future, "result", hit)
            with pytest.raises(TimeoutError, match="of the user's own"):
                next(iter(loader))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_pairs(loader, dataset, in_order())


class Interrupted:
    """A sampler that is interrupted when it is asked for its eleventh index, once."""

    def __init__(self) -> None:
        self.interrupts = True

    def __iter__(self) -> Iterator[int]:
        for index in range(24):
            if index == 10 and self.interrupts:
                self.interrupts = False
                raise KeyboardInterrupt
            yield index


def test_an_interrupt_on_the_way_to_a_saved_place_leaves_it_to_the_next_epoch(dataset: ImageFolder) -> None:
    sampler = Interrupted()
    loader = DALILoader(dataset, PER_BATCH, sampler=sampler, device="cpu")
    sampler.interrupts = False
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    sampler.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert_pairs(loader, dataset, in_order()[1:])


@pytest.mark.parametrize("sampled", [False, True])
def test_an_epoch_that_was_set_after_a_state_was_loaded_holds_where_it_could_not_begin(
    dataset: ImageFolder, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise TooLongError

    sampler: Any = DistributedSampler(dataset, 1, 0) if sampled else None
    loader = DALILoader(dataset, PER_BATCH, sampler=sampler, seed=0, device="cpu")
    loader.set_epoch(2)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(7)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_begin_epoch", fail)
        with pytest.raises(TooLongError):
            iter(loader)
    assert loader.state_dict()["epoch"] == 7
    assert sampler is None or sampler.epoch == 7


def closed(loader: Any, _: Any) -> None:
    loader.close()


def timed_out(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(*_: Any) -> Any:
        time.sleep(2)
        raise AssertionError("nobody waits so long")

    monkeypatch.setattr(nvidia.dali.Pipeline, "share_outputs", share)


def interrupted(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(nvidia.dali.Pipeline, "share_outputs", share)


@pytest.mark.parametrize("happens", [closed, timed_out, interrupted, None])
@pytest.mark.parametrize(("delivered", "on_error"), [(7, "raise"), (1, "skip")])
def test_an_epoch_that_cannot_go_on_is_not_over(
    dataset: ImageFolder, happens: Any, delivered: int, on_error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its iterator says so as often as it is asked, and its state leads to what is left of it."""
    sampler = None if happens else Interrupted()
    timeout = 0.5 if happens is timed_out else 0
    loader = DALILoader(dataset, PER_BATCH, sampler=sampler, timeout=timeout, on_error=on_error, device="cpu")
    iterator = iter(loader)
    if happens:
        assert_pairs((next(iterator) for _ in range(delivered)), dataset, in_order()[:delivered])
    with monkeypatch.context() as patch:
        if happens:
            happens(loader, patch)
        for _ in range(3):
            with pytest.raises((RuntimeError, KeyboardInterrupt)):
                next(iterator)
    state = loader.state_dict()
    count = delivered if happens else 0
    assert (state["begun"], state["epoch"], state["batches"]) == (True, 0, count)
    again = DALILoader(dataset, PER_BATCH, sampler=sampler, device="cpu")
    again.load_state_dict(state)
    assert_pairs(again, dataset, in_order()[count:])


SILENT = """
import os, sys, threading
from torchvision.transforms import v2
from torchdali import DALILoader

answer = os.open
os.open = lambda path, *how: threading.Event().wait() if str(path).endswith("7.jpg") else answer(path, *how)
crop = v2.Compose([v2.ToImage(), v2.CenterCrop(8)])
loader = DALILoader(sys.argv[1], 2, transform=crop, timeout=float(sys.argv[2]), device="cpu")
if loader.timeout == 0:
    threading.Timer(1, os.kill, (os.getpid(), 2)).start()
try:
    list(loader)
except (RuntimeError, KeyboardInterrupt) as error:
    print(type(error).__name__, error)
if len(sys.argv) > 3:
    loader.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("close", [[], ["close"]], ids=["left", "closed"])
@pytest.mark.parametrize(
    ("timeout", "raised"), [(0.3, "RuntimeError DataLoader timed out after 0.3 seconds"), (0, "KeyboardInterrupt")]
)
def test_a_process_ends_beside_storage_that_does_not_answer(
    run_script: Script, pictures: Path, timeout: float, raised: str, close: list[str]
) -> None:
    try:
        done = run_script(SILENT, pictures, timeout, *close)
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"it did not end; it said {expired.stdout}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(raised)
    assert done.stdout.endswith("done\n")


# What is left behind


def settled(count: Callable[[], int], wanted: int) -> int:
    """The count, when it is what is wanted or two seconds later."""
    end = time.monotonic() + 2
    while count() > wanted and time.monotonic() < end:
        time.sleep(0.02)
    return count()


def test_no_thread_outlives_an_epoch(dataset: ImageFolder) -> None:
    before = threading.active_count()
    loader = DALILoader(dataset, PER_BATCH, num_workers=2, timeout=20, device="cpu")
    for stop in (None, 2):
        iterator = iter(loader)
        assert_pairs((batch for batch, _ in zip(iterator, range(stop or 99), strict=False)), dataset, in_order()[:stop])
        del iterator
        assert settled(threading.active_count, before) == before


def dali_threads() -> int:
    """The threads of pipelines, by the name that DALI gives them."""
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text())
    return sum("DALI" in name for name in names)


def test_loader_frees_its_pipeline_at_once(dataset: ImageFolder) -> None:
    """Its threads and its memory on the device do not wait for the garbage collector."""

    gc.collect()
    before = dali_threads()  # those of pipelines that timed out stay
    gc.disable()
    try:
        loader = DALILoader(dataset, PER_BATCH, num_workers=2, device="cpu")
        assert_pairs(loader, dataset, in_order())
        assert dali_threads() > before
        del loader
        assert settled(dali_threads, before) == before
    finally:
        gc.enable()


def test_no_file_stays_open(fresh_pictures: Path, numbered: Numbered) -> None:
    """Nor stand-ins in memory for files that DALI does not read, after epochs that were left and that failed."""
    paths = [Path(path) for path, _ in numbered(fresh_pictures).samples]
    for path in (paths[7], paths[20]):
        with PIL.Image.open(path) as picture:
            picture.save(path, "GIF")
    paths[12].write_bytes(paths[12].read_bytes()[:-200])
    fresh = numbered(fresh_pictures)

    def open_after(loaders: int) -> int:
        for _ in range(loaders):
            loader = DALILoader(fresh, PER_BATCH, num_workers=2, device="cpu")
            iterator = iter(loader)
            next(iterator)
            del iterator
            with pytest.raises(SampleError):
                list(loader)
        del loader
        gc.collect()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before = open_after(2)
    assert open_after(20) == before


# Forks, and the end of the interpreter

PRELUDE = """
import faulthandler, gc, os, sys, threading, time
from nvidia.dali import Pipeline
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchdali import DALILoader

device = sys.argv[2]
dataset = ImageFolder(sys.argv[1], v2.Compose([v2.ToImage(), v2.CenterCrop(24)]))
loader = DALILoader(dataset, 3, num_workers=2, device=device)
iterator = iter(loader)

def fork(child, leave=os._exit):
    process = os.fork()
    if not process:
        faulthandler.dump_traceback_later(10, exit=True)  # which is what a child that hangs ends with
        child()
        leave(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, child.__name__
"""

SCRIPTS = {
    "children of a live iterator": """
next(iterator)

def exits():
    pass

def drops_what_it_inherited():
    global iterator, loader
    del iterator, loader
    gc.collect()

def makes_a_loader_of_its_own():
    assert len(list(DALILoader(dataset, 5, device="cpu"))) == 5

def iterates_over_the_same_loader():
    assert device == "cuda" or len(list(loader)) == 8

def goes_on_with_the_iterator():
    for _ in range(2):
        try:
            next(iterator)
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError

# DALI's own destructors call CUDA when the interpreter ends, which no forked process may: such a one leaves by _exit.
fork(exits, leave=os._exit if device == "cuda" else sys.exit)
fork(drops_what_it_inherited)
fork(makes_a_loader_of_its_own)
fork(iterates_over_the_same_loader)
fork(goes_on_with_the_iterator)
assert len(list(DataLoader(dataset, 4, num_workers=2))) == 6
assert len(list(iterator)) == 7
""",
    "children that inherit garbage": """
def collects():
    gc.collect()

gc.disable()
assert len(list(iterator)) == 8
del loader, iterator
fork(collects)

gc.set_threshold(1)  # so that it is collected while the process is being forked
for _ in range(3):
    loader = DALILoader(dataset, 3, device=device)
    loader.itself = loader
    assert len(list(loader)) == 8
    del loader
    gc.enable()
    fork(collects)
    gc.disable()
""",
    "child of an interrupted epoch": """
share = Pipeline.share_outputs

def interrupted(*args, **kwargs):
    Pipeline.share_outputs = share
    raise KeyboardInterrupt

def drops_what_it_inherited():
    global iterator, loader
    del iterator, loader
    gc.collect()

Pipeline.share_outputs = interrupted
try:
    next(iterator)
except KeyboardInterrupt:
    pass  # the exception would keep what the child is to drop
fork(drops_what_it_inherited)
assert len(list(loader)) == 8
""",
    "exit beside a daemon thread in the midst of an epoch": """
def take_for_ever():
    while True:
        for _ in loader:
            time.sleep(0.01)

threading.Thread(target=take_for_ever, daemon=True).start()
time.sleep(0.5)
""",
    "exit beside a daemon thread in the midst of a transform": """
import torch
begun = threading.Event()

def slow(*parts):
    begun.set()
    for _ in range(60):
        torch.ones(1000, 1000).sin_()
    return parts

def take_for_ever():
    while True:
        list(DALILoader(dataset, 3, batch_transform=slow, device=device))

threading.Thread(target=take_for_ever, daemon=True).start()
begun.wait()
""",
    "exit in the midst of an epoch": """
try:
    next(iterator)
    raise KeyError
except KeyError as error:
    kept = error
""",
}


@pytest.mark.parametrize("code", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_processes_end_well(pictures: Path, run_script: Script, code: str, device: str) -> None:
    done = run_script(PRELUDE + code + 'print("done")', pictures, device, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert done.returncode == 0, done.stderr
    assert (done.stderr, done.stdout) == ("", "done\n")


BEGUN_LAST = """
import atexit, random, sys, threading, time
begun = threading.Event()

def spins(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

def last():
    begun.set()
    spins(0.005)

atexit.register(last)  # as the first one
"""

ASKED_LATE = """
def take(iterator):
    begun.wait()
    spins(0.01 * random.random())
    next(iterator)

for _ in range(30 if device == "cpu" else 6):  # each has a pipeline, which a GPU makes in half a second
    iterator = iter(loader)
    next(iterator)
    threading.Thread(target=take, args=(iterator,), daemon=True).start()
sys.setswitchinterval(1e-6)
print("done")
"""


@pytest.mark.timeout(150)
def test_daemon_threads_that_ask_as_the_process_ends(pictures: Path, run_script: Script, device: str) -> None:
    """Each at another moment, of which one is within what torch does before it asks for the batch."""
    code = BEGUN_LAST + PRELUDE + ASKED_LATE
    for _ in range(3):
        done = run_script(code, pictures, device, PYTHONWARNINGS="ignore::DeprecationWarning")
        assert (done.returncode, done.stderr, done.stdout) == (0, "", "done\n")
