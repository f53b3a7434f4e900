"""The index of video files: lengths, times and key frames, read once and kept in a file."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from torchdali.datasets.index import PROGRESS_INTERVAL, find_index, lock_index, show_progress, write_arrays
from torchdali.datasets.video.probe import Video, probe, require_av
from torchdali.sources.index import map_arrays
from torchdali.transforms.spec import IntArray

__all__ = ["VideoIndex", "open_video_index"]

_CONTENT = "videos, version 2"
_THREADS = 8
_COLUMNS = ("stamps", "shape", "colors", "bases", "ends", "times", "key_ends", "keys", "texts")


class VideoIndex:
    """The videos of a list, by their number. The arrays are mapped into memory.

    Args:
        paths: The files.
        arrays: The columns.

    Attributes:
        max_pixels: Number of pixels of the largest frames.
        lengths: ``(N,)`` the number of frames of each video; 0 for a bad one.
    """

    def __init__(self, paths: Sequence[str], arrays: dict[str, npt.NDArray[Any]]) -> None:
        self._paths, self._arrays = paths, arrays
        self.lengths: IntArray = np.diff(arrays["ends"], prepend=0)
        self.max_pixels = int((arrays["shape"][:, 0] * arrays["shape"][:, 1]).max())
        # Times with equal distances are stored as the first two.
        regular = arrays["shape"][:, 4]
        self.lengths = np.where(regular > 0, regular, self.lengths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> Video:
        arrays = self._arrays
        height, width, rotation, is_counted, regular = arrays["shape"][number].tolist()
        times: IntArray = _cut(arrays["times"], arrays["ends"], number)
        if regular:
            times = int(times[0]) + int(times[1] - times[0]) * np.arange(int(regular))
        codec, pixel_format, fault = str(arrays["texts"][number]).split("\n", 2)
        return Video(
            self._paths[number],
            cast("tuple[int, int]", tuple(arrays["stamps"][number].tolist())),
            (height, width),
            rotation,
            Fraction(*arrays["bases"][number].tolist()),
            times,
            _cut(arrays["keys"], arrays["key_ends"], number),
            bool(is_counted),
            codec,
            pixel_format,
            cast("tuple[int, int]", tuple(arrays["colors"][number].tolist())),
            fault,
        )


def _cut(values: npt.NDArray[Any], ends: IntArray, number: int) -> npt.NDArray[Any]:
    return values[ends[number - 1] if number else 0 : ends[number]]


def open_video_index(file: str | os.PathLike[str] | None, paths: Sequence[str]) -> VideoIndex:
    """Map the index of some videos. Make it first if there is none.

    Args:
        file: The index; None for one beside the first video.
        paths: The videos.

    Raises:
        ModuleNotFoundError: PyAV is not installed, and there is no index.
        ValueError: The index is of other videos, or damaged.
        OSError: It cannot be read or written.
    """
    names = "\0".join(os.path.basename(path) for path in paths).encode(errors="surrogateescape")  # noqa: PTH119
    file = find_index(paths, _CONTENT) if file is None else Path(file).expanduser()
    if not file.exists():
        require_av()
        with lock_index(file):
            if not file.exists():
                _write(file, paths, names)
    arrays, _ = map_arrays(file, "r")
    if "names" not in arrays or arrays["names"].tobytes() != names:
        raise ValueError(f"{file} is the index of other videos than {paths[0]} and its like; give another index=")
    if any(name not in arrays for name in _COLUMNS):
        raise ValueError(f"{file} is damaged: it lacks an array; delete it, and it is made again")
    return VideoIndex(paths, arrays)


def _write(file: Path, paths: Sequence[str], names: bytes) -> None:
    videos: list[Video] = []
    shown = 0.0
    with ThreadPoolExecutor(_THREADS) as pool:
        for video in pool.map(probe, paths):
            videos.append(video)
            if time.monotonic() - shown > PROGRESS_INTERVAL:
                shown = show_progress(f"{len(videos):,} of {len(paths):,} videos")
    show_progress(f"{len(videos):,} videos\n")
    kept = [_shorten(video) for video in videos]
    shape = [(*x.size, x.rotation, x.is_counted, regular) for x, (_, regular) in zip(videos, kept, strict=True)]
    arrays: dict[str, npt.NDArray[Any]] = {
        "names": np.frombuffer(names, np.uint8),
        "stamps": np.array([video.stamp for video in videos], np.int64).reshape(-1, 2),
        "shape": np.array(shape, np.int64).reshape(-1, 5),
        "colors": np.array([video.colors for video in videos], np.int64).reshape(-1, 2),
        "bases": np.array([(x.time_base.numerator, x.time_base.denominator) for x in videos], np.int64).reshape(-1, 2),
        "ends": np.cumsum([len(times) for times, _ in kept], dtype=np.int64),
        "times": np.concatenate([times for times, _ in kept]),
        "key_ends": np.cumsum([len(video.keys) for video in videos], dtype=np.int64),
        "keys": np.concatenate([video.keys for video in videos]),
        "texts": np.array([f"{x.codec}\n{x.pixel_format}\n{x.fault}" for x in videos], np.str_),
    }
    write_arrays(file, arrays)


def _shorten(video: Video) -> tuple[IntArray, int]:
    """Return the times to store, and the number of frames if their distances are equal, or else 0."""
    gaps = np.diff(video.times)
    is_equal = len(gaps) > 1 and bool((gaps == gaps[0]).all())
    return (video.times[:2], len(video)) if is_equal else (video.times, 0)
