"""Readers of images that workers packed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.errors import SampleError
from torchdali.pipeline.readers import FileReader, Reader
from torchdali.samples.image import decode_to_ppm, make_black
from torchdali.samples.on_error import find_substitutes
from torchdali.samples.pil import PILHeader
from torchdali.sources import FileSource, parse_header
from torchdali.sources.paths import Paths, build_table
from torchdali.transforms.spec import NO_INPUT_STATS, InputKind, Inputs, InputStats, IntArray
from torchdali.transforms.targets import Targets
from torchdali.workers.packed import Packed, PackedImages
from torchdali.workers.packing import ErrorFactory
from torchdali.workers.shared_memory import SharedBuffer

__all__ = ["open_packed"]


class _OfBatch(Reader):
    """What readers of packed images know of the samples of their batch."""

    _packed: Packed
    _group: PackedImages
    _make_error: ErrorFactory

    def targets(self, rows: IntArray) -> Targets | None:
        """Return the boxes, masks and key points of each image. Images of one sample get the same ones."""
        group, targets = self._group, self._packed.targets
        if targets is None:
            return None
        return self._attach_masks(targets.targets).take(group.sample[rows], group.size[rows])

    def get_drawn(self, rows: IntArray, size: IntArray) -> tuple[Inputs, Targets | None] | None:
        """Return what the worker drew, unless other samples stand in for some, or an image has another size now."""
        packed, group = self._packed, self._group
        is_same = np.array_equal(rows, np.arange(len(group.size))) and np.array_equal(size, group.size)
        if packed.drawn is None or not is_same:
            return None
        moved = packed.targets and packed.targets.moved
        return packed.drawn, self._attach_masks(moved.targets) if moved else None

    def _attach_masks(self, targets: Targets) -> Targets:
        packed = self._packed
        if packed.targets and isinstance(packed.block, SharedBuffer):
            packed.targets.attach_masks(targets, packed.block.contents)
        return targets

    def find_substitutes(self, bad: npt.NDArray[np.bool_]) -> IntArray | None:
        """Find substitutes by whole samples: all images of a sample come from the same other sample.

        Return None also if the images of the samples are not all in one group.
        """
        packed, group = self._packed, self._group
        count, slots = packed.count, len(group.size) // packed.count
        if len(packed.groups) > 1 or not np.array_equal(group.sample, np.tile(np.arange(count), slots)):
            return None
        substitutes = find_substitutes(np.asarray(bad.reshape(slots, count).any(axis=0)))
        return None if substitutes is None else (np.arange(slots)[:, None] * count + substitutes).reshape(-1)


class PackedReader(_OfBatch):
    """Reads the images of one kind of one batch, from the buffer that a worker filled.

    Args:
        packed: The batch.
        group: The images.
        make_error: Makes the error that blames a sample of the batch.
        adjust_orientation: As for :class:`Reader`.
    """

    def __init__(self, packed: Packed, group: PackedImages, make_error: ErrorFactory, adjust_orientation: bool) -> None:
        # Reader.__init__ needs a source, which a packed batch has not.
        self._packed, self._group, self._make_error = packed, group, make_error
        self._input_kind, self.adjust_orientation = group.input_kind, adjust_orientation
        self._black: dict[int, tuple[int, int]] = {}

    def name(self, row: int) -> str:
        return f"sample {self.error(row, '').index}"

    def error(self, row: int, reason: str) -> SampleError:
        key_path = self._packed.key_paths[int(self._group.slot[row])] if self._packed.key_paths else ""
        return self._make_error(int(self._group.sample[row]), key_path or "its image", reason)

    def pil_header(self, row: int) -> PILHeader | None:
        return self._group.pil[row] if self._group.pil and row not in self._black else None

    def sizes(self, rows: IntArray) -> IntArray:
        return self._group.size[rows]

    def decode_with_pil(self, row: int) -> npt.NDArray[np.uint8]:
        return decode_to_ppm(self.image(row), self.adjust_orientation)

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return views of the buffer, which is not reused until the run is done; one array if that is dense."""
        resources.callback(_keep_until_done, self._packed.block)
        if (dense := self._read_dense(rows)) is not None:
            return dense
        images: list[npt.NDArray[Any]] = [self.image(row) for row in rows.tolist()]
        if self._input_kind is InputKind.ENCODED:
            for place, image in pixels.items():
                images[place] = image
        return images

    def input_stats(self) -> InputStats:
        if self._input_kind is not InputKind.ENCODED or not len(self._group.size):
            return NO_INPUT_STATS
        other = [not parse_header(self.image(row).data).baseline for row in range(len(self._group.size))]
        return InputStats(float(np.mean(other)))

    def check(self, row: int) -> None:
        if self._input_kind is InputKind.ENCODED:
            with self.blame(row, "decoded"):
                decode_to_ppm(self.image(row), self.adjust_orientation)

    def substitute_black(self, row: int, size: tuple[int, int]) -> None:
        self._black[row] = size

    def image(self, row: int) -> npt.NDArray[Any]:
        """Return one image as it was packed: HWC, or the bytes of a file or a path."""
        group = self._group
        if row in self._black:
            return make_black(self._black[row]).data
        if group.arrays:
            return group.arrays[row]
        start = int(group.start[row])
        data = self._read_bytes(start, start + int(group.length[row]))
        if self._input_kind is not InputKind.PIXELS:
            return data
        return self._reshape(data, tuple(group.size[row].tolist()))

    def _read_dense(self, rows: IntArray) -> npt.NDArray[Any] | None:
        group = self._group
        count = len(group.size)
        if (
            self._input_kind is not InputKind.PIXELS
            or group.arrays
            or len(rows) != count
            or (group.size != group.size[0]).any()
            or (np.diff(group.start) != group.length[0]).any()  # frames of videos that are left out
        ):
            return None
        data = self._read_bytes(int(group.start[0]), int(group.start[-1] + group.length[-1]))
        return self._reshape(data, (count, *group.size[0].tolist()))

    def _read_bytes(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        block = self._packed.block
        assert isinstance(block, SharedBuffer)
        return block.contents[start:end]

    def _reshape(self, data: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        spec = self._group.spec
        return data.view(spec.dtype_name).reshape(*shape, spec.channels)


class PackedFileReader(_OfBatch, FileReader):
    """Reads files whose paths and headers a worker packed.

    Args:
        packed: The batch.
        group: The paths.
        make_error: Makes the error that blames a sample of the batch.
        adjust_orientation: As for :class:`Reader`.
    """

    def __init__(self, packed: Packed, group: PackedImages, make_error: ErrorFactory, adjust_orientation: bool) -> None:
        source = FileSource(Paths([build_table(_read_each(packed, group))]))
        super().__init__(source, adjust_orientation=adjust_orientation)
        self._packed, self._group, self._make_error = packed, group, make_error
        for row, header in enumerate(group.headers):
            self.table.update(row, header)

    def name(self, row: int) -> str:
        return f"sample {self.error(row, '').index}, {self.path(row)}"

    def error(self, row: int, reason: str) -> SampleError:
        return self._make_error(int(self._group.sample[row]), self.path(row), reason)


def open_packed(
    packed: Packed, group: PackedImages, make_error: ErrorFactory, adjust_orientation: bool = False
) -> Reader:
    """Return the reader of the images of one kind of one batch."""
    kind = PackedFileReader if group.input_kind is InputKind.FILES else PackedReader
    return kind(packed, group, make_error, adjust_orientation)


def _read_each(packed: Packed, group: PackedImages) -> list[bytes]:
    """Return the bytes of each image, or of each path."""
    if group.arrays:
        return [array.tobytes() for array in group.arrays]
    assert isinstance(packed.block, SharedBuffer)
    contents, start, length = packed.block.contents.data, group.start.tolist(), group.length.tolist()
    return [bytes(contents[begin : begin + count]) for begin, count in zip(start, length, strict=True)]


def _keep_until_done(block: Any) -> None:
    """Do nothing. As a callback it keeps a buffer alive."""
