"""Clips of video files, which threads decode before their batch's turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import torch

from torchdali.datasets.video.clips import ClipSource
from torchdali.datasets.video.decoding import Decoders, HostDecoders
from torchdali.datasets.video.device_decoding import DeviceDecoders, find_engine
from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.decoded import DecodedBatch, DecodingReader
from torchdali.sources import Source
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import IntArray

__all__ = ["ClipReader"]

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

    def describe_decoding(self) -> str:
        if isinstance(self._decoders, DeviceDecoders):
            return self._decoders.describe()
        reason = find_engine(self._device) if self._device.type == "cuda" else ""
        return "PyAV, in threads of this process" + (f": {reason}" if reason else "")

    def bind_draws(self, draws: Draws, choose_frames: Callable[[int], IntArray]) -> Reader:
        numbers = draws.select_position(_START).uniform(1)[:, 0].tolist()
        return _ClipBatch(self, choose_frames(self.source.num_frames), numbers)

    def decode(self, row: int, chosen: IntArray, number: float) -> torch.Tensor:
        """Return ``(T, H, W, 3)`` the frames of a clip.

        Args:
            row: The clip.
            chosen: Which of its frames.
            number: The random number of its start.

        Raises:
            SampleError: One of them cannot be decoded.
        """
        if row in self._replaced:
            device = self._device if self.is_resident else torch.device("cpu")
            return torch.zeros(len(chosen), *self._replaced[row], 3, dtype=torch.uint8, device=device)
        source, place = self.source.locate(row)
        dataset = cast("ClipSource", source).dataset
        video = dataset.get_video(place)
        with self.blame(row, "decoded"):
            return self._decoders.decode(video, dataset.choose_frames(place, video, number)[chosen])

    def read_size(self, row: int) -> tuple[int, int] | None:
        source, place = self.source.locate(row)
        video = cast("ClipSource", source).dataset.get_video(place)
        return None if video.fault else video.size

    @property
    def sample_bytes(self) -> int:
        dataset = cast("ClipSource", self.source.locate(0)[0]).dataset
        return 3 * dataset.frames * dataset.max_pixels

    def close(self) -> None:
        self._decoders.close()


class _ClipBatch(DecodedBatch):
    """The clips of one batch.

    Args:
        owner: The reader of the whole source.
        chosen: The frames of each clip that the transforms take.
        numbers: The random number of each clip's start.
    """

    def __init__(self, owner: ClipReader, chosen: IntArray, numbers: Sequence[float]) -> None:
        super().__init__(owner.source, lambda row, place: owner.decode(row, chosen, numbers[place]))

    def sizes(self, rows: IntArray) -> IntArray:
        return np.array([clip.shape[1:3] for clip in self.take(rows)], np.int64).reshape(-1, 2)

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return the frames of all clips: on the host an array for each, on a GPU one tensor if they have one size."""
        clips: list[torch.Tensor] = self.take(rows)
        if clips[0].device.type == "cpu":
            return [frame for clip in clips for frame in clip.numpy()]
        for clip in clips:
            clip.record_stream(torch.cuda.current_stream(clip.device))  # made on the stream of a decoder
        is_even = len({clip.shape for clip in clips}) == 1
        return torch.cat(clips) if is_even else [frame for clip in clips for frame in clip]
