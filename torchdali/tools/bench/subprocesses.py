"""Measure each case in its own process, on some of the cores, under a time limit.

A process that fails or hangs is reported, and does not affect the next one.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Protocol, cast

_OUTPUT_LENGTH = 3000
"""How many of the last characters that a failed process wrote are reported."""


class Case(Protocol):
    """A case to measure. Its class is defined at the top of a module, so that it can be pickled."""

    @property
    def cores(self) -> int:
        """Number of cores that the process may use."""
        ...


Work = Callable[[Any, Path], None]
"""Function that measures a case and writes the figures to the file with :func:`write_figures`."""


def start_context(preloaded: Sequence[str]) -> BaseContext:
    """Return the context that starts processes: "forkserver" if CUDA works in a forked process, else "spawn".

    Args:
        preloaded: Modules that the fork server imports once. If empty, each process imports for itself.
    """
    if preloaded:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preloaded))
        trial = context.Process(target=_use_cuda)
        trial.start()
        trial.join(60)
        if trial.exitcode == 0:
            return context
        trial.kill()
        trial.join()
    return multiprocessing.get_context("spawn")


def _use_cuda() -> None:
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").item()
    elif torch.cuda.device_count():
        raise RuntimeError("there is a GPU, but CUDA does not start")


def measure_in_process(context: BaseContext, work: Work, case: Case, timeout: float) -> dict[str, Any]:
    """Run ``work`` on a case in a new process, with a limit of ``timeout`` seconds.

    Returns:
        The figures with status "ok". Without figures: status "timeout" or "failed", and the process's last output.
        ``exit`` tells how the process ended. A process that wrote its figures and then failed is "ok".
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result.json", Path(folder) / "output"
        arguments = (work, case, result, output, multiprocessing.get_start_method())
        child = cast("Any", context).Process(target=_run, args=arguments)
        child.start()
        try:
            child.join(timeout)
            ended = "timeout" if child.is_alive() else str(child.exitcode)
        finally:
            kill_group(child.pid)
            child.kill()
            child.join()
        return read_outcome(result, output, ended, started)


def kill_group(leader: int) -> None:
    """Kill the process group of a process, which has the workers that it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(leader, signal.SIGKILL)


def read_outcome(result: Path, output: Path, ended: str, started: float) -> dict[str, Any]:
    """Read the files of a process that ended. The result is that of :func:`measure_in_process`."""
    figures: dict[str, Any] = {"exit": ended, "process_s": round(time.perf_counter() - started, 1)}
    if result.exists():
        return {"status": "ok", **figures, **json.loads(result.read_text())}
    text = output.read_text(errors="replace") if output.exists() else ""
    return {"status": "timeout" if ended == "timeout" else "failed", **figures, "stderr": text[-_OUTPUT_LENGTH:]}


def _run(work: Work, case: Case, result: Path, output: Path, start_method: str) -> None:
    multiprocessing.set_start_method(start_method, force=True)  # else it would be the one that started this process
    os.setsid()  # so that a timeout also ends the workers
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.cores])
    with output.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        work(case, result)
    except Exception:  # noqa: BLE001 - any error is reported
        traceback.print_exc()
        exit_now(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def exit_now(code: int) -> None:
    """End this process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_figures(figures: dict[str, Any], result: Path) -> None:
    """Write figures as JSON. The file appears when it is complete, because the process may be killed at any time."""
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(figures))
    unfinished.rename(result)
