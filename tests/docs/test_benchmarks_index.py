"""The benchmark of an index, with few files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import memory_use
from benchmarks.studies import index


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_index_in_a_process(tmp_path: Path) -> None:
    args = ["--files", "5000", "--processes", "1", "--kinds", "index", "--out", str(tmp_path), "--name", "small"]
    whole = index.run(index.parse([*args, "--root", str(tmp_path)]))
    (run,) = whole["runs"]
    assert (run["status"], run["processes"]) == ("ok", 1), run
    assert 0 < run["shared_mib"] < 2
    assert json.loads((tmp_path / "small.json").read_text())["runs"] == [run]
    assert "| index" in (tmp_path / "small.md").read_text()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


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
