"""The end of the process, at which DALI shuts its pipelines down while daemon threads may still run."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch

__all__ = ["disable_compile", "expect", "native_call"]

_Function = TypeVar("_Function", bound=Callable[..., object])

_PATIENCE = 2.0
_come = threading.Event()
_inside: set[int] = set()


def expect() -> None:
    """Has the end be known before DALI, which must be imported already, does what it does then."""
    atexit.unregister(_end)
    atexit.register(_end)


@contextmanager
def native_call() -> Generator[None, None, None]:
    """For what DALI and torch are asked: never returns to a daemon thread as the process ends, nor shows it an error.

    The interpreter ends such a thread a little later, when it comes back to Python. From within their code, which is
    C++, that would abort the process: so the end waits for what is under way here. Within another one it does nothing.
    """
    here = threading.get_ident()
    if here in _inside:
        yield
        return
    _inside.add(here)  # and only then looks, as between the two the end would see nobody here
    try:
        _park()
        yield
    except Exception:
        _park()
        raise
    finally:
        _inside.discard(here)
    _park()


def _park() -> None:
    if _come.is_set() and threading.current_thread().daemon:
        _inside.discard(threading.get_ident())
        threading.Event().wait()


def _end() -> None:
    _come.set()
    end = time.monotonic() + _PATIENCE
    while _inside.intersection(thread.ident for thread in threading.enumerate() if thread.daemon):
        if time.monotonic() > end:
            return  # it waits for storage that does not answer, and will not come back
        time.sleep(0.001)


def disable_compile(function: _Function) -> _Function:
    """Exclude a function from ``torch.compile``, as torch excludes its DataLoader. Keeps the function's type."""
    return cast("Callable[[_Function], _Function]", torch.compiler.disable)(function)
