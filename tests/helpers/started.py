"""Python's commands in processes that are forked from one that has imported torch, torchvision, DALI and torchdali.

Each is spared the seconds of these imports. Whatever depends on how or when they are imported starts Python itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

IMPORTED = (
    "torchvision.transforms.v2",
    "torchvision.datasets",
    "torchvision.models",
    "nvidia.dali.fn",
    "torchdali.loader",
    "torchdali.datasets",
)
START = 100.0
"""Seconds that the imports may take."""


class Server:
    """The process that forks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answer(START)

    def answer(self, seconds: float) -> Any:
        """The next line that it says."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return json.loads(self.process.stdout.readline())

    def run(
        self, arguments: list[str], cwd: str, env: Mapping[str, str], imports: Sequence[str], seconds: float
    ) -> tuple[int, str, str]:
        """Runs a command: its exit status, and what it wrote."""
        assert self.process.stdin
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            request = {"arguments": arguments, "cwd": cwd, "env": dict(env), "imports": imports}
            request |= {"out": out.name, "err": err.name}
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            pid = self.answer(START)
            try:
                code = self.answer(seconds)
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                self.answer(START)
                raise subprocess.TimeoutExpired(arguments, seconds, out.read(), err.read()) from None
            return code, out.read(), err.read()

    def close(self) -> None:
        """Ends it."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(START)


@functools.cache
def server() -> Server:
    """The one of this process, started when it is first needed."""
    started = Server()
    atexit.register(started.close)
    return started


def run_python(
    *arguments: object, timeout: float = 100, cwd: Path | None = None, imports: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python`` with arguments, the first of which are a script or ``-m`` and a module.

    Args:
        *arguments: What stands behind ``python``.
        timeout: Seconds.
        cwd: Where.
        imports: Modules that several commands need, and that are imported once for all of them.
        **variables: Of its environment, beside this process's own.
    """
    given = list(map(str, arguments))
    try:
        code, out, err = server().run(given, str(cwd or Path.cwd()), {**os.environ, **variables}, imports, timeout)
    except subprocess.TimeoutExpired:
        raise
    except BaseException:  # a test's own time limit, after which the next answer would be this command's
        server().process.kill()
        server.cache_clear()
        raise
    return subprocess.CompletedProcess(given, code, out, err)


def torchrun(processes: int) -> tuple[str, ...]:
    """What starts a script in several processes. Where there is no GPU, these are forked, and import nothing anew."""
    forked = () if torch.cuda.is_available() else ("--run-path", "--start-method", "fork")
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *forked)


def serve() -> dict[str, Any]:
    """Forks for each line of the standard input; returns in the new process, with what the line says."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported is neither copied nor searched in the new processes
    _say(None)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        for name in request["imports"]:
            importlib.import_module(name)
        if not (pid := os.fork()):
            os.setsid()
            return request
        _say(pid)
        _say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.exit()


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def become(request: dict[str, Any]) -> None:
    """Makes this process what the command's own would be, and runs it."""
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (request["out"], os.O_WRONLY), (request["err"], os.O_WRONLY)]
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "PYTHONWARNINGS" in os.environ:  # which Python reads when it starts
        warnings.simplefilter("ignore", DeprecationWarning)
    if threads := os.environ.get("OMP_NUM_THREADS"):  # which torch has read when it was imported
        torch.set_num_threads(int(threads))
    first, *others = request["arguments"]
    if first == "-m":
        sys.path[0] = request["cwd"]
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).parent)
        sys.argv = [first, *others]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    become(serve())
