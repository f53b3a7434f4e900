"""The benchmark harness runs, survives a system that hangs, and writes every figure. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SYSTEMS = ("torchdali", "dali_tuned", "dataloader_v2")
FIGURES = {
    "import_s",
    "construct_s",
    "first_batch_s",
    "second_epoch_first_batch_s",
    "images_per_s",
    "gap_ms",
    "cpu_s_per_1000_images",
    "busy_cores",
    "rss_peak_mib",
    "allowed_cores",
    "versions",
}


def bench(folder: Path, *options: str) -> tuple[dict, str, str]:
    """Runs the harness on 64 pictures; the JSON, the Markdown and what it printed."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.loader",
        "--images",
        "64",
        "--batch-size",
        "16",
        "--cores",
        "1",
    ]
    command += ["--root", str(folder / "pictures"), "--out", str(folder / "results"), "--name", "trial"]
    done = subprocess.run([*command, *options], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = folder / "results"
    return json.loads((results / "trial.json").read_text()), (results / "trial.md").read_text(), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_figure_is_written(tmp_path):
    report, table, printed = bench(tmp_path, "--systems", ",".join(SYSTEMS), "--seconds", "0.3", "--no-tune")

    assert [run["system"] for run in report["runs"]] == list(SYSTEMS)
    for run in report["runs"]:
        assert run["status"] == "ok", run
        assert run["exit"] == "0"
        assert {name for name in FIGURES if run.get(name) is None} == set(), run["system"]
        assert run["images_per_s"] > 0
        assert run["images"] % 16 == 0
        assert run["allowed_cores"] == 1
        assert run["batch"]["shape"] == [16, 3, 224, 224]
        assert abs(run["batch"]["mean"]) < 1.5
    assert report["machine"]["versions"].keys() >= {"python", "torch", "torchvision", "nvidia.dali"}
    assert report["data"]["images"] == 64
    assert report["command"].startswith("python -m benchmarks.loader --images 64")
    for title in ("**torchdali**", "DALI tuned by hand", "DataLoader, torchvision v2"):
        assert title in table
    assert "| images/s" in table
    assert printed.rstrip().splitlines()[-1].startswith("| DataLoader, torchvision v2")


def test_a_hanging_system_is_reported_and_the_next_one_runs(tmp_path):
    report, table, printed = bench(tmp_path, "--systems", "dali_documented,dataloader_pil", "--timeout", "0.05")

    assert [run["status"] for run in report["runs"]] == ["timeout", "timeout"]
    assert table.count("timeout |") == 4
    assert "timeout" in printed


def test_pictures_are_made_once_and_foreign_folders_are_left_alone(tmp_path):
    root = tmp_path / "pictures"
    command = [sys.executable, "-m", "benchmarks.data", "--images", "24", "--root", str(root)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    files = {path: path.read_bytes() for path in root.glob("*/*.jpg")}
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)

    assert len(files) == len(set(files.values())) == 24
    assert 60_000 < sum(map(len, files.values())) / 24 < 140_000
    assert files == {path: path.read_bytes() for path in root.glob("*/*.jpg")}

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious").write_text("")
    refused = subprocess.run([*command[:-1], str(foreign)], cwd=REPOSITORY, check=False, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "not made by this benchmark" in refused.stderr
    assert [path.name for path in foreign.iterdir()] == ["precious"]
