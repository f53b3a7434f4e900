"""Image files on a disk: their paths as one matrix, their labels, and what is known of each file so far."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from torchdali.errors import SampleError
from torchdali.sources.header import read_header
from torchdali.sources.scan import Scan
from torchdali.spec import IntArray

__all__ = ["FolderSource"]

UNREADABLE = (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError)
"""What PIL raises on files that are no image or a damaged one."""

_open: Callable[..., Any] = PIL.Image.open
_SHORTEST_ROW = 32  # room for the path of a file descriptor


class FolderSource:
    """Samples that are (file, target) pairs.

    All paths lie in one matrix of bytes, padded with NUL, so that a batch's paths are one gather and one dense
    input of the graph. A file's header is read when its index first comes up; sizes are kept from then on.

    Args:
        paths: The files.
        targets: Their targets: integers, or anything else that ``default_collate`` takes.
        target_transforms: For each sample the index of its target transform in ``functions``, or None.
        functions: The target transforms; None where there is none.
        transform: The datasets' transform.
        description: What this is, for ``explain()``.
    """

    def __init__(
        self,
        paths: Sequence[str],
        targets: Sequence[Any],
        target_transforms: npt.NDArray[np.intp],
        functions: Sequence[Callable[[Any], Any] | None],
        transform: Any,
        description: str,
    ) -> None:
        encoded = [os.fsencode(path) for path in paths]
        length = max(map(len, encoded), default=0) + 1
        length = max(length, _SHORTEST_ROW)
        rows = b"".join(path.ljust(length, b"\0") for path in encoded)
        self._matrix: npt.NDArray[np.uint8] = np.frombuffer(rows, np.uint8).reshape(len(encoded), length)
        self._size = np.zeros((len(encoded), 2), np.int32)
        self._native = np.zeros(len(encoded), np.bool_)
        self._jpeg = np.zeros(len(encoded), np.bool_)
        self._length = np.zeros(len(encoded), np.int64)
        self._whole = np.zeros(len(encoded), np.bool_)
        integers = all(type(target) is int for target in targets)
        self._labels: IntArray | None = np.array(targets, np.int64) if integers else None
        self._targets = targets
        self._target_transforms = target_transforms
        self._functions = functions
        self.transform = transform
        self.description = description

    def __len__(self) -> int:
        return len(self._matrix)

    def path(self, index: int) -> str:
        """The file of a sample."""
        return os.fsdecode(self._matrix[index].tobytes().rstrip(b"\0"))

    def name(self, index: int) -> str:
        """A sample as messages name it."""
        return f"sample {index}, {self.path(index)}"

    def paths(self, index: IntArray) -> npt.NDArray[np.uint8]:
        """``(N, L)`` bytes: the files of a batch, padded with NUL. The array is the caller's."""
        return self._matrix[index]

    @property
    def plain_labels(self) -> bool:
        """Whether targets are integers that nothing transforms."""
        return self._labels is not None and not any(self._functions)

    def labels(self, index: IntArray) -> IntArray:
        """``(N,)`` labels, where :attr:`plain_labels` holds."""
        assert self._labels is not None
        return self._labels[index]

    def target(self, index: int) -> Any:
        """The target of one sample, transformed."""
        function = self._functions[int(self._target_transforms[index])]
        target: Any = self._targets[index]
        return function(target) if function else target

    def sizes(self, index: IntArray) -> IntArray:
        """``(N, 2)`` heights and widths of files that were scanned."""
        return self._size[index].astype(np.int64)

    def scan(self, index: IntArray, pool: Callable[[], ThreadPoolExecutor]) -> Scan:
        """Reads the headers of those files that are not known yet, in the threads of ``pool()``."""
        unknown = np.unique(index[self._size[index, 0] == 0])
        return Scan(unknown.tolist(), self._learn, pool)

    def foreign(self, index: IntArray) -> IntArray:
        """``(M,)`` rows of a scanned batch whose files DALI does not decode as PIL does."""
        return np.flatnonzero(~self._native[index])

    def changed(self, index: IntArray, lengths: npt.NDArray[np.int32]) -> bool:
        """Whether a file of a batch has another length than when its header was read, so that its size may be wrong.

        Args:
            index: ``(N,)`` the batch.
            lengths: ``(N, 1)`` bytes that were read of each file; of foreign files it is not looked at.
        """
        return bool((self._native[index] & (self._length[index] != lengths[:, 0])).any())

    def distrust(self, index: int) -> None:
        """From now on a file that PIL reads and DALI does not."""
        self._native[index] = False

    def check_endings(self, index: IntArray, endings: npt.NDArray[np.uint8]) -> None:
        """Finds JPEGs that end before their image does.

        The JPEG engine fills what is missing with grey and says nothing. A file that ends in an end-of-image marker
        is taken for whole; of the others some have bytes after their image, which PIL reads once to be sure.

        Args:
            index: ``(N,)`` the batch.
            endings: ``(N, 2)`` the last two bytes that were read of each file.

        Raises:
            SampleError: A file is truncated.
        """
        marked = (endings[:, 0] == 0xFF) & (endings[:, 1] == 0xD9)
        suspects = self._jpeg[index] & self._native[index] & ~self._whole[index] & ~marked
        for i in index[suspects].tolist():
            self.load(i)
            self._whole[i] = True

    def load(self, index: int) -> PIL.Image.Image:
        """The image as torchvision's default loader reads it.

        Raises:
            SampleError: The file is missing, truncated or no image.
        """
        path = self.path(index)
        with self._blaming(index, "decoded"), _open(path) as image:
            return image.convert("RGB")

    def forget(self, index: IntArray) -> IntArray:
        """Makes the files of a batch unknown again; returns the batch."""
        self._size[index] = 0
        return index

    def _learn(self, index: int) -> None:
        with self._blaming(index, "read as an image"):
            header = read_header(self.path(index))
        self._native[index], self._jpeg[index] = header.native, header.jpeg
        self._length[index] = header.length
        self._size[index] = header.height, header.width

    @contextmanager
    def _blaming(self, index: int, what: str) -> Generator[None, None, None]:
        try:
            yield
        except FileNotFoundError as error:
            raise SampleError(index, self.path(index), "there is no such file") from error
        except UNREADABLE as error:
            raise SampleError(index, self.path(index), f"it cannot be {what} ({error})") from error
