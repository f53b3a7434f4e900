"""``torchdali bench``: measurements, verdict and exit codes."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from helpers.started import run_python
from rich.console import Console

from torchdali.tools.bench import command, loading
from torchdali.tools.bench.cases import Case, measure_case
from torchdali.tools.bench.folder import ONE_CLASS, count_images, load_object, load_transform, make_dataset
from torchdali.tools.bench.metrics import Gpu
from torchdali.tools.bench.subprocesses import measure_in_process, start_context
from torchdali.tools.bench.verdict import Verdict, diagnose
from torchdali.tools.cli import commands

pytestmark = pytest.mark.timeout(60)

MINE = """
import sys

import torch
from torchvision.transforms import v2

small = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(64), v2.ToDtype(torch.float32, scale=True)])
number = 3
kind = v2.RandomCrop
several = [v2.ToImage(), v2.CenterCrop(8)]


def made(size=8):
    return [v2.ToImage(), v2.CenterCrop(size)]


def taken(*images):
    return images[0]


given = sys.argv
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a user's file with transforms."""
    file = tmp_path / f"mine_{tmp_path.name}.py"
    file.write_text(MINE)
    return file


def run(*options: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, because it starts processes itself."""
    return run_python("-m", "torchdali.tools.cli", "bench", *options, timeout=170, COLUMNS="160")


def invoke(*options: object) -> Result:
    """Run the command in this process. It must end before it measures."""
    return CliRunner().invoke(commands(), ["bench", *map(str, options)])


# The command


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_class_folders_with_a_transform_and_a_model(pictures: Path, mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ("--transform", f"{mine}:small", "--train", "squeezenet1_1", "--seconds", "0.2", "--cores", "1")

    done = run(pictures, *options, "--batch-size", "6", "--json", out)

    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(out.read_text())
    assert (whole["images"], whole["batch_size"], whole["cores"]) == (24, 6, 1)
    alone = {run["loader"]: run for run in whole["runs"] if run["model"] is None}
    trained = {run["loader"]: run for run in whole["runs"] if run["model"] == "squeezenet1_1"}
    assert alone.keys() == {"torchdali", "tensors", "pil"}
    assert trained.keys() == alone.keys() | {"synthetic"}
    for figures in (*alone.values(), *trained.values()):
        assert figures["status"] == "ok", figures
        assert figures["images_per_s"] > 0
        assert figures["allowed_cores"] == 1
        assert figures["cpu_s_per_1000_images"] > 0
    for figures in alone.values():
        assert figures["batch"].startswith("(6, 3, 64, 64), torch.float32")
    parts = alone["torchdali"]["alone"]
    assert all(parts[name] > 0 for name in ("read", "decode", "transforms", "together"))
    assert whole["verdict"]["sentence"] in " ".join(done.stdout.split())
    for title in ("Loading alone", "DALILoader's parts, each alone", "Beside a training step of squeezenet1_1"):
        assert title in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_damaged_file_is_named_in_a_folder_without_classes(pictures: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    shutil.copytree(next(path for path in sorted(pictures.iterdir()) if path.is_dir()), flat)
    (flat / "3.jpg").write_bytes(b"no picture")

    done = run(flat, "--seconds", "0.1", "--cores", "1")

    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "8 images" in said
    assert "batches of 2" in said
    assert f"({flat}/3.jpg)" in said
    assert "Verdict" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch-size", "25"), "24 images, less than one batch of 25"),
        (("--train", "resnet1"), "torchvision has no model 'resnet1'"),
        (("--transform", "nowhere.py:x"), "'nowhere.py:x' is not FILE:NAME with a file that exists"),
        (("--transform", "MINE"), "is not FILE:NAME"),
        (("--transform", "MINE:number"), " is no transform: a transform must be callable, got 3"),
        (("--transform", "MINE:kind"), " is no transform: RandomCrop is a class of transforms"),
        (("--transform", "MINE:large"), "has nothing that is called 'large'"),
        (("--seconds", "0"), "Invalid value for '--seconds'"),
        (("--json", "nowhere/figures.json"), "'nowhere/figures.json' cannot be written"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_measured(
    pictures: Path, mine: Path, options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "start_context", lambda _: pytest.fail("it measures"))

    result = invoke(pictures, *(option.replace("MINE", str(mine)) for option in options))

    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.replace("\u2502", " ").split()), result.output


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "has no images" in result.output
    assert invoke(tmp_path / "missing").exit_code == 2


@pytest.mark.parametrize("width", [40, 80])
def test_every_figure_is_seen_in_a_terminal_of_any_width(width: int) -> None:
    figures = {"images_per_s": 24851.0, "gap_ms": {"median": 9.1, "p99": 10.4}, "pss_mib": 21943.0}
    runs = [{"status": "ok", "loader": loader, "model": None, **figures} for loader in ("torchdali", "tensors", "pil")]
    console = Console(width=width, file=io.StringIO())
    command.show_results(runs, None, console)
    printed = console.file.getvalue()  # pyright: ignore
    assert max(map(len, printed.splitlines())) <= width
    assert [printed.count(figure) for figure in ("24,851", "9.1", "10.4", "21,943")] == [3, 3, 3, 3]


# The folder


def test_folders_with_classes_and_without(pictures: Path, tmp_path: Path) -> None:
    assert count_images(pictures) == (True, 0)
    one = next(path for path in sorted(pictures.iterdir()) if path.is_dir())
    assert count_images(one) == (False, 8)

    (tmp_path / ONE_CLASS).symlink_to(one, target_is_directory=True)
    found = make_dataset(tmp_path, load_transform(None))
    assert len(found) == 8
    assert found.classes == [ONE_CLASS]
    image, label = found[0]
    assert (image.shape, label) == ((3, 224, 224), 0)


def test_batches_fit_the_folder() -> None:
    assert [command._choose_batch_size(images) for images in (1, 3, 4, 8, 24, 1023, 1024, 10**7)] == [
        1,
        1,
        1,
        2,
        4,
        128,
        256,
        256,
    ]


# Processes


class SlowLoader:
    """Loader with its own clock: half a second until an epoch's first batch, then 20 ms for each."""

    def __init__(self, batches: int) -> None:
        self.batches, self.epochs, self.now = batches, 0, 0.0

    def __call__(self) -> Iterator[Any]:
        self.epochs += 1
        self.now += 0.5
        for _ in range(self.batches):
            self.now += 0.02
            yield [torch.zeros(2, 1), torch.zeros(2)]


def measure_slow(loader: SlowLoader, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(time, "perf_counter", lambda: loader.now)
        return loading.measure(lambda: loader, Gpu(), 2, seconds=0.5, warmup=0.6)[0]


def test_a_slow_loader_is_measured_without_the_start_of_another_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SlowLoader(1000)
    figures = measure_slow(loader, monkeypatch)
    assert loader.epochs == 1
    assert figures["images_per_s"] == pytest.approx(2 / 0.02)
    assert figures["seconds"] == pytest.approx(1, abs=0.03)
    assert figures["ended_mid_epoch"]
    assert figures["second_epoch_first_batch_s"] is None


def test_an_epoch_that_ends_after_the_warm_up_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SlowLoader(12)
    figures = measure_slow(loader, monkeypatch)
    assert loader.epochs == 3
    assert figures["epochs"] == 3
    batches = figures["images"] / 2
    assert figures["images_per_s"] == pytest.approx(2 * batches / (0.02 * batches + 2 * 0.5), rel=1e-3), (
        "with the starts"
    )


def test_the_second_epochs_start_is_measured_if_the_first_ended_in_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_slow(SlowLoader(4), monkeypatch)["second_epoch_first_batch_s"] == pytest.approx(0.52)


@pytest.mark.slow
def test_a_case_that_hangs_or_fails_is_reported(pictures: Path) -> None:
    context = start_context(())
    case = Case("torchdali", pictures / "missing", None, 4, 1, 1, 0.1)

    failed = measure_in_process(context, measure_case, case, 50)
    hung = measure_in_process(context, measure_case, case, 0.01)

    assert (failed["status"], failed["exit"]) == ("failed", "1")
    assert failed["stderr"].strip().splitlines()[-1].startswith("FileNotFoundError")
    assert (hung["status"], hung["exit"]) == ("timeout", "timeout")


# The verdict


def parts(read: float = 1, decode: float = 1, transforms: float = 1, together: float = 10, **own: float) -> Any:
    """Return a probe, from milliseconds for each batch."""
    seconds = {"read": read, "decode": decode, "transforms": transforms, "together": together}
    in_thread = {part: milliseconds / 1000 for part, milliseconds in own.items()}
    return {"images": 256, "parts": in_thread, "overlapping": True, **{k: v / 1000 for k, v in seconds.items()}}


def make_verdict(
    ours: float, theirs: float, alone: Any = None, busy: float = 1.0, waiting: float = 0.3, **trained: float
) -> Verdict:
    """Return the verdict for images/s on 4 cores. ``trained`` are those beside a training step."""
    runs: dict[str, Any] = {
        "torchdali": {"images_per_s": ours, "busy_cores": busy, "alone": alone or parts(decode=9)},
        "pil": {"images_per_s": theirs},
        "tensors": {"images_per_s": theirs / 2},
    }
    costs = {"torchdali": 0.1, "pil": 250.0, "synthetic": 0.0}
    beside = {
        loader: {"images_per_s": rate, "cpu_s_per_1000_images": costs[loader], "waiting_share": waiting}
        for loader, rate in trained.items()
    }
    return diagnose(runs, beside, 4)


@pytest.mark.parametrize(
    ("given", "bottleneck", "helps", "sentence"),
    [
        (
            (27000, 3000),
            "decoding",
            True,
            (
                "decoding is the bottleneck: it takes 9.00 of 10.0 ms a batch; torchdali loads 9.0 times "
                "as fast as DataLoader"
            ),
        ),
        (
            (3000, 3000, parts(read=9.5)),
            "storage",
            False,
            (
                "storage is the bottleneck: reading takes 9.50 of 10.0 ms a batch; torchdali would not help: 1.00 "
                "times DataLoader's images/s"
            ),
        ),
        (
            (6000, 3000, parts(transforms=8)),
            "transforms",
            True,
            (
                "the transforms in DALI are the bottleneck: they take 8.00 of 10.0 ms a batch; torchdali loads 2.0 "
                "times as fast as DataLoader"
            ),
        ),
        (
            (300, 290, parts(decode=9), 3.9),
            "cores",
            False,
            (
                "the CPU cores are the bottleneck: 3.9 of 4 are busy, most of all with decoding; "
                "torchdali would not help: 1.03 times DataLoader's images/s"
            ),
        ),
        (
            (300, 200, parts(read=9.5), 3.9),
            "storage",
            True,
            (
                "storage is the bottleneck: reading takes 9.50 of 10.0 ms a batch; torchdali loads 1.5 times as fast "
                "as DataLoader"
            ),
        ),
        (
            (600, 500, parts(together=30, torch=25)),
            "torch",
            True,
            (
                "transforms that run in torch, which explain() names, are the bottleneck: they take 25.0 of 30.0 ms a "
                "batch; torchdali loads 1.2 times as fast as DataLoader"
            ),
        ),
    ],
)
def test_the_bottleneck_of_loading_alone(given: Any, bottleneck: str, helps: bool, sentence: str) -> None:
    assert make_verdict(*given) == Verdict(bottleneck, helps, sentence)


def test_the_model_is_the_bottleneck_with_dataloader_too() -> None:
    said = make_verdict(27000, 3000, synthetic=1000, torchdali=999, pil=985)

    assert (said.bottleneck, said.helps) == ("model", False)
    assert said.sentence == (
        "torchdali would not help: your model is the bottleneck: 985 of 3,000 images/s used, and a faster loader would "
        "change nothing; DataLoader keeps up, with 250 CPU-seconds for 1,000 images instead of 0.1"
    )


def test_the_model_is_the_bottleneck_with_torchdali_alone() -> None:
    said = make_verdict(27000, 3000, synthetic=4400, torchdali=4354, pil=2500)

    assert (said.bottleneck, said.helps) == ("model", True)
    assert said.sentence.startswith("with torchdali your model is the bottleneck: 4,354 of 27,000 images/s used")
    assert said.sentence.endswith("it trains 1.7 times as fast as DataLoader")


def test_the_loader_is_the_bottleneck_beside_a_model() -> None:
    said = make_verdict(10000, 3000, synthetic=13000, torchdali=9100, pil=2600)

    assert (said.bottleneck, said.helps) == ("decoding", True)
    assert said.sentence == (
        "decoding is the bottleneck: it takes 9.00 of 10.0 ms a batch: 70% of what the model could take; torchdali "
        "trains 3.5 times as fast as DataLoader"
    )


def test_the_model_is_the_bottleneck_where_it_does_not_wait() -> None:
    said = make_verdict(24851, 3000, waiting=0.002, synthetic=13021, torchdali=12167, pil=3850)

    assert (said.bottleneck, said.helps) == ("model", True)
    assert said.sentence == (
        "with torchdali your model is the bottleneck: 12,167 of 24,851 images/s used, and a faster loader would change "
        "nothing; loading on the same GPU and cores costs it 7%; it trains 3.2 times as fast as DataLoader"
    )


@pytest.mark.parametrize(
    ("waiting", "rates", "gain"),
    [
        (0.3, {"synthetic": 1000, "torchdali": 990, "pil": 950}, "1.04"),
        (0.002, {"synthetic": 1000, "torchdali": 900, "pil": 880}, "1.02"),
        (0.3, {"synthetic": 1000, "torchdali": 700, "pil": 690}, "1.01"),
    ],
)
def test_beside_a_model_little_is_no_help(waiting: float, rates: dict[str, float], gain: str) -> None:
    said = make_verdict(27000, 3000, waiting=waiting, **rates)

    assert not said.helps
    assert said.sentence.endswith(f"; torchdali would not help: {gain} times DataLoader's images/s")


def test_a_bottleneck_that_could_not_be_measured() -> None:
    said = diagnose({"torchdali": {"images_per_s": 200.0}, "pil": {"images_per_s": 100.0}}, {}, 4)

    assert (said.bottleneck, said.helps) == ("not measured", True)


@pytest.mark.parametrize("rates", [{"torchdali": 105, "pil": 40}, {"torchdali": 90, "pil": 110}])
def test_figures_that_contradict_each_other_are_no_ground_for_a_verdict(rates: dict[str, float]) -> None:
    said = make_verdict(300, 200, synthetic=14, **rates)

    assert (said.bottleneck, said.helps) == ("not measured", False)
    assert said.sentence == (
        f"these figures contradict each other: {max(rates.values())} images/s beside the model, which reached only 14 "
        "with one repeated batch; measure again with nothing else on the machine"
    )


@pytest.mark.parametrize("missing", ["torchdali", "synthetic", "pil"])
def test_no_verdict_without_what_it_takes(missing: str) -> None:
    figures = {"status": "ok", "images_per_s": 1.0, "busy_cores": 1.0, "cpu_s_per_1000_images": 1.0, "alone": parts()}
    figures["waiting_share"] = 0.5
    runs = [{"loader": loader, "model": None, **figures} for loader in ("torchdali", "pil")]
    runs += [{"loader": loader, "model": "x", **figures} for loader in ("synthetic", "torchdali", "pil")]
    assert command._diagnose_runs(runs, 4) is not None

    last = max(place for place, one in enumerate(runs) if one["loader"] == missing)
    runs[last] = {**runs[last], "status": "failed"}
    assert command._diagnose_runs(runs, 4) is None


@pytest.mark.parametrize("name", ["several", "made"])
def test_a_transform_may_be_a_list_or_made_by_a_function(mine: Path, name: str) -> None:
    found = load_transform(f"{mine}:{name}")
    assert [type(one).__name__ for one in found.transforms] == ["ToImage", "CenterCrop"]


def test_a_function_that_takes_any_images_is_a_transform(mine: Path) -> None:
    assert load_transform(f"{mine}:taken")("an image") == "an image"


def test_a_file_that_is_imported_does_not_see_the_commands_arguments(mine: Path) -> None:
    before = sys.argv
    assert load_object(f"{mine}:given") == [str(mine.resolve())]
    assert sys.argv is before
