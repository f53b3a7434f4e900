"""The diagnosis of an epoch's times: the bottleneck, and one sentence about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchdali.loader.stats import HOST, Bottleneck, Probe, Stats, format_count, milliseconds
from torchdali.pipeline.clock import WAIT_THRESHOLD, Clock, Part
from torchdali.pipeline.plan import Step
from torchdali.transforms.spec import InputKind

__all__ = ["UNMEASURED", "describe_alone", "describe_model", "diagnose"]

_FEW_BATCHES = 8
_IN_DALI = {
    InputKind.FILES: "reading, decoding and transforming in DALI is",
    InputKind.ENCODED: "decoding and transforming in DALI is",
    InputKind.PLACES: "decoding and transforming in DALI is",
    InputKind.PIXELS: "DALI, whose only work is the transforms, is",
    InputKind.PACKED: "DALI, which transforms what is in the cache, and decodes what is not yet, is",
}


UNMEASURED = Stats(
    bottleneck="not measured",
    verdict="nothing is measured: on the CPU, without transform= and batch_transform=, the batches of a worker-fed "
    "dataset are made by DataLoader alone",
)


def describe_model(taken: float, possible: float | None) -> str:
    """Return the sentence for a training step that the loader keeps up with.

    Args:
        taken: Images/s that the training loop takes.
        possible: Images/s that the loader could deliver; None if that is not known.
    """
    if possible is None:
        return f"your model is the bottleneck: it takes {taken:,.0f} images/s, and a faster loader would change nothing"
    used = f"{min(taken, possible):,.0f} of {possible:,.0f} images/s used"
    return f"your model is the bottleneck: {used}, and a faster loader would change nothing"


def _format_share(part: float, whole: float) -> str:
    return f"{milliseconds(min(part, whole))} of {milliseconds(whole)} ms a batch"


def diagnose(
    clock: Clock | None,
    probe: Probe | None,
    num_workers: int | None,
    steps: Sequence[Step] = (),
    *,
    has_cache: bool = False,
    has_transform: bool = False,
) -> Stats:
    """Return the statistics of an epoch, with its bottleneck.

    Args:
        clock: The clock of the epoch; None before the first epoch.
        probe: The result of a probe, if there was one.
        num_workers: Number of worker processes of a worker-fed dataset; None for a native dataset.
        steps: The chain of transforms, if there was no epoch.
        has_cache: Whether the loader has a cache, and cannot be probed.
        has_transform: Whether the loader has a ``transform=``.
    """
    if clock is None or clock.start is None:
        if probe is None:
            return Stats(verdict="the epoch had no batch") if clock and clock.finished else Stats()
        verdict = f"{describe_alone(probe, steps)}; {probe.rate:,.0f} images/s are possible"
        return Stats(possible=probe.rate, probe=probe, bottleneck=probe.bottleneck, verdict=verdict)
    stats = _summarize(clock, probe)
    if not stats.timed:
        verdict = "one batch was handed out, and nothing can be said before the second"
        if stats.batches > 1:
            verdict = "no batch followed another one, without an exception between, and nothing can be said"
        if clock.is_behind:
            verdict = "the GPU has not come to the second batch yet, and nothing can be said before"
        return replace(stats, verdict=verdict)
    bottleneck = _find_bottleneck(stats, clock)
    stats = replace(
        stats,
        bottleneck=bottleneck,
        possible=probe.rate if probe else _estimate_rate(stats, clock, bottleneck, bool(num_workers)),
    )
    note = (
        f" (measured over {format_count(stats.timed, 'batch', 'batches')} only)" if stats.timed < _FEW_BATCHES else ""
    )
    idle = "; transform= found no image" if has_transform else "; without transform= nothing runs in DALI"
    text = _describe(stats, clock, num_workers, has_cache, "" if clock.input_kind else idle)
    return replace(stats, verdict=text + note)


def _summarize(clock: Clock, probe: Probe | None) -> Stats:
    clock.read()
    timed = clock.timed
    time = timed.waited + timed.consumer
    p50, p99 = np.quantile(timed.waits, [0.5, 0.99]).tolist() if timed.waits else (0.0, 0.0)
    return Stats(
        batches=clock.batches,
        images=clock.images,
        finished=clock.finished,
        elapsed=clock.elapsed,
        start=clock.start,
        throughput=timed.images / time if time else None,
        timed=timed.batches,
        waited=timed.waited,
        waited_p50=p50,
        waited_p99=p99,
        waited_max=timed.longest,
        waited_share=timed.waited / time if time else 0.0,
        waited_batches=timed.noticed / max(timed.batches, 1),
        consumer=timed.consumer,
        parts=dict(clock.parts),
        probe=probe,
    )


def _find_bottleneck(stats: Stats, clock: Clock) -> Bottleneck:
    if stats.finished and (stats.start or 0.0) > _measure_seconds_after_first(stats):
        return "start"
    if stats.waited_share < WAIT_THRESHOLD:
        return "model"
    parts = _wait_by_part(stats)
    bottleneck = HOST[max(parts, key=parts.__getitem__)]
    if bottleneck == "pipeline" and clock.input_kind is InputKind.PIXELS:
        return "transforms"
    return stats.probe.in_dali if bottleneck == "pipeline" and stats.probe else bottleneck


def _measure_seconds_after_first(stats: Stats) -> float:
    """Return the seconds after the first batch. The GPU's time may end long after the host's."""
    return (stats.waited + stats.consumer) / stats.timed * (stats.batches - 1)


def _wait_by_part(stats: Stats) -> dict[Part, float]:
    """Return the parts for which the training loop waited. On a GPU it may wait for DALI when the host does not."""
    parts = dict(stats.parts)
    own = sum(seconds for part, seconds in parts.items() if part != "DALI")
    parts["DALI"] = max(parts.get("DALI", 0.0), stats.waited - own)
    return parts


def _estimate_rate(stats: Stats, clock: Clock, bottleneck: Bottleneck, workers: bool) -> float | None:
    """Return the images/s that the loader could deliver; None if the epoch does not show it.

    Work beside the training loop shows its full speed only if the loop always waits.
    """
    if bottleneck in ("start", "model"):
        return None
    if bottleneck in ("pipeline", "transforms", "storage") or (bottleneck == "dataset" and workers):
        return stats.throughput if stats.waited_batches > 0.9 else None
    alone = (stats.throughput or 0.0) / stats.waited_share
    return None if clock.input_kind and stats.waited_share < 0.9 else alone  # DALI may need the time between batches


def _describe(stats: Stats, clock: Clock, num_workers: int | None, has_cache: bool, idle: str) -> str:
    """Return the sentence for an epoch. ``idle`` says why nothing runs in DALI, or is empty."""
    assert stats.throughput is not None
    if stats.bottleneck == "start":
        start = stats.start or 0.0
        total = start + _measure_seconds_after_first(stats)
        digits = 1 if total >= 1 else 3
        return (
            f"the start is the bottleneck: {start:,.{digits}f} of {total:,.{digits}f} s passed before the first batch"
        )
    if stats.bottleneck == "model":
        return describe_model(stats.throughput, stats.possible) + idle
    text = _describe_bottleneck(stats, clock, num_workers, has_cache, idle)
    return f"{text}; the training loop waited {stats.waited_share:.0%} of the time"


def _describe_bottleneck(stats: Stats, clock: Clock, num_workers: int | None, has_cache: bool, idle: str) -> str:
    bottleneck, parts = stats.bottleneck, _wait_by_part(stats)
    if stats.probe and bottleneck == stats.probe.in_dali:
        return _describe_dali(stats.probe)
    if bottleneck in ("pipeline", "transforms"):
        can_probe = num_workers is None and not has_cache and bottleneck == "pipeline"
        hint = "; stats(probe=True) tells which of them" if can_probe else ""
        return f"{_IN_DALI[clock.input_kind or InputKind.FILES]} the bottleneck{hint}"
    seconds = next(x for part, x in parts.items() if HOST[part] == bottleneck) / stats.timed
    takes = _format_share(seconds, (stats.waited + stats.consumer) / stats.timed)
    if bottleneck == "dataset":
        where = (
            f"in {format_count(num_workers, 'worker', 'workers')}" if num_workers else "in this process (num_workers=0)"
        )
        subject = f"the dataset's own __getitem__ {where} is the bottleneck"
        return f"{subject}: waiting for it takes {takes}{idle}"
    if bottleneck == "storage" and has_cache:
        return f"storage is the bottleneck: reading files for the cache, or looking whether they changed, takes {takes}"
    return f"{_describe_thread(bottleneck, clock.steps)} {takes}"


def _describe_thread(bottleneck: Bottleneck, steps: Sequence[Step]) -> str:
    """Return the start of the sentence for work in the iterating thread. The time follows."""
    torch_steps = [step for step in steps if step.library == "torch"]
    if bottleneck == "torch" and torch_steps:
        single = [step for step in torch_steps if "for each sample" in step.note]
        how = "sample by sample" if single else "on whole batches"
        names = [f"{type(step.transform).__name__} at position {step.position}" for step in (single or torch_steps)[:1]]
        more = f" and {len(torch_steps) - 1} more" if len(torch_steps) > 1 else ""
        return f"transforms that run in torch, {how}, are the bottleneck: {''.join(names)}{more} take"
    return {
        "torch": "transforms that run in torch, which explain() names, are the bottleneck: they take",
        "storage": "storage is the bottleneck: reading the headers of files that were not known yet takes",
        "host": "the iterating thread is the bottleneck: drawing parameters and feeding DALI takes",
        "sampler": "the sampler is the bottleneck: asking it for indices takes",
        "collate": "the iterating thread is the bottleneck: targets and collate_fn take",
    }.get(bottleneck, f"{bottleneck} is the bottleneck: it takes")


def _describe_dali(probe: Probe) -> str:
    text, seconds = {
        "storage": ("storage is the bottleneck: reading takes", probe.read),
        "decoding": ("decoding is the bottleneck: it takes", probe.decode),
    }.get(probe.in_dali, ("the transforms in DALI are the bottleneck: they take", probe.transforms))
    return f"{text} {_format_share(seconds or 0.0, probe.together)}"


def describe_alone(probe: Probe, steps: Sequence[Step] = ()) -> str:
    """Return the sentence for the bottleneck of the loader alone."""
    if probe.bottleneck == probe.in_dali:
        return _describe_dali(probe)
    seconds = next(x for part, x in probe.parts.items() if HOST[part] == probe.bottleneck)
    return f"{_describe_thread(probe.bottleneck, steps)} {_format_share(seconds, probe.together)}"
