"""Frames that an engine decodes get the colours that PyAV gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from helpers import videos

from torchdali.datasets.video.colors import find_colors
from torchdali.datasets.video.probe import probe

SPACES = {"BT.709": 1, "not told": 2, "FCC": 4, "BT.601": 5, "SMPTE 240M": 7, "BT.2020": 9}


def write(path: Path, space: int, color_range: int) -> Path:
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = space, color_range
        for picture in videos.pan(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("color_range", [1, 2])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_colors_are_those_of_pyav(tmp_path: Path, space: int, color_range: int) -> None:
    path = write(tmp_path / "video.mp4", space, color_range)
    video = probe(str(path))
    assert video.colors[0] == space
    assert (video.colors[1] == 2) is (color_range == 2)
    colors = find_colors(*video.colors)
    assert colors
    ours, theirs = colors.convert(torch.from_numpy(videos.read_nv12(path))).numpy(), videos.decode(path)
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= 2
    assert difference.mean() < 0.5


def test_many_frames_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    colors = find_colors(1, 1)
    assert colors
    frames = torch.randint(256, (5, 12, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = colors.convert(frames)
    monkeypatch.setattr("torchdali.datasets.video.colors._CHUNK", 2 * 8 * 6)
    assert torch.equal(colors.convert(frames), whole)


def test_what_cannot_be_converted_is_told() -> None:
    assert find_colors(8, 1) is None  # YCgCo, which PyAV refuses, too
    colors = find_colors(1, 1)
    assert colors
    with pytest.raises(ValueError, match="even height and width, got 5x6"):
        colors.convert(torch.zeros(1, 8, 6, dtype=torch.uint8))
