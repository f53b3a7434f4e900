"""What loader.stats() says of an epoch whose times are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from torchdali.loader.stats import Bottleneck, Probe, Stats
from torchdali.loader.verdict import describe_alone, describe_model, diagnose
from torchdali.pipeline.clock import Clock, Part
from torchdali.transforms.spec import InputKind


class Told:
    """An epoch's clock, and the time that it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, input_kind: str | None = "files") -> None:
        self.now = 0.0
        monkeypatch.setattr("torchdali.pipeline.clock.perf_counter", lambda: self.now)
        self.clock = Clock(torch.device("cpu"))
        self.clock.input_kind = InputKind(input_kind) if input_kind else None

    def batch(self, waited: float, consumer: float = 0.0, part: Part = "DALI", raises: bool = False) -> None:
        self.now += consumer
        self.clock.enter()
        self.now += waited
        self.clock.lap(part)
        if not raises:
            self.clock.leave(1)

    def diagnose(self, asked: int | None = None, probe: Probe | None = None, **about: bool) -> Stats:
        return diagnose(self.clock, probe, asked, **about)


def test_what_came_to_nothing_is_in_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    for seconds, raises in ((1, False), (2, False), (1000, True)):
        told.batch(seconds, part="dataset", raises=raises)
    told.now += 5000
    told.clock.skip(5000)  # a probe
    told.now += 600
    for _ in range(2):
        told.batch(2, part="dataset")
    stats = told.diagnose(0)
    assert (stats.elapsed, stats.timed) == (1007, 2), "of the time after the exception, none"
    assert (stats.waited, sum(stats.parts.values())) == (4, 4)


