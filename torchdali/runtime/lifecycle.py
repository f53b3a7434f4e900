"""The end of the process, and forks: what native code needs done before and after them."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import TypeVar, cast

import torch

__all__ = ["HOST_THREADS", "Resource", "disable_compile", "hand_over", "install_exit_hook", "native_call"]

_Function = TypeVar("_Function", bound=Callable[..., object])

HOST_THREADS = "torchdali-host"
"""The prefix of names of threads for which runs of DALI wait."""
_PATIENCE = 2.0
_exiting = threading.Event()
_threads_inside: set[int] = set()


class Resource:
    """Something with locks, threads or native handles. It is told of forks and of the end of the process.

    A forked child never destroys the resources that it inherits. The destructor of a pipeline would wait for threads
    that only the parent has. For CUDA events see :mod:`torchdali.runtime.events`.
    """

    def __init__(self) -> None:
        _resources.add(self)

    def renew(self) -> None:
        """Replace locks and threads in a forked child, which lacks the parent's threads, even those that hold locks."""

    def abandon(self) -> None:
        """Let go of native calls that may never return. The process ends, and DALI would wait for them."""


_resources: weakref.WeakSet[Resource] = weakref.WeakSet()
_held: list[Resource] = []


def _hold_resources() -> None:
    _held.extend(_resources)  # the child may collect garbage before its own hook runs


def _renew_resources() -> None:
    for resource in _held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))  # never destroyed, not even when the interpreter ends
        resource.renew()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_resources, after_in_parent=_held.clear, after_in_child=_renew_resources)


def install_exit_hook() -> None:
    """Run this module's exit hook before DALI's.

    Exit hooks run in reverse order, so call this after DALI has been imported. Calling it again moves the hook.
    """
    atexit.unregister(_abandon_resources)
    atexit.register(_abandon_resources)


def native_call() -> _NativeCall:
    """Return a context for a native call. If the interpreter is shutting down, it blocks a daemon thread.

    The interpreter ends a daemon thread as soon as it returns to Python. Inside C++ code that aborts the process. So
    the exit hook waits for daemon threads that are in a native call. A nested native call does nothing.
    """
    return _NativeCall()


class _NativeCall(ContextDecorator):
    """See :func:`native_call`.

    This is no generator. From Python 3.11 on, ``contextlib`` sets an attribute of an exception that leaves a generator,
    and the class of a user's exception may be frozen. No version mends it yet:
    https://github.com/python/cpython/issues/99856.
    """

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._is_nested = thread in _threads_inside
        if not self._is_nested:
            _threads_inside.add(thread)  # before the check below, so that the exit hook cannot miss this thread
            try:
                _block_if_exiting()
            except BaseException:
                _threads_inside.discard(thread)
                raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_nested:
            return
        try:
            if isinstance(error, Exception):
                _block_if_exiting()
        finally:
            _threads_inside.discard(threading.get_ident())
        if error is None:
            _block_if_exiting()

    def _recreate_cm(self) -> _NativeCall:
        return _NativeCall()  # of a decorated function each call has its own


def _block_if_exiting() -> None:
    if _exiting.is_set() and threading.current_thread().daemon:
        _threads_inside.discard(threading.get_ident())
        threading.Event().wait()


def _abandon_resources() -> None:
    _exiting.set()
    deadline = time.monotonic() + _PATIENCE
    # A thread that waits for storage may never return, so there is a deadline.
    while _find_daemon_threads_inside() and time.monotonic() < deadline:
        time.sleep(0.001)
    for resource in list(_resources):
        resource.abandon()


def _find_daemon_threads_inside() -> set[int]:
    return _threads_inside & {thread.ident or 0 for thread in threading.enumerate() if thread.daemon}


def hand_over(close: Callable[[], object]) -> bool:
    """Let another thread close something, if this one must not wait for runs of DALI. Return whether it must not.

    DALI calls Python functions in its own threads. There the garbage collector may find a pipeline, even the one that
    waits for this thread.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # Python did not start DALI's threads. It may have noticed them: they are called "Dummy-1" then.
    is_waited_for = names.get(threading.get_ident(), "Dummy-").startswith(("Dummy-", HOST_THREADS))
    if is_waited_for:
        threading.Thread(target=native_call()(close), name="torchdali-close", daemon=True).start()
    return is_waited_for


def disable_compile(function: _Function) -> _Function:
    """Exclude a function from ``torch.compile``, as torch excludes its DataLoader. Keeps the function's type."""
    return cast("Callable[[_Function], _Function]", torch.compiler.disable)(function)
