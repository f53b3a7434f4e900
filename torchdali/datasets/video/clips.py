"""Clips of videos as a dataset: which frames each sample has."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from torchdali.datasets.base import find_row
from torchdali.datasets.rows import Row, list_rows
from torchdali.datasets.video.decoding import HostDecoders
from torchdali.datasets.video.index import open_video_index
from torchdali.datasets.video.probe import Video
from torchdali.sources import InputKind, Source, Spec
from torchdali.sources.paths import to_int64
from torchdali.transforms.spec import IntArray

__all__ = ["VIDEO_SUFFIXES", "ClipSource", "VideoClips"]

VIDEO_SUFFIXES = (
    ".mp4",
    ".mkv",
    ".webm",
    ".avi",
    ".mov",
    ".m4v",
    ".mpg",
    ".mpeg",
    ".ts",
    ".wmv",
    ".flv",
    ".gif",
    ".webp",
)
"""Suffixes of the files that are taken from a folder, in lower case."""

_SLACK = 1e-6
"""Seconds by which times may differ because of rounding."""

ClipChoice = Literal["random", "uniform"] | int


class VideoClips(Dataset[Any]):
    """Clips of video files, each some frames at equal distances. ``DataLoader`` and ``DALILoader`` take it.

    A sample is ``(video, label)`` with a ``tv_tensors.Video`` of the shape ``(frames, 3, H, W)``, RGB and uint8. The
    frames are those that PyAV decodes, turned as the file says. Samples of a list without labels are the video alone.

    The lengths, times and key frames of all files are read once, and kept in an index. A file that cannot be read is a
    sample that raises an error.

    Args:
        videos: A folder of class folders, as for ``ImageFolder``; a ``.csv`` or ``.parquet`` file; or a list of paths,
            of ``(path, label)``, or of ``(path, label, start, end)``. A file has the column ``file`` and, if you like,
            ``label``, ``start`` and ``end``, in seconds.
        frames: Number of frames of a clip.
        stride: Distance of its frames.
        clips: "random" takes one clip of each video, which begins at a random frame. "uniform" takes all clips of a
            video, one behind the other. A number takes so many at equal distances, and 1 the one in the middle.
        fps: Frames a second from which clips are taken. Each is the last one that is shown until its time. None takes
            the frames of the file as they are.
        transform: Called with each video.
        target_transform: Called with each label.
        index: The file of the index. None keeps it beside the first video.
        pad: Whether a clip that is longer than its video repeats the last frame.

    Attributes:
        classes: The names of the classes by label, of a folder; else empty.

    Raises:
        ModuleNotFoundError: PyAV is not installed.
        ValueError: An argument has no valid value, or ``pad`` is False and a video is too short.
        OSError: The index cannot be written.
    """

    def __init__(
        self,
        videos: str | os.PathLike[str] | Sequence[Any],
        frames: int = 16,
        stride: int = 2,
        clips: ClipChoice = "random",
        fps: float | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
        pad: bool = True,
    ) -> None:
        for name, value in (("frames", frames), ("stride", stride), ("clips", clips)):
            if not (type(value) is int and value > 0) and not (name == "clips" and value in ("random", "uniform")):
                words = "'random', 'uniform' or " if name == "clips" else ""
                raise ValueError(f"{name} must be {words}an int of at least 1, got {value!r}")
        if fps is not None and not fps > 0:
            raise ValueError(f"fps must be above 0, got {fps!r}")
        self.frames, self.stride, self.fps, self.pad = frames, stride, fps, pad
        self.clips: ClipChoice = clips
        self.transform, self.target_transform = transform, target_transform
        self.classes, self._rows = list_rows(videos, VIDEO_SUFFIXES, "videos", "video")
        self.paths: list[str] = list(dict.fromkeys(row.path for row in self._rows))
        self._index_file = index
        self._open()
        self._lay_out()
        self.decoders = HostDecoders()

    def _open(self) -> None:
        self._index = open_video_index(self._index_file, self.paths)

    def _lay_out(self) -> None:
        """Find which clips there are."""
        numbers = {path: number for number, path in enumerate(self.paths)}
        self._video: IntArray = np.array([numbers[row.path] for row in self._rows], np.int64)
        spans = [self._find_span(row, int(number)) for row, number in zip(self._rows, self._video, strict=True)]
        self._span: IntArray = np.array(spans, np.int64).reshape(-1, 2)
        counts = np.array([self._count_clips(int(end - start)) for start, end in spans], np.int64)
        self._row: IntArray = np.repeat(np.arange(len(counts)), counts)
        self._which: IntArray = np.arange(len(self._row)) - np.repeat(np.cumsum(counts) - counts, counts)
        labels = [row.label for row in self._rows]
        self.labels: IntArray | None = to_int64(labels)
        self.has_labels = any(label is not None for label in labels)

    def _find_span(self, row: Row, number: int) -> tuple[int, int]:
        """Return the first frame of a row, and the one behind its last, at the rate of the clips."""
        count = int(self._index.lengths[number])
        if not count:
            return 0, 0  # a bad file
        if self.fps is None and row.start is None and row.end is None:
            span = (0, count)
        else:
            seconds = self._index[number].seconds
            rate = self.fps
            if rate is None:
                low = int(np.searchsorted(seconds, (row.start or 0.0) - _SLACK))
                high = count if row.end is None else int(np.searchsorted(seconds, row.end - _SLACK))
            else:
                gap = seconds[-1] / (count - 1) if count > 1 else 1 / rate
                total = max(int((seconds[-1] + gap) * rate + _SLACK), 1)
                low = int(np.ceil((row.start or 0.0) * rate - _SLACK))
                high = total if row.end is None else min(total, int(np.ceil(row.end * rate - _SLACK)))
            span = (low, high)
        if span[0] >= span[1]:
            raise ValueError(f"{row.path} has no frame between its start {row.start} and its end {row.end}")
        if not self.pad and span[1] - span[0] < self._length:
            raise ValueError(
                f"{row.path} has {span[1] - span[0]} frames, and a clip takes {self._length}; leave it out, or give "
                "pad=True, which repeats the last one"
            )
        return span

    @property
    def _length(self) -> int:
        """The distance from the first frame of a clip to the one behind its last."""
        return (self.frames - 1) * self.stride + 1

    def _count_clips(self, count: int) -> int:
        if isinstance(self.clips, int):
            return self.clips
        if self.clips == "random" or not count:
            return 1
        step = self.frames * self.stride
        return max(-(-count // step) if self.pad else 1 + (count - self._length) // step, 1)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def max_pixels(self) -> int:
        """Number of pixels of the largest frames."""
        return self._index.max_pixels

    def get_video(self, index: int) -> Video:
        """Return the video of a clip."""
        return self._index[int(self._video[self._row[index]])]

    def find_rows(self, indices: IntArray) -> IntArray:
        """Return ``(N,)`` the rows of the list of videos that some clips are from."""
        return self._row[indices]

    def choose_frames(self, index: int, video: Video, number: float) -> IntArray:
        """Return ``(frames,)`` the numbers of a clip's frames in its file.

        Args:
            index: The clip.
            video: Its video.
            number: A number in [0, 1), which chooses the start of a random clip.
        """
        row = int(self._row[index])
        low, high = self._span[row].tolist()
        starts = max(high - low - self._length, 0) + 1
        if self.clips == "random":
            start = int(number * starts)
        elif not isinstance(self.clips, int):
            start = int(self._which[index]) * self.frames * self.stride
        elif self.clips == 1:
            start = (starts - 1) // 2
        else:
            start = int(self._which[index]) * (starts - 1) // (self.clips - 1)
        chosen = np.minimum(low + start + self.stride * np.arange(self.frames), max(high - 1, 0))
        if self.fps is None or not len(video):
            return chosen
        times = chosen / self.fps + _SLACK
        places: Any = np.searchsorted(video.seconds, times, "right")
        chosen: IntArray = np.maximum(places - 1, 0)
        return chosen

    def read_target(self, index: int) -> Any:
        """Return the label of a clip."""
        label = self._rows[int(self._row[index])].label
        return self.target_transform(label) if self.target_transform and self.has_labels else label

    def __getitem__(self, index: int) -> Any:
        """Return a sample, decoded here."""
        index = find_row(self, index)
        video = self.get_video(index)
        number = float(torch.rand(())) if self.clips == "random" else 0.0
        try:
            frames = self.decoders.decode(video, self.choose_frames(index, video, number))
        except OSError as error:
            raise OSError(f"{video.path}: {error}") from error
        clip: Any = tv_tensors.Video(frames.movedim(-1, -3))
        clip = self.transform(clip) if self.transform else clip
        return (clip, self.read_target(index)) if self.has_labels else clip

    def torchdali_source(self) -> Source:
        """Return the source that ``DALILoader`` reads."""
        return ClipSource(self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the index out. Another process maps it itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_index"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __repr__(self) -> str:
        return f"VideoClips({len(self.paths):,} videos, {self.frames} frames, stride {self.stride}, {self.clips!r})"


class ClipSource(Source):
    """The clips of a :class:`VideoClips`. The pipeline decodes them in threads of its own."""

    kind = InputKind.PIXELS
    spec = Spec("video")

    def __init__(self, dataset: VideoClips) -> None:
        self.dataset, self.transform = dataset, dataset.transform
        self.num_frames = dataset.frames
        self.is_pair = dataset.has_labels

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: IntArray) -> list[Any]:
        raise NotImplementedError  # ClipReader decodes clips, because their starts are random

    def target(self, row: int) -> Any:
        return self.dataset.read_target(row)

    def labels(self, rows: IntArray) -> IntArray | None:
        dataset = self.dataset
        if dataset.labels is None or dataset.target_transform:
            return None
        return dataset.labels[dataset.find_rows(rows)]

    def name(self, row: int) -> str:
        return self.dataset.get_video(row).path

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        return (image, target) if self.is_pair else image

    def describe(self) -> str:
        return f"{len(self):,} clips ({self.dataset!r})"
