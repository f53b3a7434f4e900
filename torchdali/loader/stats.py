"""The result of ``loader.stats()``: the times of an epoch and of a probe. ``verdict.py`` interprets them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchdali.pipeline.clock import Part
from torchdali.runtime.columns import LABEL, make_table, wrap_columns

__all__ = ["HOST", "Bottleneck", "Probe", "Stats", "milliseconds"]

Bottleneck = Literal[
    "nothing yet",
    "not measured",
    "start",
    "model",
    "storage",
    "decoding",
    "transforms",
    "pipeline",
    "torch",
    "collate",
    "batch_transform",
    "host",
    "sampler",
    "dataset",
]
"""The bottleneck that a verdict names. "pipeline": storage, decoding or transforms, and only a probe can tell which.
"transforms": those in DALI. "torch": transforms in torch. "host": drawing parameters and feeding DALI. "sampler":
requesting indices. "dataset": its ``__getitem__``."""

HOST: dict[Part, Bottleneck] = {
    "dataset": "dataset",
    "sampler": "sampler",
    "headers": "storage",
    "feed": "host",
    "DALI": "pipeline",
    "torch": "torch",
    "collate": "collate",
    "batch_transform": "batch_transform",
}
"""The bottleneck if most of the wait is for this part."""


_TO_DO: dict[Bottleneck, str] = {
    "start": "train longer in each epoch; the first one also builds the pipeline",
    "storage": 'use a faster disk, cache="host", or more num_workers',
    "decoding": "store smaller images; on the CPU use more cores",
    "transforms": 'use fewer or cheaper transforms, or fidelity="fast"; on the CPU more cores',
    "torch": "replace these transforms, or write a rule for them (docs/adding_a_transform.md)",
    "collate": "leave collate_fn out if it only stacks the samples; make targets in advance",
    "batch_transform": "make batch_transform cheaper",
    "host": "use larger batches",
    "sampler": "use a sampler that has its indices ready",
    "dataset": "use more num_workers; return paths or encoded bytes, and give the transforms to transform=",
}
"""What helps against a bottleneck. The verdict says it for the others."""


def format_count(count: int, singular: str, plural: str) -> str:
    """Return a number and its noun."""
    return f"{count:,} {singular if count == 1 else plural}"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with three digits and at most two after the point."""
    number = seconds * 1e3
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


@dataclass(frozen=True)
class Probe:
    """The speed of the loader alone, with the plan, threads and prefetch depth of an epoch.

    Times are seconds for each batch, with several batches in flight.

    Attributes:
        images: Number of images in a batch.
        read: Reading the files alone; None if there are none.
        decode: Decoding files in memory alone; None if nothing is decoded.
        transforms: The transforms in DALI alone.
        together: Everything as in an epoch, also the work of the iterating thread.
        parts: The part of this that the iterating thread spends on each kind of work.
        overlapping: Whether reading, decoding and transforms run at once, on separate engines. Else they share cores.
    """

    images: int
    read: float | None
    decode: float | None
    transforms: float
    together: float
    parts: Mapping[Part, float]
    overlapping: bool

    @property
    def rate(self) -> float:
        """Images/s that the loader can deliver."""
        return self.images / self.together

    @property
    def bottleneck(self) -> Bottleneck:
        """The part that keeps it from delivering more."""
        host: dict[Part, float] = {part: x for part, x in self.parts.items() if part not in ("DALI", "headers")}
        alone = (self.read or 0.0, self.decode or 0.0, self.transforms)
        if sum(host.values()) > (max(alone) if self.overlapping else sum(alone)):
            return HOST[max(host, key=host.__getitem__)]
        return self.in_dali

    @property
    def in_dali(self) -> Bottleneck:
        """The slowest of reading, decoding and transforming."""
        each: dict[Bottleneck, float] = {
            "storage": self.read or 0.0,
            "decoding": self.decode or 0.0,
            "transforms": self.transforms,
        }
        return max(each, key=each.__getitem__)


