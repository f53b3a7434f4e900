"""Threads that are started when they are needed, hand exceptions on, and end when they are told to."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

from torchdali.runtime.threads import DaemonThreadPoolExecutor

pytestmark = pytest.mark.timeout(20)


def mine() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-daemons")]


def test_results_and_exceptions_come_to_who_asks() -> None:
    pool = DaemonThreadPoolExecutor(3, "test-daemons")
    futures = [pool.submit(divmod, number, number % 4) for number in range(40)]
    for number, future in enumerate(futures):
        if number % 4:
            assert future.result() == divmod(number, number % 4)
        else:
            with pytest.raises(ZeroDivisionError):
                future.result()
    assert 1 <= len(mine()) <= 3
    assert all(thread.daemon for thread in mine())
    pool.shutdown()
    for thread in mine():
        thread.join(5)
    assert not mine()


def test_what_was_not_begun_is_cancelled() -> None:
    pool, go_on, done = DaemonThreadPoolExecutor(2, "test-daemons"), threading.Event(), []

    def work(number: int) -> Any:
        go_on.wait(10)
        done.append(number)

    futures = [pool.submit(work, number) for number in range(6)]
    while not all(future.running() for future in futures[:2]):
        time.sleep(0.01)
    pool.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    for future in futures[2:]:
        with pytest.raises(CancelledError):
            future.result(5)
    assert [future.result(5) for future in futures[:2]] == [None, None]
    assert sorted(done) == [0, 1]


def test_the_threads_end_where_nobody_ends_them() -> None:
    pool = DaemonThreadPoolExecutor(2, "test-daemons")
    futures = [pool.submit(time.sleep, 0.02) for _ in range(4)]
    threads = mine()
    del pool
    assert [future.result(5) for future in futures] == [None] * 4
    for thread in threads:
        thread.join(5)
    assert not mine()
