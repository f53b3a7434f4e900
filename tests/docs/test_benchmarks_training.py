"""The training benchmark measures every system and lever, counts whole epochs, and outlives what fails.

No time is asserted.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.started import run_python

from benchmarks import options
from benchmarks.common import data
from benchmarks.suite import training, training_report
from benchmarks.systems.training_systems import DEFAULT, LEVERS, MODELS, Case, make_epochs
from torchdali.tools.bench.metrics import Gpu
from torchdali.tools.bench.training import Steps, Training, repeat_epochs, train

pytestmark = pytest.mark.timeout(60)

REPOSITORY = Path(__file__).resolve().parents[2]
FIGURES = ("images_per_s", "share", "gap_ms", "wait_ms", "step_ms", "busy_cores", "loss", "to_channels_last_ms")
CASE = Case("tiny", "torchdali", "", 1, None, Path("missing"), 8, 3, 0.1, 1, 5.0, False)


@pytest.fixture
def pictures(tmp_path):
    root = tmp_path / "pictures"
    data.make(root, 24)
    return root


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.fixture
def parse_args(many_cores):
    return lambda *command: options.settings(training.BENCHMARK, options.parse(["training", *command]), "imagenet")


def planned(args):
    return [(c.cores, c.model, c.system, c.queues) for c in training.cases(args, Path("root")) if not c.lever]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_figure_is_written(tmp_path):
    levers = "half,tuned_queues"
    systems = ["synthetic", "torchdali", "dataloader_v2"]
    command = ["-m", "benchmarks", "training", "--quick", "--cores", "1", "--images", "24"]
    command += ["--systems", ",".join(systems), "--levers", levers]
    command += ["--root", str(tmp_path / "pictures"), "--out", str(tmp_path), "--name", "trial"]
    done = run_python(*command, cwd=REPOSITORY, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "training-trial.json").read_text())
    table = (tmp_path / "training-trial.md").read_text()

    assert [run["system"] for run in report["runs"] if not run["lever"]] == ["synthetic", *systems]
    assert [run["lever"] for run in report["runs"] if run["lever"]] == levers.split(",")
    for run in report["runs"]:
        assert run["status"] == "ok", run
        assert run["exit"] == "0"
        assert [name for name in FIGURES if run.get(name) is None] == [], run
        assert run["allowed_cores"] == 1
        assert run["steps"] * 8 == run["images"] > 0
        assert run["warmup_steps"] >= 2
        assert run["batch"]["shape"] == [8, 3, 224, 224]
        assert run["batch"]["dtype"] == ("torch.float16" if run["lever"] == "half" else "torch.float32")
    queues = [run["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS") for run in report["runs"]]
    assert queues == [None, "32", "32", None, "32", "32"]
    assert max(run["share"] for run in report["runs"] if run["system"] == "synthetic") == 1
    assert "What was not measured" not in table
    assert table.count("float16 images") == 1, "levers are in their own table only"
    assert done.stdout.rstrip().splitlines()[-1].startswith("| DataLoader, torchvision v2")


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
@pytest.mark.parametrize("system", [system for system in DEFAULT if system != "synthetic"])
def test_every_system_makes_whole_epochs(pictures, system):
    batches = list(make_epochs(replace(CASE, root=pictures, system=system))())
    assert [tuple(images.shape) for images, _ in batches] == [(8, 3, 224, 224)] * 3
    assert all(labels.dtype == torch.int64 and labels.shape == (8,) for _, labels in batches)


def test_a_case_that_fails_or_hangs_is_reported():
    failed = {"status": "failed", "exit": "1", "stderr": "FileNotFoundError: missing\n"}
    hung = {"status": "timeout", "exit": "timeout", "stderr": ""}
    runs = [{**CASE.label(), **run} for run in (failed, hung)]
    runs[1] |= {"lever": "half"}
    training_report.add_shares(runs)
    assert training_report.full_table(runs).count("failed |") == 1
    assert training_report.short_table(runs).count("failed |") == 1
    assert training_report.lever_table(runs).count("timeout |") == 1
    assert "float16 images, tiny, 1 core: timeout: `" in training_report.tables(runs)[-1]


def test_what_is_measured_by_default(parse_args):
    both = ["torchdali", "dali_tuned", "dali_documented"]
    ceilings = [("synthetic", None), ("synthetic", 32)]

    by_place = {}
    for cores, model, system, queues in planned(parse_args()):
        by_place.setdefault((cores, model), []).append((system, queues))

    assert by_place == {
        (16, "resnet18"): ceilings + [(name, None) for name in [*both, "dali_proxy", "dataloader_v2"]],
        (16, "resnet50"): ceilings + [(name, None) for name in [*both, "dali_proxy", "dataloader_v2"]],
        (16, "resnet18_compiled"): [*ceilings, ("torchdali", None), ("dali_tuned", None)],
        (4, "resnet18"): ceilings + [(name, None) for name in both],
        (4, "resnet50"): ceilings + [(name, None) for name in both],
    }
    assert training.cases(parse_args(), Path("root"))[0].length == 32


@pytest.mark.parametrize("lever", [name for name, lever in LEVERS.items() if lever.system == "torchdali"])
def test_a_lever_changes_the_loader_as_it_says(pictures, lever, monkeypatch):
    made = []

    def spy(loader):
        made.append(loader)
        return iterate(loader)

    import torchdali

    iterate = torchdali.DALILoader.__iter__
    monkeypatch.setattr(torchdali.DALILoader, "__iter__", spy)

    batches = list(make_epochs(replace(CASE, root=pictures, lever=lever))())

    (loader,) = made
    kind, _, number = lever.partition("_")
    threads = {"window": 16, "threads": int(number or 0) if kind == "threads" else 0}.get(kind, 0)
    assert (loader.num_workers, loader._options.prefetch_depth) == (threads, int(number) if kind == "window" else None)
    assert [len(labels) for _, labels in batches] == [8, 8, 8]
    assert batches[0][0].dtype == (torch.float16 if lever == "half" else torch.float32)
    assert len(set(torch.cat([labels for _, labels in batches]).tolist())) > 1


class Event:
    def __init__(self, at):
        self.at = at

    def elapsed_time(self, other):
        return other.at - self.at


def test_steps_waits_and_their_sums_are_by_the_gpus_clock():
    times = iter([0, 1, 11, 15, 25, 26, 36])
    steps = Steps(SimpleNamespace(present=True, event=lambda: Event(next(times))))
    for _ in range(6):
        steps.add()

    figures = steps.figures(before=3, length=4)

    assert len(steps) == 3
    assert [figures["step_ms"][name] for name in ("median", "max")] == [10, 10]
    assert [figures["wait_ms"][name] for name in ("median", "max")] == [1, 4]
    assert [figures["gap_ms"][name] for name in ("median", "max")] == [11, 14]
    assert figures["waiting_share"] == round(6 / 36, 4)
    assert figures["epoch_start_wait_ms"]["max"] == 4, "of the fifth step, the first of an epoch of four"
    assert steps.figures(before=1, length=9)["epoch_start_wait_ms"] is None


def test_the_loop_trains_on_what_the_loader_gives():
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 224, 224), torch.arange(8)
    fetched = []

    def epoch():
        for number in range(3):
            fetched.append(number)
            yield [images, labels]

    trained = Training(MODELS["tiny"].make(), torch.device("cpu"))
    gpu, losses = Gpu(), []

    def enough(marks):
        losses.append(float(trained.loss))
        return len(marks) == 8

    last, _ = train(repeat_epochs(epoch), trained, Steps(gpu), enough)

    assert fetched == [0, 1, 2, 0, 1, 2, 0, 1], "epochs follow each other"
    assert losses[-1] < losses[0]
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, images)


def test_shares_are_of_the_faster_ceiling_of_the_same_model_and_cores():
    rates = [
        ("resnet18", 16, "synthetic", None, "", 900),
        ("resnet18", 16, "synthetic", 32, "", 1000),
        ("resnet18", 16, "torchdali", None, "", 960),
        ("resnet18", 16, "dali_tuned", None, "", None),
        ("resnet18", 4, "synthetic", None, "", 800),
        ("resnet18", 4, "torchdali", None, "", 400),
        ("resnet50", 16, "torchdali", None, "", 300),
        ("resnet18", 16, "torchdali", None, "again", 940),
        ("resnet18", 16, "torchdali", 8, "queues_8", 855),
    ]
    times = ("gap_ms", "step_ms", "wait_ms", "epoch_start_wait_ms", "host_in_loader_ms")
    runs = []
    for model, cores, system, queues, lever, rate in rates:
        run = {"model": model, "cores": cores, "system": system, "queues": queues, "lever": lever, "status": "timeout"}
        if rate:
            run |= {"status": "ok", "images_per_s": rate, "ended_mid_epoch": False, "waiting_share": 0.5}
            run |= {"environment": {}, **dict.fromkeys(times)}
        runs.append(run)

    training_report.add_shares(runs)
    short = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in training_report.short_table(runs).split("\n")
    ]
    levers = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in training_report.lever_table(runs).split("\n")
    ]

    assert short[0] == ["images/s, share", "ResNet-18, 16 cores", "ResNet-18, 4 cores", "ResNet-50, 16 cores"]
    assert short[2:] == [
        ["one batch on the GPU, 8 queues", "900, 90.0%", "800, 100.0%", "-"],
        ["one batch on the GPU, 32 queues", "1,000, 100.0%", "-", "-"],
        ["**torchdali**, defaults", "960, 96.0%", "400, 50.0%", "300"],
        ["DALI tuned by hand", "timeout", "-", "-"],
    ]
    assert [row[:3] for row in levers[2:]] == [
        ["**torchdali**, defaults", "960, 96.0%", "1.011"],
        ["defaults, again", "940, 94.0%", "0.989"],
        ["8 queues", "855, 85.5%", "0.900"],
    ]
