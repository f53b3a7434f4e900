"""Images that were packed where the dataset is asked for samples, as a source for the feed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.errors import SampleError
from torchdali.samples.image import black, ppm
from torchdali.sources import UNREADABLE, FileSource, Source, header_of, words_of
from torchdali.transforms.spec import NOTHING_SEEN, InputKind, InputStats, IntArray
from torchdali.workers.packing import Packed, PackedImages
from torchdali.workers.shared_memory import SharedBuffer

__all__ = ["source_of"]


class PackedSource(Source):
    """Images of one kind, of one batch.

    Args:
        packed: The batch.
        group: The images.
        fault: Makes the error that blames a sample of the batch.
    """

    def __init__(self, packed: Packed, group: PackedImages, fault: Callable[[int, str, str], SampleError]) -> None:
        self._packed, self._group, self._fault = packed, group, fault
        self._input_kind = group.input_kind
        self._black: dict[int, tuple[int, int]] = {}

    def name(self, row: int) -> str:
        """A sample as messages name it."""
        return f"sample {self.error(row, '').index}"

    def error(self, row: int, reason: str) -> SampleError:
        """Blames the sample that an image is of."""
        place = self._packed.places[int(self._group.slot[row])] if self._packed.places else ""
        return self._fault(int(self._group.sample[row]), place or "its image", reason)

    def sizes(self, rows: IntArray) -> IntArray:
        """``(N, 2)`` heights and widths."""
        return self._group.size[rows]

    def images(self, rows: IntArray, by_pil: IntArray, held: ExitStack) -> Any:
        """Views of the block, which stays the main process's until the run is done; one array where it is dense."""
        held.callback(_keep, self._packed.block)
        if (whole := self._dense(rows)) is not None:
            return whole
        images: list[npt.NDArray[Any]] = [self.image(row) for row in rows.tolist()]
        if self._input_kind is InputKind.ENCODED:
            for place in by_pil.tolist():
                images[place] = ppm(self.image(int(rows[place])))
        return images

    def seen(self) -> InputStats:
        """Of encoded files, how many are no baseline JPEGs."""
        if self._input_kind is not InputKind.ENCODED or not len(self._group.size):
            return NOTHING_SEEN
        other = [not header_of(self.image(row).data).baseline for row in range(len(self._group.size))]
        return InputStats(float(np.mean(other)))

    def check(self, row: int) -> None:
        """Raises SampleError where PIL does not read an encoded file."""
        if self._input_kind is InputKind.ENCODED:
            try:
                ppm(self.image(row))
            except UNREADABLE as error:
                raise self.error(row, f"it cannot be decoded ({words_of(error)})") from error

    def replace(self, row: int, size: tuple[int, int]) -> None:
        """As of :class:`Source`."""
        self._black[row] = size

    def instead(self, bad: npt.NDArray[np.bool_]) -> IntArray | None:
        """As of :class:`Source`; all images of a sample are those of the same other sample."""
        return _instead(self._packed, self._group, bad)

    def image(self, row: int) -> npt.NDArray[Any]:
        """One image as it was packed: HWC, or the bytes of a file or a path."""
        group = self._group
        if row in self._black:
            return black(self._black[row]).data
        if group.arrays:
            return group.arrays[row]
        start = int(group.start[row])
        data = self._bytes(start, start + int(group.length[row]))
        return data if self._input_kind is not InputKind.PIXELS else self._shaped(data, tuple(group.size[row].tolist()))

    def _dense(self, rows: IntArray) -> npt.NDArray[Any] | None:
        group = self._group
        count = len(group.size)
        if (
            self._input_kind is not InputKind.PIXELS
            or group.arrays
            or len(rows) != count
            or (group.size != group.size[0]).any()
        ):
            return None
        data = self._bytes(int(group.start[0]), int(group.start[-1] + group.length[-1]))
        return self._shaped(data, (count, *group.size[0].tolist()))

    def _bytes(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        block = self._packed.block
        assert isinstance(block, SharedBuffer)
        return block.contents[start:end]

    def _shaped(self, data: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        spec = self._group.spec
        return data.view(str(spec.dtype).removeprefix("torch.")).reshape(*shape, spec.channels)


class PackedFiles(FileSource):
    """Files whose paths and headers were packed.

    Args:
        packed: The batch.
        group: The paths.
        fault: Makes the error that blames a sample of the batch.
    """

    def __init__(self, packed: Packed, group: PackedImages, fault: Callable[[int, str, str], SampleError]) -> None:
        paths = PackedSource(packed, group, fault)
        super().__init__([os.fsdecode(paths.image(row).tobytes()) for row in range(len(group.size))])
        self._packed, self._group, self._fault = packed, group, fault
        for row, header in enumerate(group.headers):
            self.learn(row, header)

    def name(self, row: int) -> str:
        """A sample as messages name it."""
        return f"sample {self.error(row, '').index}, {self.path(row)}"

    def error(self, row: int, reason: str) -> SampleError:
        """Blames the sample whose file it is."""
        return self._fault(int(self._group.sample[row]), self.path(row), reason)

    def instead(self, bad: npt.NDArray[np.bool_]) -> IntArray | None:
        """As of :class:`Source`; all files of a sample are those of the same other sample."""
        return _instead(self._packed, self._group, bad)


def _instead(packed: Packed, group: PackedImages, bad: npt.NDArray[np.bool_]) -> IntArray | None:
    """As of :class:`Source`, by whole samples; None also where their images are not all in one group."""
    count, slots = packed.count, len(group.size) // packed.count
    if len(packed.groups) > 1 or not np.array_equal(group.sample, np.tile(np.arange(count), slots)):
        return None
    good = np.flatnonzero(~bad.reshape(slots, count).any(axis=0))
    if not len(good):
        return None
    stand_in = good[np.searchsorted(good, np.arange(count)) % len(good)]
    return (np.arange(slots)[:, None] * count + stand_in).reshape(-1)


def source_of(packed: Packed, group: PackedImages, fault: Callable[[int, str, str], SampleError]) -> Source:
    """The images of one kind, of one batch, for the feed."""
    kind = PackedFiles if group.input_kind is InputKind.FILES else PackedSource
    return kind(packed, group, fault)


def _keep(block: Any) -> None:
    """Holds a block until here."""
