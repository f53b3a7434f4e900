"""Cases in processes of their own, on some of the cores, under a time limit.

A process that fails or hangs is reported as such, and the next one is not harmed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Protocol, cast

__all__ = ["leave", "measured", "measured_command", "start_context", "write"]

_KEPT = 3000
"""Characters of what a process wrote last."""


class Case(Protocol):
    """What is measured; a class of a module, so that it can be pickled."""

    @property
    def cores(self) -> int:
        """How many cores the process may use."""
        ...


Work = Callable[[Any, Path], None]
"""Measures a case and writes the figures to the file, by :func:`write`."""


def start_context(preloaded: Sequence[str]) -> BaseContext:
    """How processes are started: forked from one that has the imports, or each by itself where that harms CUDA.

    Args:
        preloaded: modules to import once; with none, each process imports for itself.
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
        raise RuntimeError("there is a GPU, and CUDA does not start")


def measured(context: BaseContext, work: Work, case: Case, timeout: float) -> dict[str, Any]:
    """The case's figures and status 'ok', or status 'timeout' or 'failed' and what it wrote last.

    A process that wrote its figures and then did not end cleanly is 'ok', and `exit` says how it ended.

    Args:
        context: what starts processes, from :func:`start_context`.
        work: what is run, a function of a module.
        case: what it is given.
        timeout: seconds.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said"
        arguments = (work, case, result, said, multiprocessing.get_start_method())
        child = cast("Any", context).Process(target=_run, args=arguments)
        child.start()
        try:
            child.join(timeout)
            ended = "timeout" if child.is_alive() else str(child.exitcode)
        finally:
            _kill_group(child.pid)
            child.kill()
            child.join()
        return _outcome(result, said, ended, started)


def measured_command(command: Sequence[str], cwd: Path, environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """The same for a program, which is given as its last argument the file for the figures.

    Args:
        command: the program and its arguments.
        cwd: where it runs.
        environment: its environment.
        timeout: seconds.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said"
        with said.open("w") as file:
            # its own session, so that a time-out also ends the workers that it started
            child = subprocess.Popen(
                [*command, str(result)], cwd=cwd, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        try:
            ended = str(child.wait(timeout))
        except subprocess.TimeoutExpired:
            ended = "timeout"
        finally:
            _kill_group(child.pid)
            child.wait()
        return _outcome(result, said, ended, started)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it and its workers have ended, as they should
        os.killpg(leader, signal.SIGKILL)


def _outcome(result: Path, said: Path, ended: str, started: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"exit": ended, "process_s": round(time.perf_counter() - started, 1)}
    if result.exists():
        return {"status": "ok", **figures, **json.loads(result.read_text())}
    text = said.read_text(errors="replace") if said.exists() else ""
    return {"status": "timeout" if ended == "timeout" else "failed", **figures, "stderr": text[-_KEPT:]}


def _run(work: Work, case: Case, result: Path, said: Path, start_method: str) -> None:
    multiprocessing.set_start_method(start_method, force=True)  # not that by which this process was started
    os.setsid()  # so that a time-out also ends the workers
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.cores])
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        work(case, result)
    except Exception:  # noqa: BLE001 - whatever it is, it is what is reported
        traceback.print_exc()
        leave(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def leave(code: int) -> None:
    """Ends this process at once, whatever threads would not let it end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write(figures: dict[str, Any], result: Path) -> None:
    """Writes figures as JSON, all or nothing, because the process may be ended at any time."""
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(figures))
    unfinished.rename(result)
