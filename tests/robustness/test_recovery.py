"""Epochs may be left, interrupted, timed out and forked: the next one is right, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvidia.dali
import PIL.Image
import pytest
from conftest import PER_BATCH, Numbered, Script, assert_pairs, in_order
from torchvision.datasets import ImageFolder

from torchdali import DALILoader, SampleError

pytestmark = pytest.mark.timeout(50)


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


# Interruptions


class TooLongError(Exception):
    """What a signal handler of the user raises."""


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TooLongError])
@pytest.mark.parametrize("name", ["schedule_run", "share_outputs"])
def test_an_interrupt_ends_the_epoch_and_the_next_one_is_whole(
    monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, name: str, raised: Any, device: str
) -> None:
    method, calls = getattr(nvidia.dali.Pipeline, name), iter(range(10**6))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if next(calls) == 4:
            raise raised
        return result

    loader = DALILoader(dataset, PER_BATCH, device=device)
    iterator, taken = iter(loader), []
    monkeypatch.setattr(nvidia.dali.Pipeline, name, interrupted)
    with pytest.raises(raised):
        taken.extend(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted; this epoch cannot go on, a new one can be started"):
            next(iterator)
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
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    del iterator
    assert_pairs(loader, dataset, in_order())


SILENT = """
import os, sys, threading
from torchvision.transforms import v2
from torchdali import DALILoader

answer = os.open
os.open = lambda path, *how: threading.Event().wait() if os.fsdecode(path).endswith("7.jpg") else answer(path, *how)
crop = v2.Compose([v2.ToImage(), v2.CenterCrop(8)])
loader = DALILoader(sys.argv[1], 2, transform=crop, timeout=0.3, device="cpu")
try:
    list(loader)
except RuntimeError as error:
    print(error)
loader.close()
print("done", flush=True)
"""


def test_a_process_ends_beside_storage_that_does_not_answer(run_script: Script, pictures: Path) -> None:
    try:
        done = run_script(SILENT, pictures)
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"it did not end; it said {expired.stdout}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DataLoader timed out after 0.3 seconds")
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
    "exit beside a daemon thread in the midst of an epoch": """
def take_for_ever():
    while True:
        for _ in loader:
            time.sleep(0.01)

threading.Thread(target=take_for_ever, daemon=True).start()
time.sleep(0.5)
""",
}


@pytest.mark.parametrize("code", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_processes_end_well(pictures: Path, run_script: Script, code: str, device: str) -> None:
    done = run_script(PRELUDE + code + 'print("done")', pictures, device, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert done.returncode == 0, done.stderr
    assert (done.stderr, done.stdout) == ("", "done\n")
