"""What must be known of a video file to decode any of its frames: read once, by PyAV."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from torchdali.transforms.spec import IntArray

__all__ = ["ANIMATIONS", "Video", "VideoError", "has_changed", "probe", "require_av", "stat_video"]

ANIMATIONS = (".gif", ".webp")
"""Suffixes of files that PIL decodes."""


def _no_times() -> IntArray:
    return np.empty(0, np.int64)


def _no_keys() -> IntArray:
    return np.empty((0, 2), np.int64)


class VideoError(OSError):
    """A video file, or a frame of it, cannot be decoded."""


@dataclass(frozen=True)
class Video:
    """A video file as it was when it was probed.

    Attributes:
        path: The file.
        stamp: Its length in bytes, and the time of its last change.
        size: Height and width of a frame in pixels, after the rotation.
        rotation: How far frames must be turned counterclockwise, in degrees.
        time_base: Seconds of a unit of time.
        times: ``(N,)`` when each frame is shown, in units, increasing.
        keys: ``(K, 2)`` for each frame that can be decoded without others: when it is shown, and where to seek.
        is_counted: Whether the times do not find frames, so that they must be counted from the first one.
        codec: The name of the codec in FFmpeg.
        pixel_format: The name of the pixel format in FFmpeg.
        colors: FFmpeg's numbers of the colour space and of the range; 2 is a space that the file does not tell.
        fault: Why it cannot be decoded; empty if it can.
    """

    path: str
    stamp: tuple[int, int]
    size: tuple[int, int] = (0, 0)
    rotation: int = 0
    time_base: Fraction = Fraction(1)
    times: IntArray = field(default_factory=_no_times)
    keys: IntArray = field(default_factory=_no_keys)
    is_counted: bool = False
    codec: str = ""
    pixel_format: str = ""
    colors: tuple[int, int] = (2, 0)
    fault: str = ""

    def __len__(self) -> int:
        return len(self.times)

    @property
    def seconds(self) -> npt.NDArray[np.floating[Any]]:
        """``(N,)`` when each frame is shown, in seconds after the first."""
        return (self.times - self.times[:1]) * float(self.time_base)

    @property
    def is_regular(self) -> bool:
        """Whether all frames are shown equally long, up to the rounding of times."""
        gaps: Any = np.diff(self.times)
        return not len(gaps) or int(gaps.max() - gaps.min()) <= 1

    def find_key(self, frame: int) -> IntArray:
        """Return the last row of ``keys`` that is not after a frame."""
        is_before: Any = self.keys[:, 0] <= self.times[frame]
        return self.keys[max(int(is_before.sum()) - 1, 0)]


def require_av() -> Any:
    """Import PyAV.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        return import_module("av")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "torchdali.datasets.VideoClips needs PyAV: pip install 'torchdali[video]', or pip install av", name="av"
        ) from error


def stat_video(path: str) -> tuple[int, int]:
    """Return the length of a file in bytes, and the time of its last change in nanoseconds."""
    status = os.stat(path)  # noqa: PTH116 - of many texts
    return status.st_size, status.st_mtime_ns


def has_changed(video: Video) -> bool:
    """Return whether a file is another one than was probed, or missing."""
    try:
        return stat_video(video.path) != video.stamp
    except OSError:
        return True


def probe(path: str) -> Video:
    """Read what must be known of a video. A file that is none has a :attr:`Video.fault`."""
    try:
        stamp = stat_video(path)
    except OSError as error:
        return Video(path, (0, 0), fault=f"it cannot be opened ({error.strerror})")
    try:
        video = _probe_animation(path, stamp) if path.lower().endswith(ANIMATIONS) else _probe_by_av(path, stamp)
    except VideoError as error:
        return Video(path, stamp, fault=str(error))
    except Exception as error:  # noqa: BLE001 - PyAV and PIL raise nearly any exception for damaged files
        why = getattr(error, "strerror", None) or error
        return Video(path, stamp, fault=f"it cannot be read as a video ({type(error).__name__}: {why})")
    return video if len(video) else Video(path, stamp, fault="it has no frame")


def _probe_by_av(path: str, stamp: tuple[int, int]) -> Video:
    av = require_av()
    with av.open(path) as container:
        if not container.streams.video:
            raise VideoError("it has no video, only sound" if container.streams.audio else "it has no video")
        stream = container.streams.video[0]
        packets = [
            (packet.pts, packet.dts, packet.is_keyframe, packet.is_discard)
            for packet in container.demux(stream)
            if packet.size
        ]
        codec, pixel_format, time_base = stream.codec_context.name, stream.codec_context.pix_fmt, stream.time_base
    first = _decode_first(av, path)
    rotation = first.rotation % 360
    if rotation % 90:
        raise VideoError(f"its frames must be turned by {rotation} degrees, which is no multiple of 90")
    size = (first.width, first.height) if rotation % 180 else (first.height, first.width)
    times, is_counted = _read_times(packets), codec == "vp8"  # whose hidden frames have packets, too
    if is_counted or times is None:
        times, is_counted = _decode_times(av, path)
    keys = [(pts, pts if dts is None else dts) for pts, dts, is_key, _ in packets if is_key and pts is not None]
    return Video(
        path,
        stamp,
        size,
        rotation,
        Fraction(time_base),
        times,
        np.array(sorted(keys), np.int64).reshape(-1, 2),
        is_counted or not keys,
        codec,
        pixel_format or "",
        (int(first.colorspace), int(first.color_range)),
    )


def _decode_first(av: Any, path: str) -> Any:
    with av.open(path) as container:
        for frame in container.decode(video=0):
            return frame
    raise VideoError("it has no frame")


def _read_times(packets: list[tuple[Any, ...]]) -> IntArray | None:
    """Return the times of frames as their packets tell them; None if the decoder may show other frames."""
    if not packets or not packets[0][2] or any(pts is None or is_hidden for pts, _, _, is_hidden in packets):
        return None
    times = np.sort(np.array([pts for pts, *_ in packets], np.int64))
    # A frame before the first key frame needs one that is missing.
    is_whole = times[0] == packets[0][0] and (np.diff(times) > 0).all()
    return times if is_whole else None


def _decode_times(av: Any, path: str) -> tuple[IntArray, bool]:
    """Decode a whole file. Return the times of its frames, and whether they must be counted."""
    with av.open(path) as container:
        shown = [frame.pts for frame in container.decode(video=0)]
    if any(pts is None for pts in shown):
        return np.arange(len(shown)), True
    times = np.array(shown, np.int64)
    return (times, False) if (np.diff(times) > 0).all() else (np.arange(len(shown)), True)


def _probe_animation(path: str, stamp: tuple[int, int]) -> Video:
    """Probe a GIF or WebP, by the duration of each picture in milliseconds."""
    opened: Any = PIL.Image.open(path)
    with opened as image:
        durations: list[int] = []
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            image.load()
            durations.append(max(int(image.info.get("duration", 0)), 1))
        times = np.cumsum([0, *durations[:-1]])
        size, name = (image.height, image.width), image.format or ""
    return Video(path, stamp, size, 0, Fraction(1, 1000), times, is_counted=True, codec=name.lower())
