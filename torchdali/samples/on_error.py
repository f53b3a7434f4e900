"""Policy for samples that cannot be read or decoded, and the count of them."""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import PIL.Image

from torchdali.errors import SampleError
from torchdali.transforms import SampleTransformError

__all__ = ["BLACK_IMAGE", "SIZE", "ErrorPolicy", "OnError", "TargetError", "find_substitutes", "limit_size"]

OnError = Literal["raise", "skip", "replace"]

BLACK_IMAGE = "a black image"
"""What ``"replace"`` puts in the place of most samples, for messages."""

SIZE = 256, 256
"""Height and width of a black image where nothing tells them."""

_LONGEST = 2**20
"""The longest side of a black image that DALI decodes."""

_log = logging.getLogger("torchdali")


def limit_size(size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the size if a black image may have it. Return None if PIL would not decode an image of that size."""
    max_pixels = PIL.Image.MAX_IMAGE_PIXELS
    if not size or not 0 < min(size) <= max(size) <= _LONGEST:
        return None
    return size if not max_pixels or size[0] * size[1] <= max_pixels else None


def find_substitutes(bad: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    """Return ``(N,)`` for each position itself, or the next good position. Return None if all are bad.

    Args:
        bad: ``(N,)`` whether a position is bad. The first position follows the last.
    """
    good = np.flatnonzero(~bad)
    return good[np.searchsorted(good, np.arange(len(bad))) % len(good)] if len(good) else None


class TargetError(SampleError):
    """The target of a sample cannot be read. So no black image can take the sample's place."""


class ErrorPolicy:
    """The arguments ``on_error`` and ``max_errors`` of :class:`torchdali.DALILoader`, and the bad samples so far.

    Args:
        mode: ``on_error``.
        limit: ``max_errors``. None means no limit.

    Attributes:
        errors: One for each bad sample, in the order of discovery.
    """

    def __init__(self, mode: OnError, limit: int | None) -> None:
        self.mode: OnError = mode
        self.limit = None if limit is None else int(limit)
        self.errors: list[SampleError] = []
        self._recorded: set[tuple[Any, str]] = set()

    def __bool__(self) -> bool:
        return self.mode != "raise"

    def is_bad_sample(self, error: Exception) -> bool:
        """Return whether the error is about a sample that cannot be read or decoded, and another can take its place."""
        return (
            self.mode != "raise"
            and isinstance(error, SampleError)
            and not isinstance(error.__cause__, SampleTransformError)
            and (self.mode == "skip" or not isinstance(error, TargetError))
        )

    def record(self, error: SampleError, substitute: str = BLACK_IMAGE) -> None:
        """Count a bad sample once, and log it.

        Args:
            error: Its error.
            substitute: What ``"replace"`` puts in its place.

        Raises:
            SampleError: There are more than ``max_errors``.
        """
        key = error.index, error.path
        if key in self._recorded:
            return
        if self.limit is not None and len(self.errors) >= self.limit:
            raise SampleError(error.index, error.path, f"{error.reason}; max_errors={self.limit} were found before")
        self._recorded.add(key)
        entry = SampleError(*key, error.reason)  # a copy without the traceback, which would hold a batch
        self.errors.append(entry)
        what = "another sample of its batch" if self.mode == "skip" else substitute
        # A name that is not UTF-8 has surrogates, which no log file takes.
        _log.warning("%s; %s takes its place", str(entry).encode(errors="backslashreplace").decode(), what)

    def describe(self, substitute: str = BLACK_IMAGE) -> str:
        """Return the policy in words, for ``explain()``."""
        if self.mode == "raise":
            return "a sample that cannot be read or decoded is raised, in its turn"
        what = "the next sample of its batch" if self.mode == "skip" else substitute
        limit = "any number of times" if self.limit is None else f"for up to {self.limit} samples"
        return f"{what} takes the place of one that cannot be read or decoded, {limit}; {len(self.errors)} found so far"
