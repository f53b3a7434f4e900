"""loader.stats(): what an epoch's time was spent on, and which bottleneck it names."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CROP, PER_BATCH, assert_pairs, in_order
from helpers.in_memory import MAKERS
from helpers.timed import COUNT, NAP, Asked, epochs, nap, slow_engine, with_transform
from torch.utils.data import SequentialSampler, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.loader import verdict
from torchdali.loader.stats import HOST, Bottleneck, Stats
from torchdali.pipeline.clock import Clock, Timed
from torchdali.pipeline.readers.header_reader import FirstBytes

pytestmark = pytest.mark.timeout(60)

FEW_AHEAD = {"num_workers": 1, "prefetch_factor": 1}
"""Lets little of an epoch's work fall into its start."""


@pytest.fixture
def photographs(pictures: Path) -> list[Path]:
    return sorted(pictures.rglob("*.jpg"))


@pytest.mark.parametrize(("former", "name"), [("limit", "bottleneck"), ("taken", "throughput"), ("over", "finished")])
def test_a_former_name_warns(former: str, name: str) -> None:
    stats = Stats(bottleneck="model", throughput=2.0, finished=True)
    with pytest.warns(DeprecationWarning, match=rf"Stats\.{former} is deprecated; use Stats\.{name}"):
        assert getattr(stats, former) == getattr(stats, name)


# Which bottleneck is named


