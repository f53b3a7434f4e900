"""Epochs leave nothing behind, however they end: no object, thread, file or worker process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PER_BATCH
from helpers.damages import DAMAGES
from helpers.proxied import PathSamples
from torch.multiprocessing import reductions
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, ImageIndex, SampleError
from torchdali.runtime.exceptions import defer

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

WARM, MORE = 12, 6


@pytest.fixture(autouse=True)
def _young() -> Iterator[None]:
    """Leaves out what was there before, which takes a second to be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def whole(loader: Any) -> None:
    for _ in loader:
        pass


def broken_off(loader: Any) -> None:
    for _ in itertools.islice(loader, 2):
        pass


def failing(loader: Any) -> None:
    iterator = iter(loader)
    while True:
        try:
            next(iterator)
        except SampleError:
            pass
        except StopIteration:
            return


def renewed(loader: Any) -> None:
    loader.dataset.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(20)])
    broken_off(loader)


def closed(loader: Any) -> None:
    with loader:
        broken_off(loader)


def read(dataset: ImageFolder, tmp_path: Path, **options: Any) -> Any:
    return DALILoader(dataset, PER_BATCH, **options)


def indexed(dataset: ImageFolder, tmp_path: Path, **options: Any) -> Any:
    ImageIndex.write(tmp_path / "a.npz", dataset.samples, headers=True)
    return DALILoader(ImageIndex(tmp_path / "a.npz", dataset.transform), PER_BATCH, **options)


def asked(dataset: ImageFolder, tmp_path: Path, **options: Any) -> Any:
    return DALILoader(PathSamples(dataset), PER_BATCH, transform=dataset.transform, **options)


STAY = {"num_workers": 1, "persistent_workers": True}
CASES = {
    "read, broken off": (read, {}, broken_off),
    "read, failing": (read, {}, failing),
    "read, renewed": (read, {}, renewed),
    "read, closed": (read, {}, closed),
    "index": (indexed, {}, whole),
    "asked, failing": (asked, {}, failing),
    "asked by a worker that stays, broken off": (asked, STAY, broken_off),
}


def counts() -> dict[str, int]:
    """What there is in this process, after collecting garbage. Threads that were told to end take a moment."""
    deadline = time.monotonic() + 2
    while any(thread.name.startswith("torchdali-scan") for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    reductions.shared_cache.free_dead_references()  # torch does so when there are more than 128
    for _ in range(2):
        gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    found = {"objects": len(objects), "tensors": tensors, "python threads": threading.active_count()}
    del objects
    for kind in ("task", "fd"):
        found[kind] = len(list(Path("/proc/self", kind).iterdir()))
    found["maps"] = len(Path("/proc/self/maps").read_text().splitlines())
    processes = 0
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            processes += len(path.read_text().split())
    return {**found, "processes": processes, "blocks": sys.getallocatedblocks()}


@pytest.mark.parametrize(("make", "options", "epoch"), CASES.values(), ids=CASES.keys())
def test_epochs_leave_nothing_behind(
    fresh: ImageFolder, tmp_path: Path, make: Any, options: dict[str, Any], epoch: Callable[[Any], None]
) -> None:
    if epoch is failing:
        Path(fresh.samples[4][0]).write_bytes(Path(fresh.samples[4][0]).read_bytes()[:-200])
        Path(fresh.samples[10][0]).write_text("no picture")
    loader = make(fresh, tmp_path, device="cpu", **options)

    def left(epochs: int) -> dict[str, int]:
        for _ in range(epochs):
            epoch(loader)
        failing(loader)  # to its end, so that as much is under way as before: nothing
        return counts()

    # Of each less than one for an epoch. A worker makes another block of memory, which is a file, when it likes to;
    # and some blocks of Python's memory are caches of its interpreter.
    by_worker = 4 if options and make is asked else 0
    allowed = {"objects": MORE - 1, "fd": by_worker, "maps": MORE - 1, "blocks": 20 * MORE}
    before, too_many = left(WARM), dict[str, int]()
    for _ in range(2):  # what is left behind is so each time, a cache of the interpreter's grows once
        after = left(MORE)
        grown = {name: after[name] - before[name] for name in before}
        too_many = {name: more for name, more in grown.items() if more > allowed.get(name, 0)}
        if not too_many:
            break
        before = after
    assert not too_many


def test_an_exception_that_waits_for_its_turn_holds_no_frames() -> None:
    """Nor do those that it came of: in each of them is the iterator."""
    try:
        try:
            raise OSError
        except OSError as cause:
            raise SampleError(1, "it", "it cannot be read") from cause
    except SampleError as error:
        kept = defer(error)
    assert kept.__cause__ is not None
    assert kept.__traceback__ is kept.__cause__.__traceback__ is None


@pytest.mark.parametrize(
    ("how", "tolerant"), [("garbage", False), ("vanished", True), ("JPEG without its last bytes", False)]
)
def test_the_error_of_a_file_is_gone_when_nobody_holds_it(fresh: ImageFolder, how: str, tolerant: bool) -> None:
    """In a cycle it would hold the frames that it came through, and with them the epoch, until garbage is collected."""
    DAMAGES[how](Path(fresh.samples[4][0]))
    loader = DALILoader(fresh, PER_BATCH, device="cpu", on_error="skip" if tolerant else "raise")
    gc.collect()
    gc.disable()
    try:
        failing(loader)
        deadline = time.monotonic() + 10  # a thread that read a header may hold its error a moment longer
        while (left := [*loader._session.iterators, *exceptions_but(loader.errors)]) and time.monotonic() < deadline:
            del left
            time.sleep(0.01)
        assert not left
    finally:
        gc.enable()


def exceptions_but(known: Sequence[Exception]) -> list[Exception]:
    """All that there are besides."""
    found = [one for one in gc.get_objects() if issubclass(type(one), Exception)]
    return [one for one in found if not any(one is other for other in known)]


class Endless:
    """A sampler with a state, which draws from torch's global generator, as the training loop does."""

    def __init__(self) -> None:
        self.generator, self.given = torch.Generator(), 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.given += 1
            yield int(torch.randint(24, ())) // 2 + int(torch.randint(12, (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def plain(dataset: ImageFolder, tmp_path: Path, **options: Any) -> Any:
    return DALILoader([*range(24)], PER_BATCH, **options)


@pytest.mark.parametrize(("make", "workers"), [(read, 0), (asked, 1), (plain, 0)])
def test_batches_leave_nothing_behind(dataset: ImageFolder, tmp_path: Path, make: Any, workers: int) -> None:
    """In an epoch that takes long, nothing is kept for each of them."""
    loader = make(dataset, tmp_path, sampler=Endless(), device="cpu", num_workers=workers)
    iterator = iter(loader)
    ours = tracemalloc.Filter(True, "*/torchdali/*")

    def after(batches: int) -> tuple[int, int]:
        for _ in itertools.islice(iterator, batches):
            torch.rand(1)
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
        kept = [one for one in gc.get_objects() if type(one) in (dict, list)]
        return len(kept), sum(trace.size for trace in traces)

    tracemalloc.start()
    try:
        after(50)
        (objects, memory), (more, larger) = after(50), after(100)
    finally:
        # Before tracemalloc stops: a thread of DALI's that lets go of an object then may end the process, as
        # python/cpython issue 128679 tells.
        loader.close()
        tracemalloc.stop()
    assert more - objects < 50
    assert larger - memory < 100_000, "a generator's state is 5,000 bytes"
