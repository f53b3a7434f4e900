"""Cases in processes of their own, on some of the cores, under a time limit, forked from one that has the imports."""

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
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parent.parent

Work = Callable[[Any, Path], None]
"""Measures a case and writes the figures to the file, by :func:`write`."""


def start_context(preloaded: Sequence[str]) -> Any:
    """How processes are started: forked from one that has the imports, or each by itself where that harms CUDA."""
    if preloaded:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preloaded))
        trial = context.Process(target=_use_cuda)
        trial.start()
        trial.join(60)
        if trial.exitcode == 0:
            return context
        trial.kill()
        print("CUDA does not start in a forked process: each imports for itself", flush=True)
    return multiprocessing.get_context("spawn")


def _use_cuda() -> None:
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").item()
    elif torch.cuda.device_count():
        raise RuntimeError("there is a GPU, and CUDA does not start")


def measured(context: Any, work: Work, case: Any, timeout: float) -> dict[str, Any]:
    """The case's figures and status 'ok', or status 'timeout' or 'failed' and what it wrote last.

    A process that wrote its figures and then did not end cleanly is 'ok', and `exit` says how it ended.

    Args:
        context: what starts processes.
        work: what is run, a function of a module.
        case: what it is given; `cores` says how many cores the process may use.
        timeout: seconds.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said"
        child = context.Process(target=_run, args=(work, case, result, said, multiprocessing.get_start_method()))
        child.start()
        child.join(timeout)
        ended = "timeout" if child.is_alive() else str(child.exitcode)
        with contextlib.suppress(ProcessLookupError):  # it and its workers have ended, as they should
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()
        figures: dict[str, Any] = {"exit": ended, "process_s": round(time.perf_counter() - started, 1)}
        if result.exists():
            return {"status": "ok", **figures, **json.loads(result.read_text())}
        text = said.read_text(errors="replace") if said.exists() else ""
        text = text.replace(f"{_REPOSITORY}{os.sep}", "")
        return {"status": "timeout" if ended == "timeout" else "failed", **figures, "stderr": text[-3000:]}


def _run(work: Work, case: Any, result: Path, said: Path, start_method: str) -> None:
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
    """All or nothing, because the process may be ended at any time."""
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(figures))
    unfinished.rename(result)
