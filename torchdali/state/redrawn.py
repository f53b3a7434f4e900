"""``RandomSampler`` with replacement, asked for millions of indices at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler

from torchdali.state.generators import draw_seed
from torchdali.transforms.spec import IntArray

__all__ = ["Redrawn", "redrawn"]

_AT_ONCE = 32  # so many indices torch draws at a time
_CHUNK = 2**20


class Redrawn(Iterator[int]):
    """The indices of a sampler's iterator, of which the next may also come as arrays.

    torch makes a tensor for every 32 of them, which takes most of the time. A generator gives the same numbers however
    many are drawn at once.

    Args:
        sampler: Draws with replacement.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        self._sampler, self._left = sampler, sampler.num_samples
        self._generator: torch.Generator | None = None
        self._waiting: Iterator[int] = iter(())

    def __iter__(self) -> Redrawn:
        return self

    def __next__(self) -> int:
        if (index := next(self._waiting, None)) is None:
            if not self._left:
                raise StopIteration
            drawn: list[int] = self._draw(min(self._left, _AT_ONCE)).numpy().tolist()
            self._waiting = iter(drawn)
            index = next(self._waiting)
        return index

    def take(self, count: int) -> Iterator[IntArray]:
        """The next indices, some at a time; fewer where there are no more."""
        begun = np.fromiter(islice(self._waiting, count), np.int64)
        yield begun
        count -= len(begun)
        whole = min(count, self._left) // _AT_ONCE * _AT_ONCE
        for start in range(0, whole, _CHUNK):
            yield self._draw(min(whole - start, _CHUNK)).numpy()
        yield np.fromiter(islice(self, count - whole), np.int64)

    def _draw(self, count: int) -> torch.Tensor:
        sampler: Any = self._sampler
        if self._generator is None:
            self._generator = sampler.generator
            if self._generator is None:
                self._generator = torch.Generator()
                self._generator.manual_seed(draw_seed(None))
        self._left -= count
        size = len(sampler.data_source)
        return torch.randint(size, (count,), dtype=torch.int64, generator=self._generator).cpu()


def redrawn(sampler: Iterable[Any]) -> Iterator[Any]:
    """The sampler's iterator, one of this kind where that gives what torch's does."""
    if type(sampler) is RandomSampler and sampler.replacement and _as_torchs():
        return Redrawn(sampler)
    return iter(sampler)


@cache
def _as_torchs() -> bool:
    """Whether the installed torch draws as this module does."""
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    one, other = (RandomSampler(range(97), True, 170, generator) for generator in generators)
    ours = Redrawn(other)
    found = [index for part in ours.take(115) for index in part.tolist()] + list(ours)
    return found == list(one) and torch.equal(*(generator.get_state() for generator in generators))
