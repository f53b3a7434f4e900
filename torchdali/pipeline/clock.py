"""Measure the time of an epoch and its parts, at almost no cost.

On the CPU the training loop waits as long as ``next()`` takes. On a GPU that is not so: the host may wait while the GPU
still has work, and the GPU may be idle while the host does not wait. There the clock records an event on torch's
current stream when a batch is requested, and another when it is yielded. The time between the two, on the GPU's clock,
is the time for which the stream was idle. It is read some batches later, so that the host never waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch

from torchdali.runtime import devices
from torchdali.runtime.events import Event
from torchdali.transforms.spec import InputKind

__all__ = ["WAIT_THRESHOLD", "Clock", "Part", "Timed"]

Part = Literal["dataset", "sampler", "headers", "feed", "DALI", "torch", "collate", "batch_transform"]
"""A part of the host's work in ``next()``. "dataset": wait for samples, or request them if there are no workers.
"sampler": request indices. "headers": wait for headers of files, or for files that a cache keeps. "feed": draw
parameters and feed DALI. "DALI": wait for it. "torch": transforms without a rule. "collate": targets, ``collate_fn``,
and copies of everything but images."""

WAIT_THRESHOLD = 0.1
"""If the training loop waits for a larger share of the time, the loader is the bottleneck, and not the model."""

_MAX_WAITS = 10_000
_ENOUGH = 16
"""Number of batches whose times tell what the rest of an epoch will be like."""


@dataclass
class Timed:
    """The batches after an epoch's first, timed on the host or on the GPU's stream, where the training loop runs.

    Attributes:
        batches: Their number.
        images: The number of their images.
        waited: Seconds for which the loop waited for them.
        consumer: Seconds from each batch to the request for the next.
        noticed: Number of batches for which the loop waited more than a tenth of the time since the batch before.
        longest: The longest wait, in seconds.
        waits: The latest 10,000 waits, in seconds.
    """

    batches: int = 0
    images: int = 0
    waited: float = 0.0
    consumer: float = 0.0
    noticed: int = 0
    longest: float = 0.0
    waits: deque[float] = field(default_factory=lambda: deque[float](maxlen=_MAX_WAITS))

    def add(self, consumer: float, waited: float, images: int) -> None:
        """Add a batch."""
        self.batches += 1
        self.images += images
        self.waited += waited
        self.consumer += consumer
        self.noticed += waited > WAIT_THRESHOLD * (waited + consumer)
        self.longest = max(self.longest, waited)
        self.waits.append(waited)


class Clock:
    """The times of one epoch. Only the thread that iterates may use it.

    Args:
        device: Where batches are made.

    Attributes:
        batches: Number of batches that were yielded.
        images: Number of their images.
        num_batches: Number of batches that the epoch has, or its rest if it was resumed; None if that is not known.
        start: Seconds until the first batch; None before it.
        elapsed: Seconds until the latest batch.
        over: Whether the epoch was iterated to its end.
        timed: The batches after the first.
        parts: Seconds that the host spent in ``next()`` for the batches after the first, by part.
        steps: The chain of transforms, as compiled.
        input_kind: How samples are fed to DALI; None before the first.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._began = self._lapped = self._entered = perf_counter()
        self._last_yield: float | None = None
        self._inside = self._starved = False
        # When the latest batch was yielded, and when the next was requested.
        self._events: tuple[Event | None, Event | None] = (None, None)
        self._unread: deque[tuple[Event, Event, Event, int, dict[Part, float]]] = deque()
        self._spare: list[Event] = []
        self.batches = self.images = 0
        self.num_batches: int | None = None
        self.start: float | None = None
        self.elapsed = 0.0
        self.finished = False
        self.timed = Timed()
        self.parts: dict[Part, float] = {}
        self._laps: dict[Part, float] = {}
        self.steps: tuple[Any, ...] = ()
        self.input_kind: InputKind | None = None

    def enter(self, starved: bool = False) -> None:
        """Start the time of a batch that was requested.

        Args:
            starved: Whether DALI is idle because the dataset gave no samples. Then the wait for DALI counts as a wait
                for the dataset.
        """
        if self._inside:  # the batch before raised an exception
            self.skip(perf_counter() - self._lapped)
        self._inside, self._starved = True, starved
        self._laps = {}
        self._entered = self._lapped = perf_counter()
        if self._gpu:
            self._events = (self._events[0], self._record(self._gpu))

    def lap(self, part: Part) -> None:
        """Count the time since the latest lap for a part."""
        now = perf_counter()
        if part == "DALI" and self._starved:
            part = "dataset"
        self._laps[part] = self._laps.get(part, 0.0) + now - self._lapped
        self._lapped = now

    def leave(self, images: int) -> None:
        """End the time of a batch, because it is yielded."""
        self.lap("collate")
        now = self._lapped
        self._inside = False
        self.batches += 1
        self.images += images
        self.elapsed = now - self._began
        if self.start is None:
            self.start = self.elapsed
        if self._gpu:
            before, requested = self._events
            yielded = self._record(self._gpu)
            if before and requested:
                self._unread.append((before, requested, yielded, images, self._laps))
            self._events = (yielded, None)
            self.read()
        elif self._last_yield is not None:
            self._add(self._entered - self._last_yield, now - self._entered, images, self._laps)
        self._last_yield = now

    def end(self) -> None:
        """End the epoch's time."""
        self.finished, self._inside = True, False

    def skip(self, seconds: float = 0.0) -> None:
        """Do not count the time since the latest batch, nor some seconds of the epoch."""
        self._last_yield, self._events = None, (None, None)
        self._began += seconds
        self._lapped += seconds

    @property
    def waits_for_dali(self) -> bool:
        """Whether the training loop waited most of the time, and the host waited for DALI a quarter of it."""
        times, in_dali = self.timed, self.parts.get("DALI", 0.0)
        is_waiting = times.batches >= _ENOUGH and times.waited > times.consumer
        return is_waiting and 4 * in_dali > times.waited + times.consumer

    @property
    def expected_wait(self) -> float:
        """The seconds for which the training loop will have waited at the end of the epoch, if it goes on like this."""
        left = max(0, (self.num_batches or 0) - self.batches)
        return self.timed.waited * (1 + left / max(1, self.timed.batches))

    @property
    def is_loop_slower(self) -> bool:
        """Whether the training loop took most of the time."""
        return self.timed.batches >= _ENOUGH and self.timed.waited < self.timed.consumer

    @property
    def is_behind(self) -> bool:
        """Whether a batch was yielded whose events the GPU has not reached yet."""
        return bool(self._unread)

    def read(self) -> None:
        """Read the events that the GPU has reached by now."""
        if not self._unread or self._gpu is None:
            return
        with devices.use(self._gpu):
            self._read()

    def _read(self) -> None:
        while self._unread and self._unread[0][2].query():
            before, requested, yielded, images, laps = self._unread.popleft()
            self._add(before.elapsed_time(requested) / 1e3, requested.elapsed_time(yielded) / 1e3, images, laps)
            self._spare += before, requested

    def _add(self, consumer: float, waited: float, images: int, laps: dict[Part, float]) -> None:
        self.timed.add(consumer, waited, images)
        for part, seconds in laps.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    def _record(self, device: torch.device) -> Event:
        event = self._spare.pop() if self._spare else Event(enable_timing=True)
        with devices.use(device):
            event.record(torch.cuda.current_stream(device))
        return event
