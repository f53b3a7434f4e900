"""Small video files, written by PyAV, and their frames as PyAV decodes them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import PIL.Image
import skimage.data

Frames = npt.NDArray[np.uint8]


def pan(count: int, height: int = 64, width: int = 96, name: str = "coffee") -> list[Frames]:
    """What a camera sees that moves over a photograph."""
    picture = np.asarray(PIL.Image.fromarray(getattr(skimage.data, name)()).resize((200, 130)))
    steps = [(3 * i % (130 - height), 5 * i % (200 - width)) for i in range(count)]
    return [np.ascontiguousarray(picture[y : y + height, x : x + width]) for y, x in steps]


def write(
    path: Path,
    frames: list[Frames],
    codec: str = "libx264",
    group: int = 12,
    times: list[int] | None = None,
    rotation: int = 0,
) -> Path:
    """Write a video of 30 frames a second, or with a time in milliseconds for each frame."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=30)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.gop_size = group
        if codec in ("libx264", "mpeg4"):
            stream.codec_context.max_b_frames = 2
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_sound(path: Path) -> Path:
    """Write a tenth of a second of silence, without a picture."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_nothing(path: Path) -> Path:
    """Write a file with a track of pictures that has none."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        container.start_encoding()
    return path


def decode(path: Path) -> Frames:
    """All frames of a video, ``(T, H, W, 3)``."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def read_nv12(path: Path) -> Frames:
    """All frames as an engine decodes them: rows of luma, and under them rows of pairs of chroma values."""
    frames: list[Frames] = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            luma, *chroma = (
                np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
                for plane in frame.planes
            )
            frames.append(np.concatenate([luma, np.stack(chroma, -1).reshape(len(chroma[0]), -1)]))
    return np.stack(frames)


def shown(path: Path) -> list[float]:
    """The seconds at which the frames of a video are shown."""
    with av.open(str(path)) as container:
        return [float(frame.time) for frame in container.decode(video=0)]
