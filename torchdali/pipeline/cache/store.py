"""Bytes of images side by side in a few large blocks of a device's memory, and batches gathered from them."""

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
"""Bytes that are moved as one: places and lengths are counted in words."""

_SMALLEST = 2**20 // WORD
_AIR = 1.02


class Store:
    """Images, none of which is ever overwritten, so that one that was found stays what it is.

    Args:
        device: Whose memory it takes, from torch's allocator.
        budget: Bytes that it may take.
        expected: Number of images that are likely to come.
    """

    def __init__(self, device: torch.device, budget: int, expected: int) -> None:
        self.device, self.budget = device, budget
        self._expected = max(1, expected)
        self._blocks: list[torch.Tensor] = []
        self._filled = 0  # words of the last block
        self._capacity = 0  # words of it that an image may begin in
        self._longest = 0
        self._images = 0
        self._words = 0
        self._full = self._closed = False
        self._written: torch.Event | None = None

    @property
    def used(self) -> int:
        """Bytes of images."""
        return self._words * WORD

    @property
    def held(self) -> int:
        """Bytes of memory that were taken."""
        return sum(block.nbytes for block in self._blocks)

    def add(self, images: torch.Tensor | Sequence[torch.Tensor], words: IntArray) -> IntArray:
        """Stores as many images as have room.

        Args:
            images: Their bytes: ``(N, L)``, or one tensor an image.
            words: ``(N,)`` how long each is.

        Returns:
            ``(M,)`` places of the first M.
        """
        places: list[IntArray] = []
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
            base = sum(len(one) for one in self._blocks[:-1]) + self._filled
            places.append(base + ends[:count] - words[start : start + count])
            self._filled += length
            self._words += length
            self._images += count
            start += count
        if self.device.type == "cuda":
            self._written = torch.cuda.current_stream(self.device).record_event(Event())
        return np.concatenate(places) if places else np.empty(0, np.int64)

    def gather(self, places: IntArray, words: IntArray, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copies a batch together, on torch's current stream.

        Args:
            places: ``(N,)`` as :meth:`add` gave them; -1 is the first of ``others``, -2 the second, and so on.
            words: ``(N,)`` how long each image is.
            others: Images that are not stored.

        Returns:
            ``(N, L)`` bytes; L is the length of the longest image, and behind the others there is anything.
        """
        if self._closed and (places >= 0).any():
            raise RuntimeError("the cache was closed meanwhile")  # the batch is looked up anew
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)
        width = int(words.max())
        blocks: list[torch.Tensor] = self._blocks
        if others:
            lengths = np.array([len(one) // WORD for one in others], np.int64)
            ends = np.cumsum(lengths)
            block: torch.Tensor = torch.empty(int(ends[-1]) + width, dtype=torch.int64, device=self.device)
            _join(others, block[: int(ends[-1])])
            passing = places < 0
            held = sum(map(len, blocks))
            places = np.where(passing, held + (ends - lengths)[np.where(passing, -1 - places, 0)], places)
            blocks = [*blocks, block]
        if len(blocks) == 1:
            return self._rows(blocks[0], places, words, width).view(torch.uint8)
        bases = np.array([0, *itertools.accumulate(map(len, blocks))], np.int64)
        which = np.searchsorted(bases, places, side="right") - 1
        places = places - bases[which]
        batch = torch.empty((len(places), width), dtype=torch.int64, device=self.device)
        for i, block in enumerate(blocks):
            if len(rows := np.flatnonzero(which == i)):
                batch.index_copy_(0, self._send(rows), self._rows(block, places[rows], words[rows], width))
        return batch.view(torch.uint8)

    def close(self) -> None:
        """Frees the memory, whoever still refers to this."""
        self._blocks, self._capacity, self._filled, self._full, self._closed = [], 0, 0, True, True

    def _rows(self, block: torch.Tensor, places: IntArray, words: IntArray, width: int) -> torch.Tensor:
        last = len(block) - width
        if last >= 0 and (places <= last).all():
            # Row i of the view begins at word i, so that images of any length are picked by one operator.
            if block.device.type == "cpu":  # where numpy takes a tenth of the time
                windows = as_strided(block.numpy(), (last + 1, width), (WORD, WORD))
                return torch.from_numpy(windows[places])
            return block.as_strided((last + 1, width), (1, 1)).index_select(0, self._send(places))
        # An image near the block's end, beside one that is longer than all that was known when the block was made.
        batch = torch.empty((len(places), width), dtype=torch.int64, device=self.device)
        for row, place, length in zip(batch, places.tolist(), words.tolist(), strict=True):
            row[:length] = block[place : place + length]
        return batch

    def _send(self, numbers: IntArray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(numbers))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _grow(self, words: IntArray) -> bool:
        """Takes memory for all images that are expected still; False where there is none left."""
        known = self._images + len(words)
        if known > self._expected:
            self._expected = max(2 * self._expected, known)
        mean = (self._words + int(words.sum())) / known
        wanted = max(int(mean * (self._expected - self._images) * _AIR), int(words[0]), _SMALLEST)
        length = min(wanted + self._longest, (self.budget - self.held) // WORD)
        if self._full or length - self._longest < words[0]:
            return False
        try:
            with torch.inference_mode(False):  # else nothing could be written outside of it, where it is on
                block = torch.empty(length, dtype=torch.int64, device=self.device)
        except RuntimeError:  # out of memory, on every device: what is there has to do
            self._full = True
            return False
        # At once, so that a KeyboardInterrupt does not come in between.
        self._blocks, self._capacity, self._filled = [*self._blocks, block], length - self._longest, 0
        return True


def _join(images: torch.Tensor | Sequence[torch.Tensor], out: torch.Tensor) -> None:
    target = out.view(torch.uint8)
    if isinstance(images, torch.Tensor):
        target.copy_(images.reshape(-1))
    else:
        torch.cat(tuple(images), out=target)
