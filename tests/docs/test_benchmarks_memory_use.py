"""What benchmarks measure of a process's memory, and how it changes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import memory_use


def test_drift_is_a_slope_that_one_odd_value_does_not_move() -> None:
    assert memory_use.fit_drift([1, 2, 3, 40, 5, 6, 7]) == {"slope": 1, "range": 39}
    assert memory_use.fit_drift([5.0] * 9) == {"slope": 0, "range": 0}
    rows = [{"a": value, "b": 0} for value in (90, 1, 3, 5)]
    assert memory_use.fit_drifts(rows) == {"a": {"slope": 2, "range": 4}, "b": {"slope": 0, "range": 0}}


def test_what_a_process_holds() -> None:
    before = memory_use.measure_host()
    with Path("/proc/self/stat").open() as _:
        after = memory_use.measure_host()
    assert after["files"] == before["files"] + 1
    assert after["pss_mib"] > 10
    assert after["threads"] >= after["python_threads"] >= 1
