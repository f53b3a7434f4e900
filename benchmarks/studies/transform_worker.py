"""Process that measures transforms, and its handle. A process that dies or hangs is replaced."""

import contextlib
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

from benchmarks.systems.transform_inputs import Inputs
from benchmarks.systems.transform_rows import Row
from benchmarks.systems.transform_systems import SYSTEMS, wait

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_START_S = 120.0


class Worker:
    """Handle of a process that measures. It is started at the first use, and again if it was lost.

    Args:
        sizes: Heights and widths of the images.
        batch_size: Number of images in a batch.
        device: "cuda" or "cpu".
        timeout: Limit of one cell in seconds.
    """

    def __init__(self, sizes: list[tuple[int, int]], batch_size: int, device: str, timeout: float) -> None:
        self._serve = (sizes, batch_size, device)
        self._timeout = timeout
        self._process: Any = None
        self._connection: Any = None

    def measure(self, system: str, row: Row, size: tuple[int, int], seconds: float) -> dict[str, Any]:
        """Measure one cell. Return figures and status 'ok', or status 'torch', 'none' or 'failed' and the reason."""
        self._start()
        return self._request((system, row, size, seconds), self._timeout)

    def surroundings(self) -> dict[str, Any]:
        """Return the environment of the process. This starts CUDA if there is a GPU."""
        self._start()
        return self._request(None, self._timeout)

    def close(self) -> None:
        """Kill the process and its children."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has no session yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._process = None

    def _start(self) -> None:
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._serve))
        self._process.start()
        theirs.close()
        try:
            started = self._connection.poll(_START_S) and self._connection.recv()
        except EOFError:
            started = False
        if not started:
            self.close()

    def _request(self, request: Any, timeout: float) -> dict[str, Any]:
        if self._process is None:
            return {"status": "failed", "reason": "the process did not start"}
        try:
            self._connection.send(request)
            if self._connection.poll(timeout):
                answer: dict[str, Any] = self._connection.recv()
                if answer.pop("ended", False):
                    self.close()
                return answer
            reason = f"took more than {timeout:g} s"
        except (EOFError, OSError):
            self._process.join(5)
            reason = f"the process ended ({self._process.exitcode})"
        self.close()
        return {"status": "failed", "reason": reason}


def _serve(connection: "Connection", sizes: list[tuple[int, int]], count: int, device: str) -> None:
    """Send "ready", then answer requests `(system, row, size, seconds)`. Answer None with the environment.

    If the GPU has failed, the last answer has "ended", and the process ends.
    """
    os.setsid()  # so that it can be killed with its workers
    import torch

    import torchdali  # noqa: F401 - before CUDA starts, because it sets the number of queues
    from benchmarks.systems.batches import surroundings

    gpu = device == "cuda"
    inputs = {size: Inputs(size, count, device) for size in sizes}
    torch.manual_seed(0)
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            connection.send(surroundings())
            continue
        system, row, size, seconds = request
        try:
            figures = SYSTEMS[system](row, inputs[size], seconds)
        except Exception as error:  # noqa: BLE001 - it is reported, and the next cell may succeed
            figures = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        try:
            wait(gpu)
        except RuntimeError as error:
            connection.send({"status": "failed", "reason": figures.get("reason", str(error)), "ended": True})
            return
        if gpu:
            torch.cuda.empty_cache()
        connection.send(figures)
