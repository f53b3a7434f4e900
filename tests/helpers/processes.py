"""Several processes that are the ranks of a group, and an end for those that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]
AFTER_A_FAILURE = 10
"""Seconds that other ranks have to notice that one has failed, and to say so."""


def run_ranks(script: str, *ranks: Sequence[object], limit: float, **variables: str) -> None:
    """Runs a script of the tests once for each rank, with its arguments, and their workers in process groups of theirs.

    Where one fails, or does not end in time, what all of them said is the message, and where each hung.

    Args:
        script: Its file name.
        ranks: Each one's arguments.
        limit: Seconds that they have all together.
        variables: Of their environment.
    """
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in ranks]
        processes = [
            subprocess.Popen(
                [sys.executable, str(TESTS / "helpers" / script), *map(str, arguments)],
                env={**os.environ, **settings, **variables},
                stderr=stderr,
                start_new_session=True,
            )
            for arguments, stderr in zip(ranks, said, strict=True)
        ]
        end = time.monotonic() + limit
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                end = min(end, time.monotonic() + AFTER_A_FAILURE)
                break
            time.sleep(0.1)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, end - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.poll() is None]
        for number in (signal.SIGABRT, signal.SIGKILL):  # with the first each Python says where it is
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        codes = [process.returncode for process in processes]
        texts = [stream.seek(0) or stream.read() for stream in said]
    assert codes == [0] * len(ranks), "\n".join(
        f"rank {rank} {'hung' if rank in hung else f'ended with {code}'}:\n{text}"
        for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
    )
