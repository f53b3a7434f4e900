"""The end of the process waits for daemon threads that are in DALI's code, and keeps others out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from torchdali.runtime import lifecycle

PATIENCE = 20


def in_a_daemon_thread(do: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


class EndsAsItIsAsked(threading.Event):
    """Says no, and has the process end just then, as far as it gets without an answer that was not given."""

    def is_set(self) -> bool:
        come = super().is_set()
        if not come:
            self.end = threading.Thread(target=lifecycle._abandon_resources)
            self.end.start()
            self.end.join(0.3)
        return come


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> EndsAsItIsAsked:
    come = EndsAsItIsAsked()
    monkeypatch.setattr(lifecycle, "_exiting", come)
    monkeypatch.setattr(lifecycle, "_PATIENCE", PATIENCE)
    return come


def test_end_waits_for_a_thread_that_looked_just_before(come: EndsAsItIsAsked) -> None:
    ended_meanwhile: list[bool] = []
    returned = threading.Event()

    def ask() -> None:
        with lifecycle.native_call():
            ended_meanwhile.append(not come.end.is_alive())
        returned.set()

    in_a_daemon_thread(ask)
    while not ended_meanwhile:
        threading.Event().wait(0.01)
    come.end.join(PATIENCE)
    assert ended_meanwhile == [False]
    assert not come.end.is_alive()
    assert not returned.wait(0.3)


def test_a_thread_that_comes_later_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    come = threading.Event()
    monkeypatch.setattr(lifecycle, "_exiting", come)
    lifecycle._abandon_resources()
    entered = threading.Event()

    def ask() -> None:
        with lifecycle.native_call():
            entered.set()

    assert in_a_daemon_thread(ask).is_alive()
    assert not entered.wait(0.3)
    with lifecycle.native_call():  # a thread that is waited for by Python itself is let through
        entered.set()
    assert not lifecycle._threads_inside