@pytest.mark.parametrize(
    ("start", "waits", "over", "verdict"),
    [
        (10, [1, 1], False, "reading, decoding and transforming in DALI is the bottleneck; "),
        (
            10,
            [1, 1],
            True,
            "the start is the bottleneck: 10.0 of 12.0 s passed before the first batch (measured over 2 ",
        ),
        (0.2, [0.0125] * 8, True, "the start is the bottleneck: 0.200 of 0.300 s passed before the first batch"),
        (3, [1, 1, None, 1, None, 1, None, 1], True, "reading, decoding and transforming in DALI is the bottleneck; "),
    ],
)
def test_the_start(start: float, waits: Any, over: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    for seconds in (start, *waits):
        told.batch(seconds or 0, raises=seconds is None)
    if over:
        told.clock.end()
    stats = told.diagnose()
    assert stats.verdict.startswith(verdict)
    assert stats.possible is None or stats.bottleneck != "start"
    assert ("only)" in stats.verdict) == (stats.timed < 8)


@pytest.mark.parametrize(
    ("part", "times", "asked", "bottleneck", "possible"),
    [
        ("DALI", [(0.1, 1)] * 10, None, "model", None),
        ("DALI", [(1, 1)] * 10, None, "pipeline", 0.5),
        ("DALI", [(1, 1), (0, 1)] * 5, None, "pipeline", None),
        ("DALI", [(1, 1), (1, 1), (0, 1)] * 5, None, "pipeline", None),
        ("dataset", [(1, 3)] * 10, 2, "dataset", 0.25),
        ("dataset", [(1, 3)] * 10, 0, "dataset", None),
        ("collate", [(10, 1)] * 10, 0, "collate", 0.1),
    ],
)
def test_what_is_possible(
    part: Part,
    times: Any,
    asked: int | None,
    bottleneck: Bottleneck,
    possible: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(monkeypatch)
    told.batch(0)
    for waited, consumer in times:
        told.batch(waited, consumer, part)
    stats = told.diagnose(asked)
    assert stats.bottleneck == bottleneck
    assert stats.possible == (possible and pytest.approx(possible))


def test_what_a_dataset_without_dali_can_give(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, None)
    for _ in range(11):
        told.batch(1, 3, "dataset")
    stats = told.diagnose(0)
    assert (stats.bottleneck, stats.throughput, stats.possible) == ("dataset", 0.25, 1)
    assert "step       3,000 ms a batch in the training step\nloader     dataset 1,000 ms a batch" in str(stats)
    for _ in range(100):
        told.batch(0.105, 1, "dataset")
    stats = told.diagnose(0)
    assert (stats.bottleneck, stats.possible) == ("dataset", pytest.approx(110 / 20.5))
    assert stats.waited_batches == 10 / 110
    told.batch(0, 1000)
    assert (told.diagnose(0).bottleneck, told.diagnose(0).possible) == ("model", None)


CACHE, TRANSFORM = {"has_cache": True}, {"has_transform": True}
PROBE = Probe(4, 0.1, 0.4, 0.2, 0.5, {"DALI": 0.3, "feed": 0.1}, True)


@pytest.mark.parametrize(
    ("input_kind", "part", "asked", "about", "bottleneck", "possible", "said"),
    [
        ("files", "DALI", None, {}, "pipeline", 0.25, "reading, decoding and transforming in DALI is the bottleneck; "),
        ("files", "DALI", None, CACHE, "pipeline", 0.25, "reading, decoding and transforming in DALI is"),
        ("encoded", "DALI", 2, TRANSFORM, "pipeline", 0.25, "decoding and transforming in DALI is the bottlenec"),
        ("pixels", "DALI", None, {}, "transforms", 0.25, "DALI, whose only work is the transforms, is the bottleneck;"),
        ("packed", "DALI", None, CACHE, "pipeline", 0.25, "DALI, which transforms what is in the cache, an"),
        ("files", "DALI", None, {"probe": PROBE}, "decoding", 8, "decoding is the bottleneck: it takes 400 of 500 ms "),
        ("files", "DALI", None, {"probe": replace(PROBE, read=0.45)}, "storage", 8, "storage is the bottleneck: readi"),
        ("files", "DALI", None, {"probe": replace(PROBE, transforms=0.45)}, "transforms", 8, "the transforms in DALI"),
        ("files", "collate", None, {"probe": PROBE}, "collate", 8, "the iterating thread is the bottleneck: targets a"),
        ("files", "headers", None, {}, "storage", 0.25, "storage is the bottleneck: reading the headers of files that"),
        ("files", "headers", None, CACHE, "storage", 0.25, "storage is the bottleneck: reading files for t"),
        ("pixels", "feed", None, {}, "host", None, "the iterating thread is the bottleneck: drawing parameters and fe"),
        (None, "dataset", 1, {}, "dataset", 0.25, "the dataset's own __getitem__ in 1 worker is the bottleneck: waiti"),
        (None, "dataset", 0, TRANSFORM, "dataset", 1 / 3, "the dataset's own __getitem__ in this process (num"),
    ],
)
def test_what_is_waited_for(
    input_kind: str | None,
    part: Part,
    asked: int | None,
    about: Any,
    bottleneck: Bottleneck,
    possible: float | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three seconds of every four."""
    told = Told(monkeypatch, input_kind)
    for _ in range(9):
        told.batch(3, 1, part)
    stats = told.diagnose(asked, **about)
    assert (stats.bottleneck, stats.possible) == (bottleneck, possible and pytest.approx(possible))
    assert stats.verdict.startswith(said)
    assert stats.verdict.endswith("; the training loop waited 75% of the time")
    probe = about.get("probe")
    if probe and part == "DALI":
        assert f" {max(probe.read, probe.decode, probe.transforms) * 1e3:.0f} of 500 ms a batch; " in stats.verdict
    elif part != "DALI":
        assert " 3,000 of 4,000 ms a batch" in stats.verdict
    assert ("probe" in stats.verdict) == (input_kind == "files" and part == "DALI" and not about)
    nothing = "; transform= found no image;" in stats.verdict, "; without transform= nothing runs" in stats.verdict
    assert nothing == (input_kind is None and bool(about), input_kind is None and not about)


@pytest.mark.parametrize(
    ("waited", "of_dali", "bottleneck"), [(0.9, 0.3, "collate"), (1.1, 0.3, "pipeline"), (0.8, 0.6, "pipeline")]
)
def test_a_gpu_waits_when_the_host_does_not(
    waited: float, of_dali: float, bottleneck: Bottleneck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For DALI, as the host may when the GPU does not."""
    told = Told(monkeypatch)
    for _ in range(11):
        told.batch(0.05, 0.1, "collate")
    told.clock.timed.waited = waited  # as the GPU's events say
    told.clock.parts["DALI"] = of_dali
    assert told.diagnose().bottleneck == bottleneck


def test_no_part_is_more_than_the_whole() -> None:
    """Though what is measured apart may take longer than all of it together did."""
    assert describe_model(12, 10).startswith("your model is the bottleneck: 10 of 10 images/s used")
    probe = Probe(1, 2.0, None, 0.0, 1.0, {}, True)
    assert describe_alone(probe) == "storage is the bottleneck: reading takes 1,000 of 1,000 ms a batch"


def test_what_was_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    for _ in range(3):
        told.batch(1)
    stats = told.diagnose()
    before = str(stats)
    told.batch(100)
    assert (stats.parts["DALI"], str(stats)) == (2, before)


def test_exceptions_between_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    for said in ("one batch was handed out", "no batch followed another one, without an exception between"):
        told.batch(1)
        assert told.diagnose().verdict.startswith(said)
        told.batch(1, raises=True)
