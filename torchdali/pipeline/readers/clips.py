"""Clips of video files, which threads decode before their batch's turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from torchdali.datasets.video.clips import ClipSource
from torchdali.datasets.video.decoding import Box, Decoders, HostDecoders
from torchdali.datasets.video.device_decoding import DeviceDecoders, find_engine
from torchdali.datasets.video.probe import Video
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.decoded import DecodedBatch, DecodingReader
from torchdali.pipeline.readers.scan import Scan
from torchdali.pipeline.windows import bound_pixels, find_boxes, find_window
from torchdali.sources import Source
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray

__all__ = ["ClipReader", "join_clips"]

_START = 2**16 - 3
"""The position of the random numbers for the starts of clips. No chain of transforms is that long."""


class ClipReader(DecodingReader):
    """Reads a source of clips.

    Args:
        source: A :class:`ClipSource`, or several combined.
    """

    substitute = "a black clip"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._decoders: Decoders = HostDecoders()
        self._device = torch.device("cpu")

    def move_to(self, device: torch.device) -> None:
        if device != self._device:
            self._decoders.close()
            self._decoders = HostDecoders() if find_engine(device) else DeviceDecoders(device)
            self._device = device

    @property
    def is_resident(self) -> bool:
        return isinstance(self._decoders, DeviceDecoders)

    def describe_decoding(self, plan: Plan) -> str:
        if isinstance(self._decoders, DeviceDecoders):
            text = self._decoders.describe()
        else:
            reason = find_engine(self._device) if self._device.type == "cuda" else ""
            text = "PyAV, in threads of this process" + (f": {reason}" if reason else "")
        return f"{text}; frames are cut where the first crop lies inside them" if find_window(plan) else text

    def bind_draws(self, draws: Draws, plan: Plan) -> Reader:
        return _ClipBatch(self, draws, plan)

    def find_video(self, row: int) -> tuple[Video | None, tuple[int, int]]:
        """Return the video of a clip, or None for a black clip; and the height and width of its frames."""
        if row in self._replaced:
            return None, self._replaced[row]
        source, place = self.source.locate(row)
        video = cast("ClipSource", source).dataset.get_video(place)
        return video, video.size

    def decode(self, row: int, video: Video | None, box: Box, chosen: IntArray, number: float) -> torch.Tensor:
        """Return ``(T, H, W, 3)`` what a box shows of the frames of a clip.

        Args:
            row: The clip.
            video: Its video; None for a black clip.
            box: The box.
            chosen: Which of its frames.
            number: The random number of its start.

        Raises:
            SampleError: One of them cannot be decoded.
        """
        if video is None:
            device = self._device if self.is_resident else torch.device("cpu")
            top, left, bottom, right = box
            # The copy is complete: batches may be used in another stream than this thread's.
            return torch.zeros(len(chosen), bottom - top, right - left, 3, dtype=torch.uint8).to(device)
        source, place = self.source.locate(row)
        dataset = cast("ClipSource", source).dataset
        with self.blame(row, "decoded"):
            return self._decoders.decode(video, dataset.choose_frames(place, video, number)[chosen], box)

    def read_size(self, row: int) -> tuple[int, int] | None:
        source, place = self.source.locate(row)
        video = cast("ClipSource", source).dataset.get_video(place)
        return None if video.fault else video.size

    def sample_bytes(self, plan: Plan) -> int:
        dataset = cast("ClipSource", self.source.locate(0)[0]).dataset
        return 3 * dataset.frames * bound_pixels(plan, dataset.max_pixels)

    def close(self) -> None:
        self._decoders.close()


class _ClipBatch(DecodedBatch):
    """The clips of one batch. Boxes of their frames are decoded, if the first rule shows no more.

    Args:
        owner: The reader of the whole source.
        draws: The random numbers of the clips.
        plan: What runs on them.
    """

    def __init__(self, owner: ClipReader, draws: Draws, plan: Plan) -> None:
        chosen = plan.choose_frames(owner.source.num_frames)
        numbers = draws.select_position(_START).uniform(1)[:, 0].tolist()
        clips: list[tuple[Video | None, Box]] = []
        super().__init__(owner.source, lambda row, place: owner.decode(row, *clips[place], chosen, numbers[place]))
        self._owner, self._draws, self._plan, self._clips = owner, draws, plan, clips
        self._size: IntArray = np.empty((0, 2), np.int64)
        self._boxes: IntArray = np.empty((0, 4), np.int64)
        self._whole: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        if not self._clips:  # once: another iterator may replace clips, or try them again
            found = [self._owner.find_video(row) for row in rows.tolist()]
            self._size = np.array([size for _, size in found], np.int64).reshape(-1, 2)
            self._boxes, self._whole = find_boxes(self._plan, self._draws, self._size)
            boxes: Any = map(tuple, self._boxes.tolist())
            self._clips += [(video, box) for (video, _), box in zip(found, boxes, strict=True)]
        return super().scan(rows, pool)

    def sizes(self, rows: IntArray) -> IntArray:
        return self._size[self.find_places(rows)]

    def origins(self, rows: IntArray) -> IntArray | None:
        return self._boxes[self.find_places(rows), :2]

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return the frames of all clips: on the host an array for each, on a GPU one tensor if possible."""
        clips: list[torch.Tensor] = self.take(rows)
        if clips[0].device.type == "cpu":
            return [frame for clip in clips for frame in clip.numpy()]
        for clip in clips:
            clip.record_stream(torch.cuda.current_stream(clip.device))  # made on the stream of a decoder
        return join_clips(clips, self._whole[self.find_places(rows)].tolist())


def join_clips(clips: Sequence[torch.Tensor], whole: Sequence[bool]) -> torch.Tensor | list[torch.Tensor]:
    """Return the frames of clips as one tensor if possible, and else one for each.

    Args:
        clips: ``(T, H, W, 3)`` each.
        whole: Which are of whole frames. The others are boxes, and no window shows what is beside a box.
    """
    if len({clip.shape for clip in clips}) == 1:
        return torch.cat(list(clips))
    shape = len(clips), *(max(sides) for sides in zip(*(clip.shape for clip in clips), strict=True))
    if any(is_whole and clip.shape != shape[1:] for clip, is_whole in zip(clips, whole, strict=True)):
        return [frame for clip in clips for frame in clip]
    joined = clips[0].new_empty(shape)
    for place, clip in zip(joined, clips, strict=True):
        place[:, : clip.shape[1], : clip.shape[2]] = clip
    return joined.flatten(0, 1)