@dataclass(frozen=True, repr=False)
class Stats:
    """The times of one epoch, so far or in all. ``str`` returns lines that begin with the verdict.

    Waits do not include the first batch, whose time is ``start``. On a GPU a wait is the time for which torch's current
    stream was idle before a batch. On the CPU it is the time that ``next()`` took.

    Attributes:
        batches: Number of batches that were yielded.
        images: Number of their images.
        finished: Whether the epoch was iterated to its end.
        elapsed: Seconds from ``iter()`` to the latest batch.
        start: Seconds from ``iter()`` to the first batch; None before it.
        throughput: Images/s that the training loop took, after the first batch; None before the second.
        possible: Images/s that the loader could deliver; None if only a probe could tell.
        timed: Number of batches that the attributes below are about.
        waited: Seconds for which the training loop waited.
        waited_p50: Median wait for a batch, in seconds, of the latest 10,000 batches.
        waited_p99: The wait, in seconds, that 99 of 100 of these batches stay below.
        waited_max: The longest wait, in seconds.
        waited_share: ``waited`` as a share of the time.
        waited_batches: The share of batches for which the loop waited more than a tenth of the batch's whole time.
        consumer: Seconds that the training loop spent between its batches.
        parts: Seconds that the iterating thread spent in ``next()``, by part. On a GPU it may wait while the training
            loop does not.
        probe: The result of the probe, if there was one.
        bottleneck: The bottleneck that the verdict names.
        verdict: The verdict, one sentence.
    """

    batches: int = 0
    images: int = 0
    finished: bool = False
    elapsed: float = 0.0
    start: float | None = None
    throughput: float | None = None
    possible: float | None = None
    timed: int = 0
    waited: float = 0.0
    waited_p50: float = 0.0
    waited_p99: float = 0.0
    waited_max: float = 0.0
    waited_share: float = 0.0
    waited_batches: float = 0.0
    consumer: float = 0.0
    parts: Mapping[Part, float] = field(default_factory=dict[Part, float])
    probe: Probe | None = None
    bottleneck: Bottleneck = "nothing yet"
    verdict: str = "no batch was handed out yet"

    @property
    def limit(self) -> Bottleneck:
        """Return ``bottleneck`` under its former name. Deprecated: it will be removed in the next release."""
        warnings.warn("Stats.limit is deprecated; use Stats.bottleneck", DeprecationWarning, stacklevel=2)
        return self.bottleneck

    @property
    def taken(self) -> float | None:
        """Return ``throughput`` under its former name. Deprecated: it will be removed in the next release."""
        warnings.warn("Stats.taken is deprecated; use Stats.throughput", DeprecationWarning, stacklevel=2)
        return self.throughput

    @property
    def over(self) -> bool:
        """Return ``finished`` under its former name. Deprecated: it will be removed in the next release."""
        warnings.warn("Stats.over is deprecated; use Stats.finished", DeprecationWarning, stacklevel=2)
        return self.finished

    def __str__(self) -> str:
        return wrap_columns(f"{'verdict':<{LABEL}}{self.verdict}\n{self._lines}").rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return make_table(self.verdict, self._lines)

    @property
    def _lines(self) -> str:
        return "\n".join(f"{label:<{LABEL}}{row}" for label, row in self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("to do", _TO_DO[self.bottleneck])] if self.bottleneck in _TO_DO else []
        if self.start is not None:
            state = "in all" if self.finished else "so far"
            images = format_count(self.images, "image", "images")
            rows += [
                (
                    "epoch",
                    f"{format_count(self.batches, 'batch', 'batches')} with {images} in {self.elapsed:,.1f} s {state}",
                ),
                ("start", f"{self.start:,.2f} s until the first batch"),
            ]
        if self.throughput is not None:
            possible = "" if self.possible is None else f"; {self.possible:,.0f} images/s possible"
            waits = {"median": self.waited_p50, "p99": self.waited_p99, "longest": self.waited_max}
            each = ", ".join(f"{name} {milliseconds(x)}" for name, x in waits.items()) + " ms"
            parts = ", ".join(f"{part} {milliseconds(x / self.timed)}" for part in HOST if (x := self.parts.get(part)))
            rows += [
                ("throughput", f"{self.throughput:,.0f} images/s{possible}"),
                ("waiting", f"{self.waited:,.2f} s, {self.waited_share:.1%} of the time: {each}"),
                ("", f"noticeably for {self.waited_batches:.1%} of the batches"),
                ("step", f"{milliseconds(self.consumer / self.timed)} ms a batch in the training step"),
                ("loader", f"{parts} ms a batch in next(), on the iterating thread"),
            ]
        elif self.possible is not None:
            rows.append(("throughput", f"{self.possible:,.0f} images/s possible"))
        if self.probe is not None:
            alone = {"read": self.probe.read, "decode": self.probe.decode, "transforms": self.probe.transforms}
            each = ", ".join(f"{name} {milliseconds(x)}" for name, x in alone.items() if x is not None)
            rows.append(("probe", f"each alone: {each}; together {milliseconds(self.probe.together)} ms a batch"))
        return rows
