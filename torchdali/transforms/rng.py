"""Random numbers that depend only on the sample.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a
128-bit counter and a 64-bit key into 128 random bits. The key is made of the seed and the epoch. The counter is made
of the sample's index, how often this index was drawn in this epoch, and the transform's position. Therefore a sample's
numbers are the same for every batch size, thread count, world size and device. No generator has a state to keep, and
the global generators of torch, numpy and Python are not used.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchdali.transforms.spec import IntArray, Params

Words = npt.NDArray[np.uint32]

_MULTIPLIER = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None]
# Positions of the lower and upper halves of 64-bit words in an array of 32-bit words.
_LOWER, _HIGH = (slice(i, None, 2) for i in ((0, 1) if sys.byteorder == "little" else (1, 0)))
_HALF = np.uint64(32)
_AHEAD = 6


def philox(counter: Words, key: Words) -> Words:
    """Run ten rounds of Philox4x32.

    Args:
        counter: ``(4, ...)`` words.
        key: ``(2,)`` words.

    Returns:
        ``(4, ...)`` words, uniformly distributed.
    """
    keys = (key + _ROUNDS * _WEYL).astype(np.uint32)
    # Both halves of a round do the same, so words 0 and 2 are computed together, and words 1 and 3.
    words = counter.reshape(4, -1)
    even, odd = words[0::2], words[1::2]
    for i in range(10):
        halves = (even * _MULTIPLIER).view(np.uint32)
        even = halves[::-1, _HIGH] ^ odd
        even ^= keys[i, :, None]
        odd = halves[::-1, _LOWER]
    return np.stack((even[0], odd[0], even[1], odd[1])).reshape(counter.shape)


def _split_halves(value: int) -> tuple[int, int]:
    value &= 0xFFFFFFFFFFFFFFFF
    return value & 0xFFFFFFFF, value >> 32


def epoch_key(seed: int, epoch: int) -> Words:
    """Return the ``(2,)`` key of an epoch: Philox of its number under the seed, so that near seeds differ."""
    counter = np.array([*_split_halves(epoch), 0, 0], np.uint32)
    return philox(counter, np.array(_split_halves(seed), np.uint32))[:2]


class _Precomputed(NamedTuple):
    """Numbers that are computed in advance.

    Attributes:
        made: ``(M, B, 4)`` words of each transform, by its position.
        needs: Number of blocks that each transform took so far, by its position.
        rows: Rows of the M samples that are selected.
    """

    made: dict[int, Words]
    needs: dict[int, int]
    rows: Any


class _Drawn(NamedTuple):
    """Parameters that rules drew for a batch, where fused rules find them.

    Attributes:
        size: Number of samples of the batch.
        params: The parameters by the position of the transform.
    """

    size: int
    params: dict[int, Params]


class Draws:
    """Random numbers of one transform for the samples of one batch.

    Each call continues where the last one ended, so a rule must draw in a fixed order.

    Args:
        key: The epoch's key.
        index: ``(N,)`` indices into the dataset.
        occurrence: ``(N,)`` how often each index was drawn before in this epoch.
        position: The transform's position in the chain, counted from 0; below 65,536.
        precomputed: Blocks that are already computed.
        drawn: Parameters that rules have drawn for the batch.
        frame: ``(N,)`` the number of each image in its video, if the images are frames. Those of a video share their
            numbers.

    Attributes:
        frame: See above.
    """

    def __init__(
        self,
        key: Words,
        index: IntArray,
        occurrence: IntArray,
        position: int = 0,
        precomputed: _Precomputed | None = None,
        drawn: _Drawn | None = None,
        frame: IntArray | None = None,
    ) -> None:
        self.frame = frame
        self._key, self._index, self._occurrence, self._position = key, index, occurrence, position
        self._precomputed = precomputed or _Precomputed({}, {}, slice(None))
        self._drawn = drawn
        made = self._precomputed.made.get(position)
        self._ready: Words = np.empty((len(index), 0, 4), np.uint32) if made is None else made[self._precomputed.rows]
        self._block = self._ready.shape[1]

    def __len__(self) -> int:
        return len(self._index)

    def select_position(self, position: int) -> Draws:
        """Return the numbers of another transform for the same samples."""
        return Draws(self._key, self._index, self._occurrence, position, self._precomputed, self._drawn, self.frame)

    def select_rows(self, rows: IntArray) -> Draws:
        """Return the numbers of some of the samples. They are the same as among all samples."""
        precomputed = self._precomputed
        chosen: Any = rows if isinstance(precomputed.rows, slice) else precomputed.rows[rows]
        return Draws(
            self._key,
            self._index[rows],
            self._occurrence[rows],
            self._position,
            precomputed._replace(rows=chosen),
            self._drawn,
            None if self.frame is None else self.frame[rows],
        )

    def select_frames(self, rows: IntArray, frame: IntArray) -> Draws:
        """Return the numbers of the frames of videos: of some rows, and the number of each frame in its video."""
        draws = self.select_rows(rows)
        draws.frame = frame
        return draws

    def keep_params(self) -> Draws:
        """Return the same draws, which keep the parameters that rules store in them."""
        drawn = _Drawn(len(self), {})
        return Draws(self._key, self._index, self._occurrence, self._position, self._precomputed, drawn, self.frame)

    def store(self, params: Params) -> None:
        """Store the parameters that this transform drew for these samples."""
        assert self._drawn is not None
        whole = self._drawn.params.setdefault(self._position, {})
        for name, values in params.items():
            if name not in whole:
                whole[name] = np.zeros((self._drawn.size, *values.shape[1:]), values.dtype)
            whole[name][self._precomputed.rows] = values

    def load(self) -> Params | None:
        """Return the parameters that this transform stored for these samples, or None."""
        whole = self._drawn and self._drawn.params.get(self._position)
        return {name: values[self._precomputed.rows] for name, values in whole.items()} if whole else None

    def precompute(self, blocks: dict[int, int]) -> Draws:
        """Return the same draws, with the first numbers of many transforms computed at once.

        This takes about as long as computing the numbers of one transform.

        Args:
            blocks: Number of blocks of four words that each transform is expected to take, by its position. Empty at
                first. The numbers that transforms take are recorded in it.
        """
        expected = list(blocks.items())
        counter = [(position << 16) + block for position, count in expected for block in range(count)]
        words = self._compute_blocks(np.array(counter, np.uint32))
        ends = list(accumulate(count for _, count in expected))
        made = {position: words[:, end - count : end] for (position, count), end in zip(expected, ends, strict=True)}
        precomputed = _Precomputed(made, blocks, slice(None))
        return Draws(self._key, self._index, self._occurrence, self._position, precomputed, self._drawn, self.frame)

    def skip(self, blocks: int) -> Draws:
        """Leave out blocks of four words, and return the same object. Call it before any number was drawn."""
        if blocks:  # few samples come so far, so these blocks are not computed in advance for the next batch
            self._precomputed = self._precomputed._replace(needs={})
        ready = self._ready.shape[1]
        self._ready = self._ready[:, blocks:]
        self._block = max(ready, blocks)
        return self

    def words(self, count: int) -> Words:
        """Return ``(N, count)`` uniform words of 32 bits."""
        blocks = -(-count // 4)
        if blocks > self._ready.shape[1]:
            # Philox takes about as long for a few blocks as for one. A second call is often followed by more.
            missing = blocks - self._ready.shape[1]
            made = self._next_blocks(missing if not self._block else max(missing, _AHEAD))
            self._ready = np.concatenate((self._ready, made), axis=1)
        taken, self._ready = self._ready[:, :blocks], self._ready[:, blocks:]
        return taken.reshape(len(self), blocks * 4)[:, :count]

    def _next_blocks(self, blocks: int) -> Words:
        """Return the next blocks, ``(N, blocks, 4)`` words."""
        start, self._block = self._block, self._block + blocks
        self._precomputed.needs[self._position] = max(self._precomputed.needs.get(self._position, 0), self._block)
        return self._compute_blocks((self._position << 16) + np.arange(start, self._block, dtype=np.uint32))

    def _compute_blocks(self, blocks: npt.NDArray[np.uint32]) -> Words:
        """Return ``(N, B, 4)`` words of ``(B,)`` blocks. A block is a transform's position and a number."""
        index = self._index.view(np.uint32).reshape(-1, 2)
        counter = np.empty((4, len(index), len(blocks)), np.uint32)
        counter[0] = index[:, _LOWER]
        counter[1] = index[:, _HIGH]
        counter[2] = self._occurrence.astype(np.uint32)[:, None]
        counter[3] = blocks
        return np.moveaxis(philox(counter, self._key), 0, -1)

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return ``(N, count)`` numbers, uniform in [0, 1), multiples of 2**-32."""
        return self.words(count).astype(np.float64) * 2.0**-32

    def uniform_range(self, low: float, high: float) -> npt.NDArray[np.float64]:
        """Return ``(N,)`` numbers, uniform in [low, high)."""
        return low + (high - low) * self.uniform(1)[:, 0]

    def bernoulli(self, p: float) -> npt.NDArray[np.bool_]:
        """Return ``(N,)`` booleans, True with probability p, as torchvision's ``torch.rand(1) < p``.

        Args:
            p: A number, or a tensor or array of one number.
        """
        return self.uniform(1)[:, 0] < float(p)

    def choice(self, weights: npt.NDArray[np.float64]) -> IntArray:
        """Return ``(N,)`` numbers below ``len(weights)``. The weights are their probabilities and sum to 1."""
        ends = np.cumsum(weights)[:-1]
        return np.searchsorted(ends, self.uniform(1)[:, 0], side="right").astype(np.int64)

    def permutation(self, count: int) -> IntArray:
        """Return ``(N, count)`` permutations of ``range(count)``, all equally likely."""
        return np.argsort(self.uniform(count), axis=1, kind="stable").astype(np.int64)

    def seeds(self) -> IntArray:
        """Return ``(N,)`` numbers below 2**63, to seed the generators of transforms that torch runs."""
        words = self.words(2).astype(np.uint64)
        return (((words[:, 0] << _HALF) | words[:, 1]) >> np.uint64(1)).astype(np.int64)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed as torch draws the base seed of DataLoader's workers and the seed of a sampler."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
