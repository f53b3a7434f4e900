"""``torchdali check`` of videos: decode all frames of each file with PyAV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchdali.datasets.video.clips import VIDEO_SUFFIXES
from torchdali.datasets.video.probe import ANIMATIONS, Video, probe, require_av
from torchdali.errors import OptionError
from torchdali.runtime.machine import count_available_cores
from torchdali.tools.commands.files import Problem
from torchdali.tools.commands.shards import make_progress

__all__ = ["find_video_problems", "is_video_name"]

_CONTAINERS = {
    "mov,mp4,m4a,3gp,3g2,mj2": (".mp4", ".m4v", ".mov"),
    "matroska,webm": (".mkv", ".webm"),
    "avi": (".avi",),
}
"""The suffixes of some of FFmpeg's formats. The other formats go by many names."""


def is_video_name(path: str) -> bool:
    """Return whether a file is named as a video. Animations are checked as images."""
    return path.lower().endswith(VIDEO_SUFFIXES) and not path.lower().endswith(ANIMATIONS)


def find_video_problems(paths: Sequence[str]) -> list[Problem]:
    """Decode all frames of some videos. Return the problems.

    Raises:
        OptionError: PyAV is not installed.
    """
    try:
        require_av()
    except ModuleNotFoundError as error:
        raise OptionError(str(error)) from error
    result: list[Problem] = []
    with make_progress() as bar, ThreadPoolExecutor(count_available_cores(), "torchdali-check") as threads:
        task = bar.add_task("checked", total=len(paths))
        for problems in threads.map(_check_video, paths):
            result += problems
            bar.advance(task)
    return result


def _check_video(path: str) -> list[Problem]:
    try:
        if not Path(path).stat().st_size:
            return [Problem(path, "empty", "it has no bytes")]
        video = probe(path)
        if video.fault:
            return [Problem(path, "no video", video.fault)]
        found = [*_check_header(video)]
        if "truncated" not in dict(found):
            found += _check_frames(video)
        return [Problem(path, *one) for one in found]
    except OSError as error:
        return [Problem(path, "unreadable", f"it cannot be read ({error.strerror})")]


def _check_header(video: Video) -> Iterator[tuple[str, str]]:
    """Compare the header of a file with its name, and with the length that it has."""
    count, end = 0, 0.0
    with require_av().open(video.path) as container:
        stream: Any = container.streams.video[0]
        kind, told, frames = container.format.name, (container.duration or 0) / 1e6, stream.frames
        for packet in container.demux():
            count += packet.stream.index == stream.index and packet.size > 0
            if packet.pts is not None:
                end = max(end, float(packet.pts * packet.time_base))  # when the last picture or sound begins
    suffixes = _CONTAINERS.get(kind)
    if suffixes and not video.path.lower().endswith(suffixes):
        yield "mislabelled", f"it is named as {Path(video.path).suffix}, and its content is {' or '.join(suffixes)}"
    if count < frames:
        yield "truncated", f"its header tells {frames:,} frames, and it has {count:,}"
    elif kind == "matroska,webm" and told - end > max(0.1 * told, 0.1):  # whose header does not count frames
        yield "truncated", f"its header tells {told:.1f} s, and it ends after {end:.1f} s"


def _check_frames(video: Video) -> Iterator[tuple[str, str]]:
    """Decode all frames, more strictly than a loader does."""
    av, count = require_av(), 0
    with av.open(video.path) as container:
        stream: Any = container.streams.video[0]
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"err_detect": "explode"}
        try:
            for frame in container.decode(stream):
                size = (frame.width, frame.height) if video.rotation % 180 else (frame.height, frame.width)
                if size != video.size:
                    found, first = ("x".join(map(str, sides)) for sides in (size, video.size))
                    yield "corrupt", f"frame {count:,} has {found} pixels, and the first one has {first}"
                    return
                count += 1
        except av.error.FFmpegError as error:
            yield "corrupt", f"a frame near number {count:,} is damaged ({error.strerror}); PyAV may still show it"
            return
    if count < len(video):
        yield "corrupt", f"{count:,} of {len(video):,} frames can be decoded"
