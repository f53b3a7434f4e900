"""The proxy benchmark runs every system with every kind of image, and outlives one that fails. No time is asserted."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.started import run_python
from PIL import Image

from benchmarks.common import data
from benchmarks.suite import proxy, proxy_report
from benchmarks.systems.proxy_datasets import Pictures, list_files, make_arrays
from benchmarks.systems.proxy_systems import SYSTEMS

pytestmark = pytest.mark.timeout(60)

REPOSITORY = Path(__file__).resolve().parents[2]
CHOSEN = ("torchdali", "nvidia", "torch_v2")
FIGURES = ("first_batch_s", "second_epoch_first_batch_s", "images_per_s", "cpu_s_per_1000_images", "versions")


@pytest.fixture
def pictures(tmp_path):
    root = tmp_path / "pictures"
    data.make(root, 24)
    make_arrays(root, 8)
    return root


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_figure_is_written(tmp_path):
    command = ["-m", "benchmarks", "proxy", "--quick", "--seconds", "0.1", "--cores", "1"]
    command += ["--images", "32", "--lengths", "32", "--batch-size", "8"]
    command += ["--systems", ",".join(CHOSEN), "--sources", "arrays"]
    command += ["--root", str(tmp_path / "pictures"), "--out", str(tmp_path), "--name", "trial"]
    done = run_python(*command, cwd=REPOSITORY, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "proxy-trial.json").read_text())
    table = (tmp_path / "proxy-trial.md").read_text()

    wanted = {(name, source) for name in CHOSEN for source in {"arrays", "folder"} & {*SYSTEMS[name].sources}}
    assert {(run["system"], run["source"]) for run in report["runs"]} == wanted
    for run in report["runs"]:
        assert run["status"] == "ok", run
        assert [name for name in FIGURES if run.get(name) is None] == [], run
        assert run["exit"] == "0"
        assert run["allowed_cores"] == 1
        assert run["batch"]["shape"] == [8, 3, 224, 224]
        assert abs(run["batch"]["mean"]) < 1.5
        assert run["new_workers_first_batch_s"] > 0
    assert "- arrays: 32 of them" in table
    assert "What was not measured" not in table
    assert table.count("x |") == 2, "ratios to DALI's proxy and to DataLoader"


def test_a_case_that_fails_or_hangs_is_reported(tmp_path):
    case = proxy.Case("nvidia", "bytes", 1, 1, 16, False, tmp_path / "missing", 8, 0.1, 1.0)

    failed = {"status": "failed", "exit": "1", "stderr": "ZeroDivisionError: division by zero\n"}
    hung = {"status": "timeout", "exit": "timeout", "stderr": ""}
    lines = [{**case.label(), **run} for run in (failed, hung)]
    assert proxy_report.full_table(lines).count("failed |") == 1
    assert "1 workers, 1 core: timeout: `" in proxy_report.failures(lines)


def test_all_kinds_are_the_same_pictures_with_the_same_labels(pictures):
    by_source = {source: Pictures(pictures, source, 40) for source in ("bytes", "pil", "arrays", "paths")}

    for index in (0, 7, 23, 25, 39):
        pil, label = by_source["pil"][index]
        encoded, path = by_source["bytes"][index][0], by_source["paths"][index][0]
        expected = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
        assert np.array_equal(np.asarray(pil), expected)
        assert path.read_bytes() == encoded
        assert path == list_files(pictures)[index % 24]
        assert sorted(folder.name for folder in pictures.iterdir() if folder.is_dir())[label] == path.parent.name
        array, label = by_source["arrays"][index]
        again, same = by_source["pil"][index % 8]
        assert np.array_equal(array, np.asarray(again.resize((500, 375))))
        assert label == same
    assert all(len(dataset) == 40 for dataset in by_source.values())


def test_the_short_table_has_the_better_number_of_workers_and_the_ratios():
    rates = [("torchdali", 16, 900), ("nvidia", 8, 300), ("nvidia", 16, 200), ("torch_v2", 16, None)]
    runs = []
    for system, workers, rate in rates:
        case = {"system": system, "source": "bytes", "cores": 16, "workers": workers, "length": 8192}
        figures = {"status": "ok", "images_per_s": rate, "ended_mid_epoch": False} if rate else {"status": "timeout"}
        runs.append(case | figures)

    rows = proxy_report.short_table(runs).splitlines()

    assert len(rows) == 3
    cells = [cell.strip() for cell in rows[2].strip("|").split("|")]
    assert cells == ["encoded bytes, 16 cores", "900", "300, 8 workers", "timeout", "3.00x", "-"]