def test_the_model(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    epochs(loader, between=2 * NAP)
    stats = loader.stats()
    assert (stats.bottleneck, stats.possible) == ("model", None)
    assert stats.verdict.startswith(f"your model is the bottleneck: it takes {stats.throughput:,.0f} images/s")
    assert stats.waited_share < 0.5 < 1 - stats.waited_batches
    assert stats.consumer >= stats.timed * 2 * NAP
    assert stats.throughput is not None
    assert 0 < stats.throughput < PER_BATCH / (2 * NAP)


SLOW: dict[str, tuple[Bottleneck, str, Callable[[ImageFolder], dict[str, Any]]]] = {
    "a transform": (
        "torch",
        "in torch, sample by sample, are the bottleneck: Lambda at position 3 and 1 more take",
        lambda dataset: {"dataset": with_transform(dataset, v2.Lambda(nap), v2.RandomHorizontalFlip())},
    ),
    "target_transform": (
        "collate",
        "targets and collate_fn",
        lambda dataset: vars(dataset).update(target_transform=nap) or {"dataset": dataset},
    ),
    "collate_fn": (
        "collate",
        "targets and collate_fn",
        lambda dataset: {"dataset": dataset, "collate_fn": lambda samples: nap(default_collate(samples))},
    ),
    "batch_transform": (
        "batch_transform",
        "batch_transform is the bottleneck",
        lambda dataset: {"dataset": dataset, "batch_transform": lambda *batch: nap(batch)},
    ),
}


@pytest.mark.parametrize(
    ("bottleneck", "text", "make"),
    [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
)
def test_what_users_write_in_this_process(
    dataset: ImageFolder, bottleneck: Bottleneck, text: str, make: Any, device: str
) -> None:
    loader = DALILoader(**make(dataset), batch_size=PER_BATCH, device=device)
    epochs(loader)
    if device == "cuda":
        torch.cuda.synchronize()
    stats = loader.stats()
    (part,) = (part for part, of_part in HOST.items() if of_part == bottleneck)
    assert stats.bottleneck == bottleneck
    assert text in stats.verdict
    assert stats.parts[part] >= stats.timed * NAP
    assert stats.waited_share > 0.5
    assert stats.possible is not None
    assert 0 < stats.possible < PER_BATCH / NAP


def test_transforms_for_whole_batches(dataset: ImageFolder) -> None:
    matrix, mean = torch.eye(3 * CROP * CROP), torch.zeros(3 * CROP * CROP)
    chain = with_transform(dataset, v2.ToDtype(torch.float32), v2.LinearTransformation(matrix, mean))
    loader = DALILoader(chain, PER_BATCH, device="cpu")
    epochs(loader)
    case = dataclasses.replace(loader.stats(), bottleneck="torch")
    clock = loader._clock
    assert clock is not None
    assert "torch" in case.parts
    assert "on whole batches, are the bottleneck: LinearTransformation at position 4 take" in verdict._describe(
        case, clock, None, has_cache=False, idle=""
    )


@pytest.mark.slow
def test_headers_that_come_slowly(dataset: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    read = FirstBytes.read
    monkeypatch.setattr(FirstBytes, "read", lambda *args: time.sleep(0.5) or read(*args))
    loader = DALILoader(dataset, 4, device="cpu", **FEW_AHEAD)
    epochs(loader, 1)
    stats = loader.stats()
    assert (stats.bottleneck, stats.waited_share > 0.5) == ("storage", True)
    assert "reading the headers of files" in stats.verdict
    assert stats.parts["headers"] > stats.waited / 2


def test_dali(dataset: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_engine(monkeypatch)
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    epochs(loader)
    stats = loader.stats()
    assert (stats.bottleneck, stats.possible) == ("pipeline", stats.throughput)
    assert "reading, decoding and transforming in DALI is the bottleneck; stats(probe=True)" in stats.verdict
    assert stats.parts["DALI"] >= stats.timed * NAP


def test_dali_that_is_fed_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_engine(monkeypatch)
    dataset = MAKERS["CIFAR10"](tmp_path, monkeypatch, transform=v2.Compose([v2.ToImage(), v2.Resize(40)]))
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    epochs(loader)
    assert (loader.stats().bottleneck, "DALI, whose only work is" in loader.stats().verdict) == ("transforms", True)


def test_the_start(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, transform=v2.Identity(), device="cpu")
    iterator = iter(loader)
    clock = loader._clock
    assert clock is not None
    clock._began -= 60
    list(iterator)
    stats = loader.stats()
    assert stats.bottleneck == "start"
    assert stats.verdict.startswith("the start is the bottleneck: 60.")
    assert stats.start is not None
    assert 60 < stats.start < stats.elapsed
    assert stats.waited < 30, "the start is kept apart"


# Datasets that are asked for samples


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_a_datasets_own_work(photographs: list[Path], exact: Any, workers: int, persistent: bool, device: str) -> None:
    options: dict[str, Any] = {"persistent_workers": persistent} if workers else {}
    loader = DALILoader(
        Asked(photographs[:12], 5 * NAP), 2, transform=exact, num_workers=workers, device=device, **options
    )
    stats = Stats()
    for _ in range(1 + persistent):
        for _ in loader:
            stats = loader.stats()  # not when it is over, since workers take long to start
    where = f"in {workers} workers is" if workers else "in this process (num_workers=0) is"
    assert (stats.bottleneck, stats.batches, stats.images) == ("dataset", 6, 12)
    assert f"the dataset's own __getitem__ {where} the bottleneck" in stats.verdict
    assert stats.waited_share > 0.5
    # The full speed of workers is known only if the loop always waits.
    assert (stats.possible is not None) == (not workers or stats.waited_batches > 0.9)


@pytest.mark.slow
def test_dali_behind_a_dataset(photographs: list[Path], exact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_engine(monkeypatch)
    loader = DALILoader(Asked(photographs), 2, transform=exact, num_workers=2, device="cpu", persistent_workers=True)
    epochs(loader)
    stats = loader.stats()
    assert stats.bottleneck == "pipeline"
    assert "in DALI is the bottleneck; the training loop" in stats.verdict, "there is nothing to probe"


def test_what_is_waited_for_dali_is_the_datasets_fault_where_dali_was_idle() -> None:
    clock = Clock(torch.device("cpu"))
    for starved in (True, True, False):
        clock.enter(starved)
        clock.lap("feed")
        clock.lap("DALI")
        clock.leave(1)
    assert set(clock.parts) == {"feed", "dataset", "DALI", "collate"}


@pytest.mark.slow
def test_a_model_for_which_nothing_runs_in_dali(photographs: list[Path]) -> None:
    loader = DALILoader(
        Asked(photographs), 2, batch_transform=lambda *batch: batch, collate_fn=lambda samples: [1], device="cpu"
    )
    epochs(loader, between=NAP)
    assert loader.stats().bottleneck == "model"
    assert "without transform= nothing runs in DALI" in loader.stats().verdict


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_iterator_is_not_measured(photographs: list[Path], workers: int) -> None:
    loader = DALILoader(Asked(photographs), 2, collate_fn=list, num_workers=workers, device="cpu")
    assert loader.stats().bottleneck == "not measured"
    epochs(loader, 1)
    assert (loader.stats(), loader.stats().batches) == (verdict.UNMEASURED, 0)
    assert "nothing is measured" in str(loader.stats())


# At any time


def test_before_the_first_batch(dataset: ImageFolder, photographs: list[Path], exact: Any) -> None:
    for loader in (
        DALILoader(dataset, device="cpu"),
        DALILoader(Asked(photographs), transform=exact, device="cpu"),
    ):
        assert loader.stats() == Stats()
        iterator = iter(loader)
        assert (loader.stats().bottleneck, loader.stats().verdict) == ("nothing yet", "no batch was handed out yet")
        next(iterator)
        stats = loader.stats()
        assert (stats.batches, stats.timed, stats.throughput, stats.bottleneck) == (1, 0, None, "nothing yet")
        assert "nothing can be said before the second" in stats.verdict


def test_between_batches_after_a_break_and_in_the_next_epoch(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    for number, _ in enumerate(loader, start=1):
        stats = loader.stats()
        assert (stats.batches, stats.images, stats.timed, stats.finished) == (number, 3 * number, number - 1, False)
        if number == 4:
            break
    assert loader.stats().batches == 4
    time.sleep(10 * NAP)
    assert loader.stats() == stats, "nobody iterates"
    assert "so far" in str(stats)
    epochs(loader, 1)
    assert (loader.stats().batches, loader.stats().images, loader.stats().finished) == (8, COUNT, True)
    loader.close()
    assert loader.stats().batches == 8


def test_nothing_to_load(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, sampler=[], device="cpu")
    epochs(loader, 1)
    nothing = Stats(verdict="the epoch had no batch")
    assert (DALILoader(dataset, device="cpu").stats(), loader.stats()) == (Stats(), nothing)
    dataset.samples = []
    empty = DALILoader(dataset, device="cpu")
    epochs(empty, 1)
    assert empty.stats(probe=True) == nothing


def test_a_batch_that_fails_is_not_counted(fresh: ImageFolder) -> None:
    Path(fresh.samples[4][0]).unlink()
    loader = DALILoader(fresh, PER_BATCH, device="cpu")
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(SampleError):
        next(iterator)
    time.sleep(10 * NAP)
    assert len(list(iterator)) == 6
    stats = loader.stats()
    assert (stats.batches, stats.timed) == (7, 5), "the time after an error is nobody's"
    assert stats.consumer < 10 * NAP


def test_the_latest_of_two_epochs(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    first, second = iter(loader), iter(loader)
    next(second)
    assert_pairs(first, dataset, in_order())
    assert loader.stats().batches == 1


def test_copies_begin_anew(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    epochs(loader, 1)
    for twin in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert twin.stats() == Stats()
    assert loader.stats().batches == 8


def test_what_is_given_cannot_be_changed_and_prints_a_table(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    epochs(loader)
    stats = loader.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.batches = 1  # pyright: ignore[reportAttributeAccessIssue]
    rows = [line[:11].strip() for line in repr(stats).splitlines()]
    assert [row for row in rows if row not in ("", "to do")] == [
        *("verdict", "epoch", "start", "throughput", "waiting", "step", "loader"),
    ]
    assert "s in all" in str(stats)
    assert " ".join(str(stats).split()).startswith(f"verdict {stats.verdict}")
    assert max(map(len, str(stats).splitlines())) <= 80
    assert sum(stats.parts.values()) == pytest.approx(stats.waited), "what is done in next() is what is waited for"
    assert 0 <= stats.waited_p50 <= stats.waited_p99 <= stats.waited_max <= stats.waited


def test_what_helps_stands_below_the_verdict() -> None:
    lines = str(Stats(bottleneck="host", verdict="<the verdict>")).splitlines()
    assert lines == ["verdict    <the verdict>", "to do      use larger batches"]
    assert str(Stats(bottleneck="model", verdict="no")) == "verdict    no"
    assert "\nepoch      1 batch with 1 image in 0.0 s so far\n" in str(Stats(batches=1, images=1, start=0.0))
    page = Stats(bottleneck="host", verdict="<the verdict>")._repr_html_()
    assert page.startswith("<div><p><b>&lt;the verdict&gt;</b></p><table ")
    assert (page.count("<th "), "use larger batches" in page) == (1, True)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_with_a_cache(dataset: ImageFolder, kind: Any) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu", cache=kind)
    for _ in range(2):
        epochs(loader, 1)
        assert "probe" not in loader.stats().verdict, "such a loader is not probed"
    stats, clock = loader.stats(), loader._clock
    assert clock is not None
    said = {
        bottleneck: verdict._describe_bottleneck(
            dataclasses.replace(stats, bottleneck=bottleneck), clock, None, has_cache=True, idle=""
        )
        for bottleneck in ("pipeline", "storage")
    }
    assert said["pipeline"].startswith("DALI, which transforms what is in the cache" if kind == "device" else "deco")
    assert said["storage"].startswith(
        "storage is the bottleneck: reading files for the cache, or looking whether they chan"
    )


def test_decoding_into_a_cache_is_dalis_work(dataset: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_engine(monkeypatch)
    loader = DALILoader(dataset, PER_BATCH, device="cpu", cache="device")
    epochs(loader, 1)
    assert loader.stats().bottleneck == "pipeline"
    assert loader.stats().parts["DALI"] > loader.stats().waited / 2
    assert "probe" not in loader.stats().verdict, "such a loader is not probed"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "device"])
def test_files_that_come_slowly_into_a_cache(dataset: ImageFolder, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    loader = DALILoader(dataset, 1, device="cpu", cache=kind, **FEW_AHEAD)
    epochs(loader, 1)
    look = os.stat
    monkeypatch.setattr(os, "stat", lambda *args, **options: nap(nap(look(*args, **options))))
    epochs(loader, 1)
    assert loader.stats().bottleneck == "storage"


@pytest.mark.slow
def test_a_slow_sampler(dataset: ImageFolder) -> None:
    class Slow(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return (nap(index) for index in super().__iter__())

    loader = DALILoader(dataset, 1, sampler=Slow(dataset), device="cpu", **FEW_AHEAD)
    epochs(loader)
    stats = loader.stats()
    assert stats.bottleneck == "sampler"
    assert stats.verdict.startswith("the sampler is the bottleneck: asking it for indices takes")


def test_of_a_long_epoch_the_latest_waits_are_kept() -> None:
    timed = Timed()
    for number in range(10_100):
        timed.add(1, number, 1)
    assert (timed.batches, timed.longest, len(timed.waits), timed.waits[0]) == (10_100, 10_099, 10_000, 100)


@pytest.mark.slow
def test_a_transform_that_finds_no_image(photographs: list[Path], exact: Any) -> None:
    class Names(Asked):
        def __getitem__(self, index: int) -> Any:
            time.sleep(NAP)  # or the start may be the longer part
            return str(super().__getitem__(index)[1])

    loader = DALILoader(Names(photographs), PER_BATCH, transform=exact, device="cpu")
    with pytest.warns(UserWarning, match="no image was found"):
        epochs(loader, 1)
    assert "; transform= found no image" in loader.stats().verdict


# On a GPU


class Event:
    """A CUDA event whose time is told, and that is passed once the GPU is there."""

    now, reached = 0.0, 0.0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: Any) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, other: Event) -> float:
        assert other.query(), "CUDA raises there"
        return 1e3 * (other.at - self.at)


def test_the_gpus_own_time_is_read_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdali.pipeline.clock.Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    Event.now = Event.reached = Event.made = 0
    clock = Clock(torch.device("cuda", 0))

    def batch(consumer: float, waited: float) -> None:
        Event.now += consumer
        clock.enter()
        Event.now += waited
        clock.leave(10)

    batch(0, 5)
    for _ in range(20):
        batch(3, 1)
    assert clock.timed.batches == 0, "the GPU is not there yet"
    assert verdict.diagnose(clock, None, None).verdict.startswith("the GPU has not come to the second batch yet")
    Event.reached = Event.now - 0.5
    batch(3, 1)
    assert (clock.timed.batches, clock.timed.waited, clock.timed.consumer) == (19, 19, 57)
    Event.reached = Event.now
    assert verdict.diagnose(clock, None, None).timed == 21, "what the GPU has done since the latest batch, too"
    assert (clock.timed.batches, clock.timed.images, clock.timed.waited) == (21, 210, 21)
    made = Event.made
    for _ in range(100):
        batch(3, 1)
        Event.reached = Event.now
    assert Event.made <= made + 2, "events are used again"
    clock.skip()
    batch(1000, 1)
    Event.reached = Event.now
    clock.read()
    assert clock.timed.longest == 1
    assert clock.timed.consumer < 1000
    clock.end()
    assert clock.start is not None
    clock.start = clock.elapsed = 99.0
    stats = verdict.diagnose(clock, None, None)
    assert (stats.bottleneck, stats.waited_share) == ("pipeline", 0.25), (
        "the GPU is at work long after the host's epoch"
    )


@pytest.mark.gpu
def test_a_model_on_the_gpu_is_the_bottleneck_although_the_host_waits_for_nothing(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cuda")
    for _ in range(2):
        for _ in loader:
            torch.cuda._sleep(100_000_000)  # cycles: about 50 ms that the host does not wait
    torch.cuda.synchronize()
    stats = loader.stats()
    assert (stats.bottleneck, stats.timed) == ("model", 7)
    assert stats.consumer > stats.waited
    epochs(loader, 3)
    torch.cuda.synchronize()
    stats = loader.stats()
    assert stats.timed == 7
    assert stats.waited > stats.consumer
