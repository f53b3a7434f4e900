"""What an epoch's times mean: what is the bottleneck, and one sentence that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from torchdali.loader.stats import HOST, Bottleneck, Probe, Stats, milliseconds
from torchdali.pipeline.clock import WAIT_THRESHOLD, Clock, Part
from torchdali.pipeline.plan import Step
from torchdali.transforms.spec import InputKind

__all__ = ["UNMEASURED", "decoding", "diagnose", "model", "storage", "transforms"]

_FEW = 8
_IN_DALI = {
    InputKind.FILES: "reading, decoding and transforming in DALI is",
    InputKind.ENCODED: "decoding and transforming in DALI is",
    InputKind.PIXELS: "DALI, whose only work is the transforms, is",
    InputKind.PACKED: "DALI, which transforms what is in the cache, and decodes what is not yet, is",
}


class _Loader(NamedTuple):
    """What a sentence says of the loader besides.

    Attributes:
        cached: Whether it has a cache, and can be probed no more.
        given: Whether it has a ``transform=``.
    """

    cached: bool = False
    given: bool = False

    def nothing(self, clock: Clock) -> str:
        """That nothing runs in DALI, where it is so."""
        if clock.input_kind:
            return ""
        return "; transform= found no image" if self.given else "; without transform= nothing runs in DALI"


UNMEASURED = Stats(
    bottleneck="not measured",
    verdict="nothing is measured: on the CPU, without transform= and batch_transform=, a dataset that is asked for "
    "samples is DataLoader's affair alone, and DALI does nothing for it",
)


def model(taken: float, possible: float | None) -> str:
    """The sentence for a training step that the loader keeps up with, from images/s taken and possible."""
    if possible is None:
        return f"your model is the bottleneck: it takes {taken:,.0f} images/s, and a faster loader would change nothing"
    used = f"{min(taken, possible):,.0f} of {possible:,.0f} images/s used"
    return f"your model is the bottleneck: {used}, and a faster loader would change nothing"


def storage(part: float, whole: float) -> str:
    """The sentence for files that come slowly, from the seconds of reading, and of all, for each batch."""
    return f"storage is the bottleneck: reading takes {_of(part, whole)}"


def decoding(part: float, whole: float) -> str:
    """The sentence for images that are decoded slowly, from the seconds of decoding, and of all, for each batch."""
    return f"decoding is the bottleneck: it takes {_of(part, whole)}"


def transforms(part: float, whole: float) -> str:
    """The sentence for transforms in DALI, from their seconds, and those of all, for each batch."""
    return f"the transforms in DALI are the bottleneck: they take {_of(part, whole)}"


def _of(part: float, whole: float) -> str:
    return f"{milliseconds(min(part, whole))} of {milliseconds(whole)} ms a batch"


def diagnose(
    clock: Clock | None,
    probe: Probe | None,
    asked: int | None,
    steps: Sequence[Step] = (),
    *,
    cached: bool = False,
    given: bool = False,
) -> Stats:
    """What an epoch's clock says.

    Args:
        clock: The epoch's; None before the first one.
        probe: What was measured beside it.
        asked: How many workers ask the dataset for samples, 0 where the iterating thread does; None where nobody does.
        steps: The chain of transforms, where there was no epoch.
        cached: Whether the loader has a cache, and can be probed no more.
        given: Whether there is a ``transform=``.
    """
    if clock is None or clock.start is None:
        if probe is None:
            return Stats(verdict="the epoch had no batch") if clock and clock.over else Stats()
        verdict = f"{_at_best(probe, steps)}; {probe.rate:,.0f} images/s are possible"
        return Stats(possible=probe.rate, probe=probe, bottleneck=probe.bottleneck, verdict=verdict)
    stats = _measured(clock, probe)
    if not stats.timed:
        said = "one batch was handed out, and nothing can be said before the second"
        if stats.batches > 1:
            said = "no batch followed another one, without an exception between, and nothing can be said"
        if clock.behind:
            said = "the GPU has not come to the second batch yet, and nothing can be said before"
        return replace(stats, verdict=said)
    bottleneck = _find_bottleneck(stats, clock)
    stats = replace(
        stats, bottleneck=bottleneck, possible=probe.rate if probe else _possible(stats, clock, bottleneck, bool(asked))
    )
    few = f" (of {_number(stats.timed, 'batch', 'batches')} only)" if stats.timed < _FEW else ""
    return replace(stats, verdict=_sentence(stats, clock, asked, _Loader(cached, given)) + few)


def _number(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _measured(clock: Clock, probe: Probe | None) -> Stats:
    clock.read()
    timed = clock.timed
    time = timed.waited + timed.consumer
    p50, p99 = np.quantile(timed.waits, [0.5, 0.99]).tolist() if timed.waits else (0.0, 0.0)
    return Stats(
        batches=clock.batches,
        images=clock.images,
        over=clock.over,
        elapsed=clock.elapsed,
        start=clock.start,
        taken=timed.images / time if time else None,
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
    if stats.over and (stats.start or 0.0) > _rest(stats):
        return "start"
    if stats.waited_share < WAIT_THRESHOLD:
        return "model"
    parts = _work(stats)
    bottleneck = HOST[max(parts, key=parts.__getitem__)]
    if bottleneck == "pipeline" and clock.input_kind is InputKind.PIXELS:
        return "transforms"
    return stats.probe.in_dali if bottleneck == "pipeline" and stats.probe else bottleneck


def _rest(stats: Stats) -> float:
    """The time after the first batch, in seconds; a GPU may be at work long after the host's."""
    return (stats.waited + stats.consumer) / stats.timed * (stats.batches - 1)


