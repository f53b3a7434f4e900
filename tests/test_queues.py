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
from types import FrameType
from typing import Any

import pytest
from conftest import PER_BATCH, assert_pairs, in_order
from crops import DOES, EXACT, Crops, Truth, every_use, raised, with_workers
from torch.utils.data import DataLoader

from torchdali import DALILoader
from torchdali.feed import Feed
from torchdali.parallel import Parallel

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
    monkeypatch.setattr(Feed, "close", lambda _: hit())
    with of_a_signal():
        iterator.__del__()
    monkeypatch.undo()
    assert [process.exitcode for process in processes] == [0, 0]
    assert_pairs(taken, Truth(), in_order()[:1])
