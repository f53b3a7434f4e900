"""Feed DALI with files that lie in larger arrays, such as mapped shards, without an object for each file.

For 256 files in shards, objects of their own took 1.3 ms of the iterating thread on the host of an H100. Here DALI gets
the whole arrays, and cuts the files out in its threads. Its operator copies one element after another: 25 MB took 30 ms
as bytes and 4.5 ms as words of 8 bytes. So an array is given as words, once for each remainder of a file's start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torchdali.sources.places import WORD, Bytes, Places
from torchdali.transforms.spec import IntArray

__all__ = ["WordTensors"]

_MAX_TENSORS = 2**16
"""Most tensors that are kept: 8 for each of 8,192 shards."""


class WordTensors:
    """DALI's tensors of arrays of bytes, as words.

    Args:
        make: Makes a tensor of an array, without a copy.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._tensors: dict[tuple[int, int], Any] = {}

    def cut(self, places: Places) -> tuple[list[Any], IntArray, IntArray]:
        """Return for each file a tensor of words, ``(N, 1)`` the word where it begins, and ``(N, 1)`` its words.

        Up to seven bytes of what follows a file come with it. For files that PIL reads that changes no pixel.
        """
        begins, shifts = np.divmod(places.starts, WORD)
        counts = -(-places.lengths // WORD)
        keys = list(zip(map(id, places.arrays), shifts.tolist(), strict=True))
        sizes = np.fromiter(map(len, places.arrays), np.int64, len(keys))
        copied = {*np.flatnonzero(shifts + (begins + counts) * WORD > sizes).tolist(), *places.passing}
        tensors: list[Any] = list(map(self._tensors.get, keys))
        for i in [i for i, tensor in enumerate(tensors) if tensor is None and i not in copied]:
            tensors[i] = self._get(keys[i], places.arrays[i])
        for i in copied:
            tensors[i], begins[i] = self._copy(places, i, int(counts[i])), 0
        return tensors, begins[:, None], counts[:, None]

    def _get(self, key: tuple[int, int], array: Bytes) -> Any:
        """Return the tensor of an array without its first bytes. It refers to the array, so that the key stays its."""
        if key not in self._tensors:
            if len(self._tensors) >= _MAX_TENSORS:
                self._tensors.clear()
            words = np.frombuffer(array.data, np.int64, (len(array) - key[1]) // WORD, key[1])  # need not be aligned
            self._tensors[key] = self._make(words)
        return self._tensors[key]

    def _copy(self, places: Places, i: int, count: int) -> Any:
        """Return a tensor of one file alone, because it ends with its array, or its array will not last.

        It is padded with 0, unless it has whole words. Images that PIL has decoded are long, and have.
        """
        start, length = int(places.starts[i]), int(places.lengths[i])
        file = places.arrays[i][start : start + length]
        if length == count * WORD and file.flags.c_contiguous:
            return self._make(file.view(np.int64))
        words = np.zeros(count, np.int64)
        words.view(np.uint8)[:length] = file
        return self._make(words)
