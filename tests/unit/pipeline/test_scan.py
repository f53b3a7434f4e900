"""Who reads the headers of a batch: the thread that iterates while that is quick, and others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchdali.pipeline.readers import Scan, ScanTimeoutError, scan

pytestmark = pytest.mark.timeout(20)

COUNT = 100
AGES = 3600.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


class Readers:
    """Notes who reads what; ``bad`` cannot be read."""

    def __init__(self, bad: int = -1) -> None:
        self.read: list[int] = []
        self.threads: set[int] = set()
        self._bad = bad

    def __call__(self, indices: Sequence[int]) -> None:
        self.threads.add(threading.get_ident())
        for index in indices:
            if index == self._bad:
                raise OSError(f"{index} is bad")
            self.read.append(index)


def no_pool() -> ThreadPoolExecutor:
    raise AssertionError("nobody else was to read")


def test_quick_files_are_read_where_they_are_asked_for() -> None:
    readers = Readers()
    whole = Scan(range(COUNT), readers, no_pool, patience=AGES)
    assert whole.is_done()
    assert readers.threads == {threading.get_ident()}
    assert readers.read == list(range(COUNT))


@pytest.mark.parametrize("patience", [0.0, 1e-12])
def test_others_read_what_takes_too_long(pool: ThreadPoolExecutor, patience: float) -> None:
    readers = Readers()
    Scan(range(COUNT), readers, lambda: pool, patience=patience).wait()
    assert sorted(readers.read) == list(range(COUNT))
    assert threading.get_ident() not in readers.threads


@pytest.mark.parametrize(("seconds", "quick"), [(19e-6, True), (21e-6, False)])
def test_quick_files_need_no_patience(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, seconds: float, quick: bool
) -> None:
    """However many they are: on a host where each takes a little longer, no part of them is left to others."""
    now = [0.0]
    monkeypatch.setattr(scan, "perf_counter", lambda: now[0])
    readers = Readers()

    def read(indices: Sequence[int]) -> None:
        now[0] += seconds * len(indices)
        readers(indices)

    Scan(range(10 * COUNT), read, lambda: pool, patience=1e-6).wait()
    assert sorted(readers.read) == list(range(10 * COUNT))
    assert (readers.threads == {threading.get_ident()}) is quick
    assert threading.get_ident() in readers.threads


def test_of_slow_files_no_more_than_one_is_read_where_they_are_asked_for(pool: ThreadPoolExecutor) -> None:
    here: list[int] = []
    caller = threading.get_ident()

    def read(indices: Sequence[int]) -> None:
        time.sleep(0.01 * len(indices))
        here.extend(indices if threading.get_ident() == caller else [])

    Scan(range(COUNT), read, lambda: pool, patience=1e-3).wait()
    assert here == [0]


@pytest.mark.slow
def test_the_timeout_is_for_all_of_them() -> None:
    with ThreadPoolExecutor(1) as pool:
        whole = Scan(range(4), lambda _: time.sleep(0.4), lambda: pool, chunk=1)
        with pytest.raises(ScanTimeoutError):
            whole.wait(0.8)


@pytest.mark.parametrize("patience", [0.0, AGES])
def test_error_waits_for_its_turn(pool: ThreadPoolExecutor, patience: float) -> None:
    whole = Scan(range(COUNT), Readers(bad=50), lambda: pool, patience=patience)
    with pytest.raises(OSError, match="50 is bad"):
        whole.wait()
