"""The benchmark harness runs, survives a system that hangs, and writes every figure. No time is asserted."""

import importlib.util
import json
import multiprocessing
import os
import shlex
from pathlib import Path

import pytest
import torch
from helpers.started import run_python
from PIL import Image

from benchmarks import options
from benchmarks.common import data, page_cache
from benchmarks.common.data import KINDS
from benchmarks.studies import index, memory, scale, transform_report, transforms, versions
from benchmarks.suite.all import BENCHMARKS
from benchmarks.systems import batches as batches_module
from benchmarks.systems import other_systems
from benchmarks.systems.loader_systems import LOADER
from benchmarks.systems.systems import Job
from benchmarks.systems.transform_rows import BY_CALL

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 290
SYSTEMS = ("torchdali", "dali_tuned")
EVERYWHERE = {"images_per_s", "gap_ms", "cpu_s_per_1000_images", "busy_cores", "rss_peak_mib", "allowed_cores"}
LOADING = EVERYWHERE | {"import_s", "construct_s", "first_batch_s", "second_epoch_first_batch_s", "versions"}
START = EVERYWHERE | {"imports_s", "in_all_s", "second_epoch_first_batch_s", "after_break_first_batch_s", "versions"}


def bench(folder: Path, *options: str) -> str:
    """Runs the harness on 64 pictures; what it printed."""
    command = ["-m", "benchmarks", *options, "--images", "64", "--batch-size", "16", "--cores", "1"]
    command += ["--out", str(folder), "--name", "trial"]
    if "--root" not in options:
        command += ["--root", str(folder / "pictures")]
    done = run_python(*command, cwd=REPOSITORY, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(*options: str) -> str:
    done = run_python("-m", "benchmarks", *options, cwd=REPOSITORY, timeout=LIMIT)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_figure_is_written(tmp_path):
    systems = ",".join((*SYSTEMS, "dali_decode_only", "torchvision_cuda", "ffcv"))
    printed = bench(tmp_path, "decode", "loader", "--systems", systems, "--seconds", "0.1", "--warmup", "2")

    ours = {"loader": set(SYSTEMS), "decode": {"torchdali", "dali_decode_only"}}
    for benchmark in ("decode", "loader"):
        report = json.loads((tmp_path / f"{benchmark}-trial.json").read_text())
        table = (tmp_path / f"{benchmark}-trial.md").read_text()
        runs = {run["system"]: run for run in report["runs"]}
        assert {name for name, run in runs.items() if run["status"] == "ok"} >= ours[benchmark]
        for name in ours[benchmark]:
            run = runs[name]
            assert run["exit"] == "0"
            missing = {figure for figure in LOADING if run.get(figure) is None}
            assert missing <= ({"gap_ms"} if run["images"] == 16 else set()), name  # one batch has no gap to the next
            assert run["images_per_s"] > 0
            assert run["images"] % 16 == 0
            assert run["allowed_cores"] == 1
            last = name == "dali_decode_only"
            assert run["batch"]["shape"] == [16, 224, 224, 3] if last else [16, 3, 224, 224]
            assert run["batch"]["dtype"] == ("torch.float32" if benchmark == "loader" else "torch.uint8")
            assert benchmark == "decode" or abs(run["batch"]["mean"]) < 1.5
            tried = run.get("threads_tried")
            if name.startswith("dali"):
                assert run["threads"] in (1, 2)
                assert tried.keys() == {"1", "2"}
                assert all(rate > 0 for rate in tried.values())
            else:
                assert tried is None
        if importlib.util.find_spec("ffcv") is None and benchmark == "loader":
            assert runs["ffcv"]["status"] == "not installed"
            assert "- FFCV, 1 core: not installed: No module named 'ffcv'" in table
        if not torch.cuda.is_available():
            assert "on CUDA, 1 core: it needs a CUDA device" in table
        assert report["machine"]["versions"].keys() >= {"python", "torch", "torchvision", "nvidia.dali"}
        assert report["data"]["images"] == 64
        assert report["command"].startswith("python -m benchmarks decode loader --systems")
        assert str(tmp_path) not in report["command"]
        for title in ("**torchdali**", "DALI", "| images/s"):
            assert title in table
        if importlib.util.find_spec("matplotlib"):
            picture = (tmp_path / f"{benchmark}-trial.svg").read_text()
            assert f"]({benchmark}-trial.svg)" in table
            assert "torchdali, " in picture
            assert len(picture) < 60_000
    assert "Loader only, imagenet\n| images/s" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_start_up_is_measured_in_fresh_interpreters(tmp_path):
    bench(tmp_path, "startup", "--quick", "--systems", "torchdali", "--cache", "cold")

    report = json.loads((tmp_path / "startup-trial-cold.json").read_text())
    assert [run["system"] for run in report["runs"]] == ["torchdali"]
    for run in report["runs"]:
        assert (run["status"], run["exit"]) == ("ok", "0"), run
        assert {figure for figure in START if run.get(figure) is None} == set(), run["system"]
        assert run["in_all_s"] >= run["imports_s"] + run["first_batch_s"]
        assert run["imports_s"] > run["import_s"]["torch"] > 0.1, "torch was not there before"
    queues = [run["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS") for run in report["runs"]]
    assert queues == ["32"]


def test_a_hanging_system_is_reported_and_the_next_one_runs(tmp_path):
    printed = bench(
        tmp_path, "loader", "--systems", "dali_documented,dataloader_pil", "--timeout", "0.02", "--no-preload"
    )

    report, table = json.loads((tmp_path / "loader-trial.json").read_text()), (tmp_path / "loader-trial.md").read_text()
    assert [run["status"] for run in report["runs"]] == ["timeout", "timeout"]
    assert table.count("timeout |") == 4
    assert table.count("1 core: timeout: `nothing`") == 2
    assert "timeout" in printed
    assert not (tmp_path / "loader-trial.svg").exists()


def test_what_there_is_no_time_for_is_skipped(tmp_path):
    bench(tmp_path, "loader", "--systems", "dali_documented,dataloader_pil", "--limit", "0.001", "--no-preload")

    report = json.loads((tmp_path / "loader-trial.json").read_text())
    assert [run["status"] for run in report["runs"]] == ["skipped", "skipped"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("loader", "--levers"), "--levers is no option of loader"),
        (("training", "--cache", "cold"), "--cache cold is no option of training"),
        (("sleep",), "no such benchmark: sleep"),
        (("decode", "--systems", "dali_proxy"), "no such system: dali_proxy"),
        (("--data", "huge"), "no such data: huge"),
        (("--data", "small,large", "--root", "x"), "--root holds one set"),
        (("loader", "proxy", "--quick", "--root", "x"), "these benchmarks have 64 and 96: give --images"),
        (("loader", "--cores", "1000"), "--cores 1000: this process has only"),
        (("loader", "--images", "8"), "--images 8 is less than one batch of 256"),
        (("training", "--models", "resnet1"), "--models: unknown: resnet1"),
        (("proxy", "--cores", "1", "--lengths", "8"), "less than one batch"),
    ],
)
def test_options_that_mean_nothing_are_refused(command, said, capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(command)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("of", [options, scale, memory, index, transforms], ids=lambda module: module.__name__)
def test_results_do_not_say_where_a_machine_has_its_files(of, tmp_path):
    said = of.parse(["--out", str(tmp_path), "--commit", "abc"]).command
    assert str(tmp_path) not in said
    assert (said if isinstance(said, str) else shlex.join(said)).endswith("--out OUT --commit abc")


def test_defaults_are_what_a_machine_has(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    names = ["decode", "loader", "training", "startup", "proxy"]  # make bench
    args = options.parse(names)
    of = {name: options.settings(BENCHMARKS[name], args, "imagenet") for name in names}
    assert [of[name].cores for name in names] == [[2, 1], [2, 1], [2], [2], [2]]
    assert len(of["proxy"].lengths) == 1


def test_each_benchmark_has_its_own_defaults(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    args = options.parse(["loader", "training", "startup", "--data", "imagenet,large", "--name", "h200"])

    of = {
        (name, kind): options.settings(BENCHMARKS[name], args, kind) for name in args.benchmarks for kind in args.data
    }

    assert [of["loader", "imagenet"].cores, of["training", "large"].cores] == [[16, 8, 4, 2, 1], [16, 4]]
    assert [of["loader", kind].batch_size for kind in args.data] == [256, 128]
    assert "dali_proxy" in of["training", "imagenet"].systems
    assert "ffcv" not in of["training", "imagenet"].systems
    assert options.make_name(BENCHMARKS["loader"], of["loader", "large"], "gpu") == "loader-h200-large"
    cores = {(case.system, case.cores) for case in BENCHMARKS["loader"].cases(of["loader", "imagenet"], Path("root"))}
    assert {count for name, count in cores if name == "torchdali"} == {16, 8, 4, 2, 1}
    assert {count for name, count in cores if name == "dataloader_v2"} == {16, 4, 1}
    assert {count for name, count in cores if name == "dataloader_pil"} == {16}
    first = BENCHMARKS["loader"].cases(of["loader", "imagenet"], Path("root"))[:10]
    both = [(name, count) for count in (16, 8, 4, 2, 1) for name in ("torchdali", "dali_tuned")]
    assert [(case.system, case.cores) for case in first] == both, "the others follow, should there be time"


def test_cold_means_not_in_the_page_cache(tmp_path):
    root = tmp_path / "pictures"
    data.make(root, 4)
    files = sorted(root.glob("*/*"))
    if page_cache.is_in_memory(root):
        assert "there is no page cache to drop" in refused("loader", "--cache", "cold", "--root", str(root))
        return
    os.sync()
    for file in files:
        file.read_bytes()
    if page_cache.cached_share(files) is None:
        pytest.skip("this file system does not say what is cached")
    assert page_cache.cached_share(files) == 1

    page_cache.forget(files)
    assert page_cache.cached_share(files) == 0
    files[0].read_bytes()
    assert 0 < page_cache.cached_share(files) < 1
    assert page_cache.cached_share(files[:1]) == 1


@pytest.mark.parametrize("kind", ["large", "small", "progressive"])
def test_other_sets_are_what_they_are_called(tmp_path, kind):
    data.make(tmp_path / "a", 4, kind=kind)
    data.make(tmp_path / "b", 4, kind=kind)

    files = sorted((tmp_path / "a").glob("*/*"))
    assert len(files) == 4
    for file in files:
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()
        with Image.open(file) as image:
            assert image.size == {"large": (2048, 1536), "small": (32, 32)}.get(kind, image.size)
            assert image.format == ("PNG" if kind == "small" else "JPEG")
            assert bool(image.info.get("progressive")) == (kind == "progressive")
    with pytest.raises(SystemExit, match="remove it or name another"):
        data.make(tmp_path / "a", 4)


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("system", ["torchdali", "dali_tuned", "dataloader_v2"])
def test_every_set_gives_the_batches_that_are_compared(tmp_path, kind, system):
    root = tmp_path / "pictures"
    data.make(root, 12, kind=kind)
    job = Job(root, 6, 1, kind)

    batches = list(LOADER[system].build(job)())

    assert len(batches) == 2
    described = batches_module.describe(batches[0], 6, job.size)
    assert described["shape"] == [6, 3, job.size, job.size]
    assert abs(described["mean"]) < 2.5


def test_images_of_unequal_sizes_cross_in_one_piece():
    images = [torch.arange(6).view(1, 2, 3), torch.arange(4).view(1, 4, 1), torch.arange(2)]

    flat, shapes, labels = other_systems.pack([(image, number) for number, image in enumerate(images)])

    assert flat.shape == (12,)
    assert labels.tolist() == [0, 1, 2]
    assert all(torch.equal(one, other) for one, other in zip(other_systems.unpack(flat, shapes), images, strict=True))


def test_pictures_are_made_once_and_foreign_folders_are_left_alone(tmp_path):
    root = tmp_path / "pictures"
    data.make(root, 24)
    files = {path: path.read_bytes() for path in root.glob("*/*.jpg")}
    data.make(root, 24)

    assert len(files) == len(set(files.values())) == 24
    assert 60_000 < sum(map(len, files.values())) / 24 < 140_000
    assert files == {path: path.read_bytes() for path in root.glob("*/*.jpg")}

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious").write_text("")
    with pytest.raises(SystemExit, match="not made by this benchmark"):
        data.make(foreign, 24)
    assert [path.name for path in foreign.iterdir()] == ["precious"]


@pytest.fixture
def forked(monkeypatch):
    """Processes that measure transforms are forked, which spares them the imports."""
    get_context = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda _=None: get_context("fork"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_every_transform_has_a_line(tmp_path):
    command = ["--device", "cpu", "--batch-size", "8"]
    command += ["--only", r"^(Resize|FiveCrop|GaussianNoise)\("]
    command += ["--sizes", "224x224", "--seconds", "0.05", "--out", str(tmp_path), "--name", "trial"]
    command += ["--timeout", "200"]  # a busy machine is slow to start the processes
    report = transforms.run(transforms.parse(command))
    assert json.loads((tmp_path / "trial.json").read_text()) == report
    table = (tmp_path / "trial.md").read_text()

    runs = {(run["transform"].partition("(")[0], run["system"]): run for run in report["runs"]}
    assert len(runs) == 3 * 4
    for (name, system), run in runs.items():
        assert run["status"] == ("ok" if system in ("torchdali", "torchvision-cpu") else "none"), (name, run)
        assert run["status"] == "none" or run["images_per_s"] > 0
    assert runs["Resize", "torchvision-cpu"]["workers"] >= 1
    assert runs["Resize", "torchdali"].keys() >= {"alone_images_per_s", "draw_ms", "first_s"}
    assert report["machine"]["versions"].keys() >= {"torch", "torchvision", "nvidia.dali"}
    assert "| `GaussianNoise()`, float" in table
    assert table.count("|      - |") == 3, "nothing of Kornia's without CUDA"


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
    assert "- run by torch: `AugMix()`: no rule" in summary


def test_two_versions_are_compared_turn_by_turn() -> None:
    """The median is of the ratios of neighbouring turns, not the ratio of the medians."""
    old, new = [100.0, 200.0, 300.0], [110.0, 180.0, 300.0]
    run = {"case": "resnet18", "cores": 4, "rates": {"old": old, "new": new, "batch": [400.0]}}
    run["ratios"] = versions.summarize(old, new)
    assert run["ratios"] == pytest.approx([0.95, 1.0, 1.05])
    machine = {"gpu": None, "driver": None, "cpu": "CPU", "cores": 4, "memory_gib": 1, "versions": {}, "commit": "c"}
    page = versions.render({"runs": [run], "machine": machine, "old": "1", "new": "2", "command": "python"})
    row = [cell.strip() for cell in page.splitlines()[-1].split("|")[1:-1]]
    case = "beside a step of ResNet-18, 4 cores, 3 turns"
    assert row == [case, "200 (100 to 300)", "180 (110 to 300)", "1.000", "0.950 to 1.050", "400"]
