"""Samples that cannot be read or decoded: what is done about them, and how many there may be."""

from __future__ import annotations

import logging
from typing import Any, Literal

import PIL.Image

from torchdali.errors import SampleError
from torchdali.transforms import SampleTransformError

__all__ = ["SIZE", "ErrorPolicy", "OnError", "limit_size"]

OnError = Literal["raise", "skip", "replace"]

SIZE = 256, 256
"""Height and width of a black image where nothing tells them."""

_LONGEST = 2**20
"""The longest side of a black image that DALI decodes."""

_log = logging.getLogger("torchdali")


def limit_size(size: tuple[int, int] | None) -> tuple[int, int] | None:
    """The size for a black image; None where it is none, or one in which PIL would not decode an image."""
    most = PIL.Image.MAX_IMAGE_PIXELS
    if not size or not 0 < min(size) <= max(size) <= _LONGEST:
        return None
    return size if not most or size[0] * size[1] <= most else None


class ErrorPolicy:
    """The arguments ``on_error`` and ``max_errors`` of :class:`torchdali.DALILoader`, and the samples that they met.

    Args:
        mode: ``on_error``.
        limit: ``max_errors``; None is any number.

    Attributes:
        errors: One for each sample, in the order in which they were found.
    """

    def __init__(self, mode: OnError, limit: int | None) -> None:
        self.mode: OnError = mode
        self.limit = None if limit is None else int(limit)
        self.errors: list[SampleError] = []
        self._known: set[tuple[Any, str]] = set()

    def __bool__(self) -> bool:
        return self.mode != "raise"

    def handles(self, error: Exception) -> bool:
        """Whether it is about a sample that cannot be read or decoded; one that cannot be transformed is not."""
        return (
            self.mode != "raise"
            and isinstance(error, SampleError)
            and not isinstance(error.__cause__, SampleTransformError)
        )

    def note(self, error: SampleError) -> None:
        """Counts a sample, once, and names it in the log.

        Raises:
            SampleError: It is one more than there may be.
        """
        key = error.index, error.path
        if key in self._known:
            return
        if self.limit is not None and len(self.errors) >= self.limit:
            raise SampleError(error.index, error.path, f"{error.reason}; max_errors={self.limit} were found before")
        self._known.add(key)
        kept = SampleError(*key, error.reason)  # without what it was raised in
        self.errors.append(kept)
        done = "another sample of its batch takes its place" if self.mode == "skip" else "a black image takes its place"
        _log.warning("%s; %s", kept, done)

    def describe(self) -> str:
        """What is done, in words."""
        if self.mode == "raise":
            return "a sample that cannot be read or decoded is raised, in its turn"
        what = "the next sample of its batch" if self.mode == "skip" else "a black image"
        limit = "any number of times" if self.limit is None else f"for up to {self.limit} samples"
        return f"{what} takes the place of one that cannot be read or decoded, {limit}; {len(self.errors)} found so far"
