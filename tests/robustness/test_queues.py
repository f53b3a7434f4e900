"""No signal and no sample leaves anybody waiting for ever for what workers and the main process tell each other."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from conftest import PER_BATCH, Script, assert_pairs, in_order
from helpers.crops import DOES, EXACT, Crops, Truth, every_use, raised, with_workers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchdali import DALILoader
from torchdali.pipeline.feed import Prefetcher
from torchdali.workers.processes import Parallel

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


def killed_while_it_asks_for_the_end(index: int, image: Any) -> Any:
    if index == 7:
        frame: FrameType | None = sys._getframe()
        while frame and "done_event" not in frame.f_locals:
            frame = frame.f_back
        assert frame
        frame.f_locals["done_event"]._cond.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    return image


@every_use
@with_workers
def test_workers_are_ended_whatever_a_dead_one_held(workers: Any, does: Any) -> None:
    gc.collect()  # torch's errors hold iterators in cycles, whose end the death that is to come would be raised in
    loader = DALILoader(Crops(killed_while_it_asks_for_the_end), PER_BATCH, device="cpu", **workers, **does)
    taken: list[Any] = []
    with pytest.raises(RuntimeError, match="is killed by signal"):
        taken.extend(loader)  # or as the epoch begins, where this process is slower than its workers
    loader.dataset.fault = Crops().fault
    assert_pairs(loader, Truth(does.get("transform")), in_order())


# Interruptions


@contextmanager
def interrupted_as_it_calls(name: str, number: int) -> Iterator[None]:
    """A KeyboardInterrupt where a call of a function begins, as Python would raise one there."""
    left = iter(range(number, -1, -1))

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_qualname == name and next(left) == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified names before")
@with_workers
@pytest.mark.parametrize("transform", [EXACT, None], ids=["transform", "nothing"])
@pytest.mark.parametrize("name", ["Condition.__exit__", "Condition.notify"])
def test_an_interrupt_while_workers_are_told_to_end_locks_nothing(name: str, transform: Any, workers: Any) -> None:
    """For the lock of a queue, left locked, the end of the queue would wait."""
    loader = DALILoader(Crops(), PER_BATCH, transform=transform, device="cpu", **workers)
    for number in range(2):
        iterator: Any = iter(loader)
        assert_pairs([next(iterator)], Truth(transform), in_order()[:1])
        with suppress(KeyboardInterrupt), interrupted_as_it_calls(name, number):
            iterator._shutdown_workers()
        del iterator
        loader.close()
        assert_pairs(loader, Truth(transform), in_order())


def out_of_time(*_: Any) -> None:
    raise TimeoutError


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM], ids=["interrupt", "alarm"])
def hit(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """A signal whose handler raises: of a terminal, or of an alarm that bounds the time of a step."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGALRM: out_of_time}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield lambda: signal.raise_signal(request.param)
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def of_a_signal() -> Iterator[None]:
    """What is raised comes of a signal; it is not kept, as it would keep the iterator."""
    try:
        yield
    except (KeyboardInterrupt, TimeoutError) as error:
        traceback.clear_frames(error.__traceback__)
    else:
        raise AssertionError("nothing was raised")


@every_use
@with_workers
def test_an_interrupt_while_a_batch_is_taken_ends_the_epoch(
    monkeypatch: pytest.MonkeyPatch, hit: Callable[[], None], workers: Any, does: Any
) -> None:
    """The queue's lock may have been taken, and part of a batch; DataLoader waits for ever then."""
    loader = DALILoader(Crops(count=60), PER_BATCH, device="cpu", **workers, **does)
    iterator: Any = iter(loader)
    next(iterator)
    queue = iterator._data_queue

    def taking(**_: Any) -> None:
        assert queue._rlock.acquire()
        hit()

    monkeypatch.setattr(queue, "get", taking)
    with of_a_signal():
        list(iterator)
    monkeypatch.undo()
    for _ in range(2):
        assert str(raised(RuntimeError, iterator)).startswith("the loader was interrupted; this epoch cannot go on")
    for _ in range(2):
        assert_pairs(loader, Truth(does.get("transform")), in_order(0, 60))


def test_a_wait_may_be_interrupted_and_gone_on_with(monkeypatch: pytest.MonkeyPatch, hit: Callable[[], None]) -> None:
    """As with DataLoader, where there is nothing that DALI may have half of."""
    iterator: Any = iter(DALILoader(Crops(), PER_BATCH, device="cpu", num_workers=1))
    taken = [next(iterator)]
    monkeypatch.setattr(iterator, "_wait", lambda _: hit())
    with of_a_signal():
        next(iterator)
    monkeypatch.undo()
    assert_pairs([*taken, *iterator], Truth(None), in_order())


@every_use
@pytest.mark.parametrize("waits", [0, 1])
def test_after_an_interrupt_as_an_epoch_began_the_next_one_is_whole(
    monkeypatch: pytest.MonkeyPatch, hit: Callable[[], None], waits: int, does: Any
) -> None:
    """What workers that persist say of the first beginning is not taken for a batch, as DataLoader does."""
    loader = DALILoader(Crops(), PER_BATCH, device="cpu", num_workers=2, persistent_workers=True, **does)
    assert_pairs(loader, Truth(does.get("transform")), in_order())
    wait, left = Parallel._wait, iter(range(waits, -1, -1))

    def interrupted(iterator: Parallel, timeout: float) -> float:
        if next(left) == 0:
            hit()
        return wait(iterator, timeout)

    monkeypatch.setattr(Parallel, "_wait", interrupted)
    with of_a_signal():
        iter(loader)
    monkeypatch.undo()
    for _ in range(2):
        assert_pairs(loader, Truth(does.get("transform")), in_order())