def _work(stats: Stats) -> dict[Part, float]:
    """What the training loop waited for; on a GPU it may wait for DALI when the host does not."""
    parts = dict(stats.parts)
    own = sum(seconds for part, seconds in parts.items() if part != "DALI")
    parts["DALI"] = max(parts.get("DALI", 0.0), stats.waited - own)
    return parts


def _possible(stats: Stats, clock: Clock, bottleneck: Bottleneck, workers: bool) -> float | None:
    """Images/s, where the loader shows what it can do: what runs beside the training loop does when it always waits."""
    if bottleneck in ("start", "model"):
        return None
    if bottleneck in ("pipeline", "transforms", "storage") or (bottleneck == "dataset" and workers):
        return stats.taken if stats.waited_batches > 0.9 else None
    alone = (stats.taken or 0.0) / stats.waited_share
    return None if clock.input_kind and stats.waited_share < 0.9 else alone  # DALI may need the time between batches


def _sentence(stats: Stats, clock: Clock, asked: int | None, loader: _Loader) -> str:
    assert stats.taken is not None
    if stats.bottleneck == "start":
        start = stats.start or 0.0
        whole = start + _rest(stats)
        digits = 1 if whole >= 1 else 3
        return (
            f"the start is the bottleneck: {start:,.{digits}f} of {whole:,.{digits}f} s passed before the first batch"
        )
    if stats.bottleneck == "model":
        return model(stats.taken, stats.possible) + loader.nothing(clock)
    return f"{_naming(stats, clock, asked, loader)}; the training loop waited {stats.waited_share:.0%} of the time"


def _naming(stats: Stats, clock: Clock, asked: int | None, loader: _Loader) -> str:
    bottleneck, parts = stats.bottleneck, _work(stats)
    if stats.probe and bottleneck == stats.probe.in_dali:
        return _in_dali(stats.probe)
    if bottleneck in ("pipeline", "transforms"):
        probed = asked is None and not loader.cached and bottleneck == "pipeline"
        hint = "; stats(probe=True) tells which of them" if probed else ""
        return f"{_IN_DALI[clock.input_kind or InputKind.FILES]} the bottleneck{hint}"
    seconds = next(x for part, x in parts.items() if HOST[part] == bottleneck) / stats.timed
    takes = _of(seconds, (stats.waited + stats.consumer) / stats.timed)
    if bottleneck == "dataset":
        where = f"in {_number(asked, 'worker', 'workers')}" if asked else "in this process (num_workers=0)"
        named = f"the dataset's own __getitem__ {where} is the bottleneck"
        return f"{named}: waiting for it takes {takes}{loader.nothing(clock)}"
    if bottleneck == "storage" and loader.cached:
        return f"storage is the bottleneck: reading files for the cache, or looking whether they changed, takes {takes}"
    return f"{_in_thread(bottleneck, clock.steps)} {takes}"


def _in_thread(bottleneck: Bottleneck, steps: Sequence[Step]) -> str:
    """What the iterating thread does."""
    if bottleneck == "torch":
        found = [step for step in steps if step.where == "torch"]
        single = [step for step in found if "for each sample" in step.note]
        how = "sample by sample" if single else "on whole batches"
        named = [f"{type(step.transform).__name__} at position {step.position}" for step in (single or found)[:1]]
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return f"transforms that run in torch, {how}, are the bottleneck: {''.join(named)}{more} take"
    return {
        "storage": "storage is the bottleneck: reading the headers of files that were not known yet takes",
        "host": "the iterating thread is the bottleneck: drawing parameters and feeding DALI takes",
        "sampler": "the sampler is the bottleneck: asking it for indices takes",
        "collate": "the iterating thread is the bottleneck: targets and collate_fn take",
    }.get(bottleneck, f"{bottleneck} is the bottleneck: it takes")


def _in_dali(probe: Probe) -> str:
    if probe.in_dali == "storage":
        return storage(probe.read or 0.0, probe.together)
    if probe.in_dali == "decoding":
        return decoding(probe.decode or 0.0, probe.together)
    return transforms(probe.transforms, probe.together)


def _at_best(probe: Probe, steps: Sequence[Step]) -> str:
    """What is the bottleneck of the loader alone."""
    if probe.bottleneck == probe.in_dali:
        return _in_dali(probe)
    seconds = next(x for part, x in probe.parts.items() if HOST[part] == probe.bottleneck)
    return f"{_in_thread(probe.bottleneck, steps)} {_of(seconds, probe.together)}"
