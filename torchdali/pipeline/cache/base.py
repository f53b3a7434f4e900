"""The base class of the caches, and the limit of their memory."""

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

__all__ = ["Cache", "FileCache", "Kind", "check_has_files", "choose_budget", "mib", "scan_patience"]

Kind = Literal["host", "device", "disk"]

_SHARE = 2
_PATIENCE = 0.001


class Cache(lifecycle.Resource, ABC):
    """A cache of files, objects or images, from one epoch to the next.

    Args:
        state: All options that the content depends on. A different state needs a new cache.
        budget: Maximum number of bytes. None is half of the memory that is free when the first epoch begins.
    """

    def __init__(self, state: object, budget: int | None) -> None:
        self.state, self._budget_option = state, budget
        self._lock = Lock()
        super().__init__()

    @abstractmethod
    def make_prefetcher(self, prefetch_depth: int, timeout: float, sampler: Any, clock: Clock) -> Prefetcher:
        """Return the prefetcher of one epoch, whose samples come from ``sampler``."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory."""

    @abstractmethod
    def describe(self) -> str:
        """Return what the cache holds, and how much of it, for ``explain()``."""

    def renew(self) -> None:
        """See :class:`torchdali.runtime.lifecycle.Resource`."""
        self._lock = Lock()


class FileCache(Cache):
    """A cache of files or of their images.

    Args:
        files: The files.
        state: As for :class:`Cache`.
        budget: As for :class:`Cache`.
    """

    def __init__(self, files: FileReader, state: object, budget: int | None) -> None:
        files.table.record_modified()
        self.files = files
        super().__init__(state, budget)

    def reuse(self, files: FileReader, state: object) -> bool:
        """Use these files from now on if they are the same files. Return whether they are."""
        if state != self.state or not files.share_headers(self.files):
            return False
        self.files = files
        return True

    def _describe_size(self, count: int, used: int, reserved: int, budget: int | None) -> str:
        """Return the size of the cache as text.

        Args:
            count: Number of samples in the cache.
            used: Bytes of these samples.
            reserved: Bytes of memory that the cache has allocated.
            budget: Maximum number of bytes; None if it is not known yet.
        """
        origin = (
            "cache_bytes"
            if self._budget_option is not None
            else "chosen: half of what was free when the first epoch began"
        )
        text = f"{count:,} of {len(self.files.source):,} samples, {mib(used)}"
        if reserved > used:
            text += f" in {mib(reserved)}"
        if budget is None:
            return f"{text}; at most half of what is free when the first epoch begins"
        return f"{text} of at most {mib(budget)} ({origin})"


def check_has_files(kind: Kind | None, source: Source | None, why_not_native: str) -> None:
    """Raise ValueError if a cache was asked for and the dataset has no files for it, or boxes that it cannot move.

    Args:
        kind: The loader's argument ``cache``.
        source: The loader's native source, or None.
        why_not_native: Why the dataset is not native, if it is not.
    """
    if kind == "disk" and source is not None and not source.is_remote:
        raise ValueError(
            "cache='disk' keeps what is fetched of object stores such as s3://, and the images of this dataset are "
            "files or in memory; leave it out"
        )
    if kind in ("host", "disk") and source is not None and source.is_remote:
        return
    if kind and (source is None or source.kind is not InputKind.FILES):
        lies = "lie in larger files" if source and source.kind is InputKind.ENCODED else "are in memory already"
        if source and source.is_remote:
            lies = "lie in an object store; cache='host' and cache='disk' keep them"
        why = why_not_native or f"its images {lies}"
        raise ValueError(
            f"cache={kind!r} keeps files by their path, size and time of modification, which only image folders "
            f"tell: {why}"
        )
    if kind == "device" and source is not None and source.annotations:
        raise ValueError(
            "cache must be None or 'host' for a dataset whose boxes, masks or key points move, got 'device', which "
            "keeps images after their first transforms"
        )


def scan_patience(timeout: float) -> float:
    """Return the seconds for which the iterating thread itself may check the files of a batch.

    With a time limit for batches it is 0, because a file on dead storage would block the thread.
    """
    return 0.0 if timeout else _PATIENCE


def choose_budget(device: torch.device) -> int:
    """Return the default size limit in bytes: half of the free memory."""
    return machine.free_memory(device) // _SHARE


def mib(count: int) -> str:
    """Return a number of bytes in MiB, as text."""
    return f"{count / 2**20:,.1f} MiB"
