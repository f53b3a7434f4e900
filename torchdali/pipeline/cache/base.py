"""Memory for what was read or decoded before: what all caches have in common, and how much they may take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import Lock
from typing import Any, Literal

import torch

from torchdali.pipeline.clock import Clock
from torchdali.pipeline.feed import Prefetcher
from torchdali.pipeline.readers import FileReader
from torchdali.runtime import lifecycle, machine
from torchdali.sources import InputKind, Source

__all__ = ["Cache", "Kind", "check_has_files", "half_of_free", "patience"]

Kind = Literal["host", "device"]

_SHARE = 2
_PATIENCE = 0.001


class Cache(lifecycle.Resource, ABC):
    """What a loader keeps of its files from one epoch to the next.

    Args:
        files: The files.
        state: What the kept depends on; another state needs another cache.
        budget: Bytes that it may take; None takes half of what is free when the first epoch begins.
    """

    def __init__(self, files: FileReader, state: object, budget: int | None) -> None:
        files.table.keep_modified()
        self.files, self.state, self._budget_option = files, state, budget
        self._lock = Lock()
        super().__init__()

    def serves(self, files: FileReader, state: object) -> bool:
        """Whether it can go on with these files, because they are the same."""
        if state != self.state or not files.share_headers(self.files):
            return False
        self.files = files
        return True

    @abstractmethod
    def feed(self, prefetch_depth: int, timeout: float, sampler: Any, clock: Clock) -> Prefetcher:
        """The batches of one epoch, whose samples come from ``sampler``."""

    @abstractmethod
    def close(self) -> None:
        """Frees all memory."""

    @abstractmethod
    def describe(self) -> str:
        """What is kept, and how much of it, for ``explain()``."""

    def renew(self) -> None:
        """As of :class:`torchdali.runtime.lifecycle.Resource`."""
        self._lock = Lock()

    def _describe_size(self, kept: int, used: int, held: int, budget: int | None) -> str:
        """How much is kept: samples, bytes of them, bytes taken for them, and the most that may be."""
        how = (
            "cache_bytes"
            if self._budget_option is not None
            else "chosen: half of what was free when the first epoch began"
        )
        text = f"{kept:,} of {len(self.files.source):,} samples, {mib(used)}"
        if held > used:
            text += f" in {mib(held)}"
        if budget is None:
            return f"{text}; at most half of what is free when the first epoch begins"
        return f"{text} of at most {mib(budget)} ({how})"


def check_has_files(kind: Kind | None, source: Source | None, why_not_native: str) -> None:
    """Raise ValueError if there is a cache, and no files for it.

    Args:
        kind: The loader's argument ``cache``.
        source: The loader's native source, if there is one.
        why_not_native: Why there is none.
    """
    if kind and (source is None or source.kind is not InputKind.FILES):
        why = why_not_native or "its images are in memory already"
        raise ValueError(
            f"cache={kind!r} keeps files by their path, size and time of modification, which only image folders "
            f"tell: {why}"
        )


def patience(timeout: float) -> float:
    """Seconds that the thread that iterates looks itself whether the files of a batch are what they were.

    Where a batch has a time limit it does not: a file that never answers would hold it.
    """
    return 0.0 if timeout else _PATIENCE


def half_of_free(device: torch.device) -> int:
    """Bytes that a cache may take by default: half of what is free now."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.available_memory()
    return free // _SHARE


def mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
