"""What an epoch's time is spent on, from clock readings that cost next to nothing.

On the CPU the training loop waits as long as ``next()`` takes. On a GPU it does not: the host may wait while the GPU
still has work, and the host may go on while the GPU stands still. There an event is recorded on torch's current
stream when a batch is asked for and another when it is handed out. The time between the two, on the GPU's own clock,
is what the stream stood still for the batch; it is read some batches later, and nothing is ever waited for.
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
"""What the host does in ``next()``. "dataset": waits for samples, or asks for them where there are no workers.
"sampler": asks it for indices. "headers": waits for headers of files, or for files that are to be kept. "feed": draws
parameters, feeds DALI. "DALI": waits for it. "torch": transforms without a rule. "collate": targets, ``collate_fn``,
copies of what is not an image."""

WAIT_THRESHOLD = 0.1
"""The share of the time that the training loop may wait before the loader, and not the model, is the bottleneck."""

_KEPT = 10_000


@dataclass
class Timed:
    """The batches after an epoch's first, timed where the training loop is: on the host, or on the GPU's stream.

    Attributes:
        batches: How many.
        images: Their images.
        waited: Seconds that the loop waited for them.
        consumer: Seconds between the batches before them and the moments when they were asked for.
        noticed: The batches for which the loop waited more than a tenth of the time since the batch before.
        longest: The longest wait, in seconds.
        waits: Of the latest 10,000 each wait, in seconds.
    """

    batches: int = 0
    images: int = 0
    waited: float = 0.0
    consumer: float = 0.0
    noticed: int = 0
    longest: float = 0.0
    waits: deque[float] = field(default_factory=lambda: deque[float](maxlen=_KEPT))

    def add(self, consumer: float, waited: float, images: int) -> None:
        """One batch more."""
        self.batches += 1
        self.images += images
        self.waited += waited
        self.consumer += consumer
        self.noticed += waited > WAIT_THRESHOLD * (waited + consumer)
        self.longest = max(self.longest, waited)
        self.waits.append(waited)


class Clock:
    """The times of one epoch, whose thread alone may use it.

    Args:
        device: Where batches are made.

    Attributes:
        batches: Handed out.
        images: Handed out.
        start: Seconds until the first batch; None before it.
        elapsed: Seconds until the latest one.
        over: Whether the epoch was iterated to its end.
        timed: The batches after the first.
        parts: Seconds that the host spent in ``next()`` for these, by what it did.
        steps: The chain of transforms, as compiled.
        input_kind: What DALI is fed; None before anything was.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._began = self._lapped = self._entered = perf_counter()
        self._left: float | None = None
        self._inside = self._starved = False
        # Of the latest handing out, and of the asking since.
        self._events: tuple[Event | None, Event | None] = (None, None)
        self._unread: deque[tuple[Event, Event, Event, int, dict[Part, float]]] = deque()
        self._spare: list[Event] = []
        self.batches = self.images = 0
        self.start: float | None = None
        self.elapsed = 0.0
        self.over = False
        self.timed = Timed()
        self.parts: dict[Part, float] = {}
        self._laps: dict[Part, float] = {}
        self.steps: tuple[Any, ...] = ()
        self.input_kind: InputKind | None = None

    def enter(self, starved: bool = False) -> None:
        """A batch is asked for.

        Args:
            starved: Whether DALI has nothing to do because the dataset gave nothing: what is waited for DALI is then
                waited for the dataset.
        """
        if self._inside:  # the one before raised
            self.skip(perf_counter() - self._lapped)
        self._inside, self._starved = True, starved
        self._laps = {}
        self._entered = self._lapped = perf_counter()
        if self._gpu:
            self._events = (self._events[0], self._record(self._gpu))

    def lap(self, part: Part) -> None:
        """What the host did since the latest lap was this."""
        now = perf_counter()
        if part == "DALI" and self._starved:
            part = "dataset"
        self._laps[part] = self._laps.get(part, 0.0) + now - self._lapped
        self._lapped = now

    def leave(self, images: int) -> None:
        """A batch is handed out."""
        self.lap("collate")
        now = self._lapped
        self._inside = False
        self.batches += 1
        self.images += images
        self.elapsed = now - self._began
        if self.start is None:
            self.start = self.elapsed
        if self._gpu:
            before, asked = self._events
            handed_out = self._record(self._gpu)
            if before and asked:
                self._unread.append((before, asked, handed_out, images, self._laps))
            self._events = (handed_out, None)
            self.read()
        elif self._left is not None:
            self._add(self._entered - self._left, now - self._entered, images, self._laps)
        self._left = now

    def end(self) -> None:
        """There is no batch any more."""
        self.over, self._inside = True, False

    def skip(self, seconds: float = 0.0) -> None:
        """The time since the latest batch is nobody's, nor are as many seconds of the epoch's."""
        self._left, self._events = None, (None, None)
        self._began += seconds
        self._lapped += seconds

    @property
    def behind(self) -> bool:
        """Whether a batch was handed out whose time the GPU has not reached yet."""
        return bool(self._unread)

    def read(self) -> None:
        """Takes the times that the GPU has reached by now."""
        if not self._unread or self._gpu is None:
            return
        with devices.on(self._gpu):
            self._read()

    def _read(self) -> None:
        while self._unread and self._unread[0][2].query():
            before, asked, handed_out, images, laps = self._unread.popleft()
            self._add(before.elapsed_time(asked) / 1e3, asked.elapsed_time(handed_out) / 1e3, images, laps)
            self._spare += before, asked

    def _add(self, consumer: float, waited: float, images: int, laps: dict[Part, float]) -> None:
        self.timed.add(consumer, waited, images)
        for part, seconds in laps.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    def _record(self, device: torch.device) -> Event:
        event = self._spare.pop() if self._spare else Event(enable_timing=True)
        with devices.on(device):
            event.record(torch.cuda.current_stream(device))
        return event
