"""Runs a script of the tests once for each rank of a group, in forked processes.

Run as ``python forked_ranks.py SCRIPT COUNT ARGUMENTS...``: each rank has COUNT arguments. :func:`run_ranks` does.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent
AFTER_A_FAILURE = 10
"""Seconds that other ranks have to notice that one has failed, and to say so."""


def run_ranks(script: str, *ranks: Sequence[object], limit: float, **variables: str) -> None:
    """Runs a script once for each rank, and its workers. Where one fails, what all of them said is the message.

    Args:
        script: Its file name.
        ranks: Each one's arguments.
        limit: Seconds that they have all together.
        variables: Of their environment.
    """
    import torch
    from helpers.started import run_python

    arguments = [__file__, HELPERS / script, len(ranks[0]), *(one for rank in ranks for one in rank)]
    path = os.pathsep.join([str(HELPERS.parent), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    if torch.cuda.is_available():  # CUDA is for processes that import torch themselves
        command, env = [sys.executable, *map(str, arguments)], {**os.environ, **settings}
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=env)
    else:
        done = run_python(*arguments, timeout=limit, **settings)
    assert done.returncode == 0, done.stderr


def main(script: str, count: str, *arguments: str) -> None:
    """Runs the script in forked processes, and ends with 1 where one of them fails."""
    sys.path[:0] = [str(HELPERS.parent), str(HELPERS.parents[1])]
    faulthandler.enable()
    ranks: dict[int, int] = {}
    for rank, first in enumerate(range(0, len(arguments), int(count))):
        if not (process := os.fork()):
            sys.argv = [script, *arguments[first : first + int(count)]]
            runpy.run_path(script, run_name="__main__")
            return
        ranks[process] = rank

    def end_others(*_: Any) -> None:
        for process in ranks:
            os.kill(process, signal.SIGABRT)  # Python then says where it is

    signal.signal(signal.SIGALRM, end_others)
    has_failed = False
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        if status and not has_failed:
            has_failed = True
            sys.stderr.write(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}\n")
            signal.alarm(AFTER_A_FAILURE)
    sys.exit(int(has_failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
