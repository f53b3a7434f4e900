"""The end of the process keeps daemon threads out of DALI's code."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from torchdali.runtime import lifecycle


def in_a_daemon_thread(do: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


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
