"""Storage of images in a few large blocks of a device's memory. Batches are gathered from the blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from torchdali.runtime.events import Event
from torchdali.transforms.spec import IntArray

__all__ = ["WORD", "Store"]

WORD = 8
"""Bytes of a word. Offsets and lengths are counted in words."""

_MIN_WORDS = 2**20 // WORD
_MARGIN = 1.02


class Store:
    """Images in a device's memory. An image is never overwritten, so its offset stays valid.

    Args:
        device: The device. The memory comes from torch's allocator.
        budget: Maximum number of bytes.
        expected: Expected number of images.
    """

    def __init__(self, device: torch.device, budget: int, expected: int) -> None:
        self.device, self.budget = device, budget
        self._expected = max(1, expected)
        self._blocks: list[torch.Tensor] = []
        self._filled = 0  # words of the last block
        self._capacity = 0  # words of the last block in which an image may begin
        self._longest = 0
        self._images = 0
        self._words = 0
        self._full = self._closed = False
        self._written: torch.Event | None = None

    @property
    def used(self) -> int:
        """Bytes of the stored images."""
        return self._words * WORD

    @property
    def reserved(self) -> int:
        """Bytes of memory that are allocated."""
        return sum(block.nbytes for block in self._blocks)

    def add(self, images: torch.Tensor | Sequence[torch.Tensor], words: IntArray) -> IntArray:
        """Store as many images as there is room for.

        Args:
            images: The bytes of the images: ``(N, L)``, or one tensor for each image.
            words: ``(N,)`` lengths of the images.

        Returns:
            ``(M,)`` offsets of the first M images, which are stored.
        """
        offsets: list[IntArray] = []
        self._longest = max(self._longest, int(words.max(initial=0)))
        start = 0
        while start < len(words):
            ends = np.cumsum(words[start:])
            count = int(np.searchsorted(ends, self._capacity - self._filled, side="right"))
            if not count:
                if not self._grow(words[start:]):
                    break
                continue
            chosen = images[start : start + count]
            block, length = self._blocks[-1], int(ends[count - 1])
            _join(chosen, block[self._filled : self._filled + length])
            base = sum(len(block) for block in self._blocks[:-1]) + self._filled
            offsets.append(base + ends[:count] - words[start : start + count])
            self._filled += length
            self._words += length
            self._images += count
            start += count
        if self.device.type == "cuda":
            self._written = torch.cuda.current_stream(self.device).record_event(Event())
        return np.concatenate(offsets) if offsets else np.empty(0, np.int64)

    def gather(self, offsets: IntArray, words: IntArray, unstored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy images into a batch, on torch's current stream.

        Args:
            offsets: ``(N,)`` offsets from :meth:`add`; -1 is the first of ``unstored``, -2 the second, and so on.
            words: ``(N,)`` lengths of the images.
            unstored: Images that are not stored.

        Returns:
            ``(N, L)`` bytes. L is the length of the longest image. The bytes behind a shorter image are arbitrary.
        """
        if self._closed and (offsets >= 0).any():
            raise RuntimeError("the cache was closed meanwhile")  # the prefetcher then looks the batch up again
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)
        width = int(words.max())
        blocks: list[torch.Tensor] = self._blocks
        if unstored:
            lengths = np.array([len(image) // WORD for image in unstored], np.int64)
            ends = np.cumsum(lengths)
            block: torch.Tensor = torch.empty(int(ends[-1]) + width, dtype=torch.int64, device=self.device)
            _join(unstored, block[: int(ends[-1])])
            is_unstored = offsets < 0
            end = sum(map(len, blocks))
            offsets = np.where(is_unstored, end + (ends - lengths)[np.where(is_unstored, -1 - offsets, 0)], offsets)
            blocks = [*blocks, block]
        if len(blocks) == 1:
            return self._rows(blocks[0], offsets, words, width).view(torch.uint8)
        bases = np.array([0, *itertools.accumulate(map(len, blocks))], np.int64)
        which = np.searchsorted(bases, offsets, side="right") - 1
        offsets = offsets - bases[which]
        batch = torch.empty((len(offsets), width), dtype=torch.int64, device=self.device)
        for i, block in enumerate(blocks):
            if len(rows := np.flatnonzero(which == i)):
                batch.index_copy_(0, self._to_device(rows), self._rows(block, offsets[rows], words[rows], width))
        return batch.view(torch.uint8)

    def close(self) -> None:
        """Free the memory, even if iterators still refer to the store."""
        self._blocks, self._capacity, self._filled, self._full, self._closed = [], 0, 0, True, True

    def _rows(self, block: torch.Tensor, offsets: IntArray, words: IntArray, width: int) -> torch.Tensor:
        last = len(block) - width
        if last >= 0 and (offsets <= last).all():
            # Row i of the view begins at word i. So one operator selects images of any length.
            if block.device.type == "cpu":  # numpy takes a tenth of the time here
                windows = as_strided(block.numpy(), (last + 1, width), (WORD, WORD))
                return torch.from_numpy(windows[offsets])
            return block.as_strided((last + 1, width), (1, 1)).index_select(0, self._to_device(offsets))
        # An image lies near the block's end, and the batch has an image longer than any that was known at allocation.
        batch = torch.empty((len(offsets), width), dtype=torch.int64, device=self.device)
        for row, offset, length in zip(batch, offsets.tolist(), words.tolist(), strict=True):
            row[:length] = block[offset : offset + length]
        return batch

    def _to_device(self, numbers: IntArray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(numbers))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _grow(self, words: IntArray) -> bool:
        """Allocate a block for the images that are still expected. Return False if there is no memory left."""
        known = self._images + len(words)
        if known > self._expected:
            self._expected = max(2 * self._expected, known)
        mean = (self._words + int(words.sum())) / known
        needed = max(int(mean * (self._expected - self._images) * _MARGIN), int(words[0]), _MIN_WORDS)
        length = min(needed + self._longest, (self.budget - self.reserved) // WORD)
        if self._full or length - self._longest < words[0]:
            return False
        try:
            with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
                block = torch.empty(length, dtype=torch.int64, device=self.device)
        except RuntimeError:  # out of memory, on any device: the present blocks must suffice
            self._full = True
            return False
        # One statement, so that a KeyboardInterrupt cannot leave the three inconsistent.
        self._blocks, self._capacity, self._filled = [*self._blocks, block], length - self._longest, 0
        return True


def _join(images: torch.Tensor | Sequence[torch.Tensor], out: torch.Tensor) -> None:
    target = out.view(torch.uint8)
    if isinstance(images, torch.Tensor):
        target.copy_(images.reshape(-1))
    else:
        torch.cat(tuple(images), out=target)
