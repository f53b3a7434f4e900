"""Decoders of video files on the CPU, and the ones that are kept open."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from torchdali.datasets.video.probe import ANIMATIONS, Video, VideoError, has_changed, require_av, stat_video
from torchdali.transforms.spec import IntArray

__all__ = ["Box", "Decoders", "FrameDecoder", "HostDecoders", "open_decoder"]

_OPEN = 8
"""Files that a pool of decoders keeps open."""

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Top, left, bottom and right of a part of frames, as they are shown."""


class Decoders(Protocol):
    """Decodes frames of video files, in several threads at once."""

    def decode(self, video: Video, frames: IntArray, box: Box | None = None) -> torch.Tensor:
        """Return ``(T, H, W, 3)`` uint8 frames of a video, or what a box shows of them.

        Args:
            video: The video.
            frames: ``(T,)`` the numbers of the frames, which may repeat.
            box: The part of each frame. Where it does not end with the frame, its sides are even. None is the frame.

        Raises:
            VideoError: A frame cannot be decoded.
            OSError: The file cannot be read.
        """
        ...

    def close(self) -> None:
        """Close all files, as soon as no thread decodes from them."""
        ...


class FrameDecoder(Protocol):
    """An open video file, which one thread at a time reads."""

    def read(self, frames: list[int]) -> Iterator[Pixels]:
        """Yield frames by their numbers, which increase."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class HostDecoders:
    """Decoders of PyAV and PIL. It keeps the files open that were used last.

    Args:
        limit: How many files it keeps open.
    """

    def __init__(self, limit: int = _OPEN) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, FrameDecoder] = OrderedDict()
        self._process = os.getpid()
        self._generation = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_limit": self._limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_limit"])

    def decode(self, video: Video, frames: IntArray, box: Box | None = None) -> torch.Tensor:
        """See :class:`Decoders`."""
        top, left, bottom, right = box or (0, 0, *video.size)
        generation, decoder = self._take(video)
        try:
            numbers, places = np.unique(frames, return_inverse=True)
            pixels = np.empty((len(numbers), bottom - top, right - left, 3), np.uint8)
            for i, frame in enumerate(decoder.read(numbers.tolist())):
                pixels[i] = _turn(video, int(numbers[i]), frame)[top:bottom, left:right]
        except BaseException:
            decoder.close()
            raise
        self._put_back(video, decoder, generation)
        return torch.from_numpy(pixels if np.array_equal(numbers, frames) else pixels[places.reshape(-1)])

    def _take(self, video: Video) -> tuple[int, FrameDecoder]:
        if self._process != os.getpid():  # a forked process shares the positions of files that the other one opened
            self.__init__(self._limit)
        with self._lock:
            generation, decoder = self._generation, self._idle.pop(video.path, None)
        if decoder and has_changed(video):
            decoder.close()
            decoder = None
        return generation, decoder or open_decoder(video)

    def _put_back(self, video: Video, decoder: FrameDecoder, generation: int) -> None:
        with self._lock:
            closed = [decoder]
            if generation == self._generation:
                closed = [self._idle[video.path]] if video.path in self._idle else []
                self._idle[video.path] = decoder
                self._idle.move_to_end(video.path)
                if len(self._idle) > self._limit:
                    closed.append(self._idle.popitem(last=False)[1])
        for one in closed:
            one.close()

    def close(self) -> None:
        """See :class:`Decoders`."""
        with self._lock:
            self._generation += 1  # a thread that decodes now closes its file itself
            closed = list(self._idle.values())
            self._idle.clear()
        for decoder in closed:
            decoder.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()


def _turn(video: Video, number: int, frame: Pixels) -> Pixels:
    """Return a frame as the file says that it is shown."""
    turned = np.rot90(frame, video.rotation // 90)
    if turned.shape[:2] != video.size:
        sizes = "{}x{} pixels, and the first one has {}x{}".format(*turned.shape[:2], *video.size)
        raise VideoError(f"frame {number} has {sizes}")
    return turned


def open_decoder(video: Video) -> FrameDecoder:
    """Open a video file that has not changed since it was probed.

    Raises:
        VideoError: It is bad, or has changed.
        OSError: It cannot be read.
    """
    is_missing = bool(video.fault) and not Path(video.path).exists()  # it keeps its fault
    if not is_missing and stat_video(video.path) != video.stamp:
        raise VideoError("it has changed since the index was made; delete the index, and it is made again")
    if video.fault:
        raise VideoError(video.fault)
    return _AnimationDecoder(video) if video.path.lower().endswith(ANIMATIONS) else _AvDecoder(video)


class _AvDecoder:
    """A file that PyAV decodes, in the thread that reads."""

    def __init__(self, video: Video) -> None:
        self._av, self._video = require_av(), video
        # PyAV's own one belongs to a thread, and its threads are missing in a forked process, which waits for them
        # (no issue is known; seen with PyAV 19).
        self._colors: Any = self._av.video.reformatter.VideoReformatter()
        self._open()

    def _open(self) -> None:
        try:
            self._container = self._av.open(self._video.path)
        except self._av.error.FFmpegError as error:
            raise VideoError(f"it cannot be opened ({error.strerror})") from error
        self._stream = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1  # torchdali has threads of its own
        self._frames = iter(self._container.decode(self._stream))
        self._next = 0  # all frames before this one were passed

    def read(self, frames: list[int]) -> Iterator[Pixels]:
        for number in frames:
            try:
                yield self._colors.reformat(self._find(number), format="rgb24", threads=1).to_ndarray()
            except self._av.error.FFmpegError as error:
                raise VideoError(f"frame {number} cannot be decoded ({error.strerror})") from error

    def _find(self, number: int) -> Any:
        video = self._video
        self._approach(number)
        if video.is_counted:
            for frame in self._frames:
                self._next += 1
                if self._next > number:
                    return frame
        else:
            wanted = int(video.times[number])
            for frame in self._frames:
                if frame.pts is not None and frame.pts >= wanted:
                    if frame.pts > wanted:
                        break
                    self._next = number + 1
                    return frame
        self._next = len(video) + 1  # seek before the next one
        raise VideoError(f"frame {number} of {len(video)} is missing")

    def _approach(self, number: int) -> None:
        """Seek to the key frame from which a frame can be decoded, unless reading on is as good."""
        video = self._video
        if video.is_counted:
            if number < self._next:
                self.close()
                self._open()
            return
        key = video.find_key(number)
        first = np.count_nonzero(video.times < key[0])
        if not first <= self._next <= number:
            self._container.seek(int(key[1]), stream=self._stream)
            self._frames = iter(self._container.decode(self._stream))
            self._next = first

    def close(self) -> None:
        self._frames = iter(())
        self._container.close()


class _AnimationDecoder:
    """A GIF or WebP, which PIL decodes from its first picture on."""

    def __init__(self, video: Video) -> None:
        self._image: Any = PIL.Image.open(video.path)

    def read(self, frames: list[int]) -> Iterator[Pixels]:
        for number in frames:
            try:
                self._image.seek(number)
                yield cast("Pixels", np.asarray(self._image.convert("RGB")))
            except (OSError, EOFError, SyntaxError, ValueError) as error:
                raise VideoError(f"frame {number} cannot be decoded ({error})") from error

    def close(self) -> None:
        with suppress(Exception):
            self._image.close()
