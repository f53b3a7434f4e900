"""The benchmarks of several processes and of memory, with few pictures and without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import data
from benchmarks.studies import memory, scale

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]


def test_a_process_that_fails_ends_the_others() -> None:
    children = [
        subprocess.Popen([sys.executable, "-S", "-c", code])
        for code in ("raise SystemExit(3)", "import time; time.sleep(60)")
    ]
    assert scale._wait(children, 60) == "failed"
    assert [child.returncode for child in children] == [3, -9]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["native", "worker-fed"])
def test_what_is_measured_of_memory(tmp_path: Path, kind: str) -> None:
    data.make(tmp_path / "pictures", 24, 1)
    case = memory.Case("", kind, tmp_path / "pictures", 2, 0, 4, 0.1, epochs=4, batches=3, small_batch=2)
    close = memory.measure_close(case)
    closed = close["used"]
    assert closed["third left"]["threads"] <= closed["second left"]["threads"] < closed["third"]["threads"]
    assert closed["third left"]["workers"] == closed["before"]["workers"]
    constant = memory.measure_constant(case)
    assert [row["epoch"] for row in constant["used"]] == [1, 2, 3, 4]
    runs = [{"case": "close", "status": "ok", **close}, {"case": "constant", "status": "ok", **constant}]
    runs.append({"case": "close", "status": "timeout"})
    text = "".join(memory.tables([{"subject": kind, **run} for run in runs]))
    assert all(part in text for part in ("kept by each", "slope |", "timeout"))
