"""Call a Python function for each sample of a run of DALI on the CPU, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchdali.runtime import lifecycle
from torchdali.runtime.threads import DaemonThreadPoolExecutor

__all__ = ["FORKED", "HostCalls", "limit_wait"]

FORKED = (
    "DALI was calling a Python function when this process was forked, and it waits here for that call without end; "
    "start this process by spawn or forkserver, or fork it before the epoch begins"
)
_PATIENCE = 60.0
"""Seconds in which the first run of a forked process must begin to call its functions."""
_lock = threading.Lock()
_local = threading.local()
_may_wait_forever = False


def limit_wait(calls: Sequence[HostCalls]) -> float:
    """Return after how many seconds to give up a run that calls functions; 0 to wait for it as long as it takes.

    DALI calls Python functions one at a time, under a lock of its own. A forked process inherits the lock as it was,
    and DALI 2.4 does not renew it. We know no issue about it. Nobody outside can see who holds the lock.
    """
    return _PATIENCE if calls and _may_wait_forever else 0


class HostCalls(lifecycle.Resource):
    """Calls a function for each sample. DALI's ``python_function`` calls this object once a run.

    The function should release the interpreter's lock while it computes, as torch and PIL do.

    Args:
        function: Takes the arrays of a sample, one of each input, and returns one.
        threads: Number of threads.
    """

    def __init__(self, function: Callable[..., Any], threads: int) -> None:
        self._function, self._threads = function, threads
        self._pool: DaemonThreadPoolExecutor | None = None
        super().__init__()

    def renew(self) -> None:
        """See :class:`torchdali.runtime.lifecycle.Resource`."""
        global _lock, _may_wait_forever
        _lock, _may_wait_forever = threading.Lock(), True

    def __call__(self, *inputs: Sequence[Any]) -> list[Any]:
        """Return the results for a run, from the inputs' arrays."""
        global _may_wait_forever
        _may_wait_forever = False
        samples = list(zip(*inputs, strict=True))
        step = min(self._threads, len(samples))
        if step < 2:
            return self._call(samples)
        if self._pool is None:  # in the process that runs the pipeline, which may have been forked since
            self._pool = DaemonThreadPoolExecutor(self._threads, lifecycle.HOST_THREADS)
        parts = [self._pool.submit(self._call_alone, samples[i::step]) for i in range(step)]
        results: list[Any] = [None] * len(samples)
        for i, part in enumerate(parts):
            results[i::step] = part.result()
        return results

    def close(self) -> None:
        """End the threads, after the last run."""
        if self._pool:
            self._pool.shutdown()
            self._pool = None

    def _call_alone(self, samples: Sequence[tuple[Any, ...]]) -> list[Any]:
        if not hasattr(_local, "is_alone"):
            _compute_alone()
            _local.is_alone = True
        return self._call(samples)

    def _call(self, samples: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [self._function(*sample) for sample in samples]


def _compute_alone() -> None:
    """Let torch compute in the calling thread, without threads of its own: those of all callers share the cores."""
    with _lock:
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        # That is for this thread, and for all that begin later. The latter is taken back.
        other = threading.Thread(target=torch.set_num_threads, args=(count,))
        other.start()
        other.join()