def in_a_while(index: int, image: Any) -> Any:
    time.sleep(0.1)  # longer than three times what is waited below
    return image


@every_use
def test_an_interrupt_as_an_epoch_begins_counts_however_long_nothing_came_before(
    monkeypatch: pytest.MonkeyPatch, hit: Callable[[], None], does: Any
) -> None:
    loader = DALILoader(Crops(in_a_while), 3, device="cpu", num_workers=1, persistent_workers=True, **does)
    next(iter(loader))
    wait, times = Parallel._wait, iter([0.01, 0.01])

    def interrupted(iterator: Parallel, _: float) -> float:
        for time_left in times:
            return wait(iterator, time_left)
        return cast("float", hit())

    monkeypatch.setattr(Parallel, "_wait", interrupted)
    with of_a_signal():
        iter(loader)
    monkeypatch.undo()
    assert_pairs(loader, Truth(does.get("transform")), in_order())


class Asked(BatchSampler):
    """Batches of one index, before one of which something is done."""

    def __init__(self, before: int, does: Callable[[], None]) -> None:
        self.before, self.does = before, does

    def __iter__(self) -> Iterator[Any]:
        for index in range(12):
            if index == self.before:
                self.does()
            yield [index]

    def __len__(self) -> int:
        return 12


def late(index: int, image: Any) -> Any:
    if index == 0:
        time.sleep(0.5)
    return image


@every_use
@pytest.mark.parametrize("before", [4, 5, 7])
def test_no_batch_is_left_out_after_an_interrupt_while_the_next_is_asked_for(
    hit: Callable[[], None], before: int, does: Any
) -> None:
    """Be it of the worker that is ahead: torch forgets a batch before it asks, and gives it out after."""
    loader = DALILoader(Crops(late, 12), batch_sampler=Asked(before, hit), num_workers=2, device="cpu", **does)
    iterator = iter(loader)
    labels: list[int] = []
    with of_a_signal():
        labels.extend(int(label) for _, label in iterator)
    with suppress(RuntimeError):
        labels.extend(int(label) for _, label in iterator)
    assert labels == [*range(len(labels))]


@every_use
@pytest.mark.parametrize("kind", [lambda dataset: dataset, Stream], ids=["map", "stream"])
def test_a_state_after_an_interrupt_has_no_batch_that_nobody_got(
    monkeypatch: pytest.MonkeyPatch, hit: Callable[[], None], kind: Any, does: Any
) -> None:
    def new() -> DALILoader[Any]:
        return DALILoader(kind(Crops(count=30)), 1, num_workers=1, device="cpu", **does)

    first, second = new(), new()
    iterator: Any = iter(first)
    labels = [int(label) for _, label in islice(iterator, 3)]
    put = iterator._index_queues[0].put

    def hit_then(obj: Any) -> None:
        put(obj)
        hit()

    monkeypatch.setattr(iterator._index_queues[0], "put", hit_then)
    with of_a_signal():
        labels.extend(int(label) for _, label in iterator)  # the next batch may be there without another being asked
    monkeypatch.undo()
    second.load_state_dict(first.state_dict())
    assert [*labels, *(int(label) for _, label in second)] == [*range(30)]


def test_a_wait_may_be_interrupted_though_another_worker_is_ahead(
    monkeypatch: pytest.MonkeyPatch, hit: Callable[[], None]
) -> None:
    iterator: Any = iter(DALILoader(Crops(late, 12), 1, device="cpu", num_workers=2))
    wait, times = Parallel._wait, iter([5.0])

    def interrupted(own: Parallel, timeout: float) -> float:
        for time_left in times:
            return wait(own, time_left)
        return cast("float", hit())

    monkeypatch.setattr(Parallel, "_wait", interrupted)
    with of_a_signal():
        next(iterator)
    monkeypatch.undo()
    assert [int(label) for _, label in iterator] == [*range(12)]


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


def senders() -> int:
    return sum(thread.name == "QueueFeederThread" for thread in threading.enumerate())


@every_use
@with_workers
def test_an_interrupted_end_leaves_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch, hit: Callable[[], None], workers: Any, does: Any
) -> None:
    before = senders()
    loader = DALILoader(Crops(), PER_BATCH, device="cpu", **workers, **does)
    iterator: Any = iter(loader)
    next(iterator)
    monkeypatch.setattr(iterator._workers[0], "join", lambda timeout: hit())
    with of_a_signal():
        iterator._shutdown_workers()
    monkeypatch.undo()
    processes = iterator._workers
    del iterator, loader
    gc.collect()
    for process in processes:
        process.join()
    deadline = time.monotonic() + 20
    while senders() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert senders() <= before


@with_workers
def test_an_interrupt_while_an_iterator_is_dropped_leaves_no_worker_behind(
    monkeypatch: pytest.MonkeyPatch, hit: Callable[[], None], workers: Any
) -> None:
    """Of what was left torch would take a later iterator, should it be of the same id, for one that it knows."""
    loader = DALILoader(Crops(), PER_BATCH, device="cpu", transform=EXACT, **workers)
    iterator: Any = iter(loader)
    taken = [next(iterator)]
    processes = iterator._workers
    monkeypatch.setattr(Prefetcher, "close", lambda _: hit())
    with of_a_signal():
        iterator.__del__()
    monkeypatch.undo()
    assert [process.exitcode for process in processes] == [0, 0]
    assert_pairs(taken, Truth(), in_order()[:1])
