"""The benchmark harness runs, survives a system that hangs, and writes every figure. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import transform_report
from benchmarks.transform_rows import BY_CALL, Row
from benchmarks.transform_worker import Worker

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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_transform_has_a_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks.transforms", "--device", "cpu", "--batch-size", "8"]
    command += ["--only", r"^(RandomHorizontalFlip|Resize|FiveCrop|RandomShortestSize|GaussianNoise)\("]
    command += ["--sizes", "224x224", "--seconds", "0.05", "--out", str(tmp_path), "--name", "trial"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "trial.json").read_text())
    table = (tmp_path / "trial.md").read_text()

    runs = {(run["transform"].partition("(")[0], run["system"]): run for run in report["runs"]}
    assert len(runs) == 5 * 4
    for (name, system), run in runs.items():
        assert run["status"] == ("ok" if system in ("torchdali", "torchvision-cpu") else "none"), (name, run)
        assert run["status"] == "none" or run["images_per_s"] > 0
    assert runs["Resize", "torchvision-cpu"]["workers"] >= 1
    assert runs["Resize", "torchdali"].keys() >= {"alone_images_per_s", "draw_ms", "first_s"}
    assert report["machine"]["versions"].keys() >= {"torch", "torchvision", "nvidia.dali"}
    assert "| `GaussianNoise()`, float" in table
    assert table.count("|      - |") == 5, "nothing of Kornia's without CUDA"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_transform_that_fails_dies_or_hangs_harms_no_other():
    worker = Worker([(224, 224)], 2, "cpu", timeout=20)

    def cell(call):
        return worker.measure("torchdali", Row(call), (224, 224), 0.01)

    try:
        assert cell("NoSuchTransform()")["reason"].startswith("NameError")
        assert cell("Pad(1)")["status"] == "ok"
        assert cell("__import__('os').abort()") == {"status": "failed", "reason": "the process ended (-6)"}
        assert cell("Pad(1)")["status"] == "ok"
        worker._timeout = 0.5
        assert cell("__import__('time').sleep(60)") == {"status": "failed", "reason": "took more than 0.5 s"}
        assert worker._process is None
    finally:
        worker.close()


def test_the_table_names_where_torchdali_is_slower():
    rates = {
        "Pad(16)": (1000, 50, 2000, 1500),
        "Identity()": (1000, 50, 20, None),
        "AugMix()": (None, 50, 20, None),
    }
    systems = ("torchdali", "torchvision-cuda", "torchvision-cpu", "kornia")
    runs = []
    for call, row in rates.items():
        for system, rate in zip(systems, row, strict=True):
            figures = {"status": "failed", "reason": "a | b\n" * 40}
            if rate:
                figures = {"status": "ok", "images_per_s": rate, "alone_images_per_s": 7, "workers": 16}
            elif system == "torchdali":
                figures = {"status": "torch", "reason": "no rule"}
            runs.append({"transform": call, "size": "224x224", "system": system, **figures})
    assert rates.keys() <= BY_CALL.keys()

    heading, table, summary = transform_report.tables(runs)

    assert heading == "## 224x224"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len({len(line) for line in lines}) == 1
    assert lines[0][4] == "torchvision, CPU, 16 workers"
    assert lines[2][1:] == ["1,000", "7", "50", "2,000", "1,500", "torchvision on the CPU (2.00x), Kornia (1.50x)"]
    assert lines[3][5].startswith("failed: a / b a / b")
    assert lines[3][-1] == ""
    assert lines[4][1:3] == ["torch", "torch"]
    assert summary.startswith("torchdali is slower than another system in 1 of 2 rows: `Pad(16)`.")
    assert "- left to torch: `AugMix()`: no rule" in summary
