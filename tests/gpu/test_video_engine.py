"""A GPU's video engine: its frames are PyAV's, by number, and it leaves no session behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import videos
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import VideoClips
from torchdali.datasets.video.device_decoding import DeviceDecoders, find_engine
from torchdali.datasets.video.probe import probe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

KINDS: dict[str, dict[str, Any]] = {
    "h264.mp4": {},
    "other.mp4": {},
    "hevc.mp4": {"codec": "libx265"},
    "turned.mp4": {"rotation": 90},
    "h264.mkv": {},
    "vp9.webm": {"codec": "libvpx-vp9"},
    "mpeg4.avi": {"codec": "mpeg4"},
    "varying.mp4": {"times": np.cumsum([20 + 13 * (i % 4) for i in range(70)]).tolist()},
}
COUNT = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    for number, (name, options) in enumerate(KINDS.items()):
        pictures = videos.pan(COUNT, 128, 160, ("coffee", "chelsea")[number % 2])
        videos.write(root / name, pictures, group=30, **options)
    return root


@pytest.fixture
def device() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if why := find_engine(device):
        pytest.skip(why)
    return device


def test_frames_are_those_of_pyav(folder: Path, device: torch.device) -> None:
    decoders, draws = DeviceDecoders(device), np.random.default_rng(0)
    for turn in range(2):
        for name in KINDS:
            video, whole = probe(str(folder / name)), videos.decode(folder / name)
            whole = np.rot90(whole, video.rotation // 90, (1, 2))
            for frames in ([0], [COUNT - 1], [9, 9, 3], *draws.integers(0, COUNT, (4, 8)), np.arange(20, 52, 2)):
                found = decoders.decode(video, np.array(frames))
                assert found.device == device
                difference = (found.cpu().float() - torch.from_numpy(whole[frames].copy()).float()).abs()
                assert difference.mean() < 2, (turn, name, frames)
    assert not any("h264" in reason for reason in decoders.refused)
    assert sum(decoders.refused.values()) < len(KINDS) - 2, decoders.describe()
    decoders.close()


def test_boxes_are_parts_of_whole_frames(folder: Path, device: torch.device) -> None:
    frames, decoders = np.array([40, 22, 22, 61]), DeviceDecoders(device)
    for name in KINDS:
        video, first = probe(str(folder / name)), DeviceDecoders(device)
        whole = decoders.decode(video, frames)
        for top, left, bottom, right in (
            (0, 0, *video.size),
            (6, 10, 50, 72),
            (video.size[0] - 2, 0, video.size[0], 2),
        ):
            for decoder in (first, decoders):  # the first clip of a kind is decoded in two ways
                pixels = decoder.decode(video, frames, (top, left, bottom, right))
                assert torch.equal(pixels, whole[:, top:bottom, left:right]), (name, top, left)
                assert pixels.untyped_storage().nbytes() == pixels.numel()
            first.close()
    assert not any("sides" in reason or "h264" in reason for reason in decoders.refused)
    decoders.close()


def test_batches_are_dataloaders(folder: Path, device: torch.device) -> None:
    chain = v2.Compose([v2.CenterCrop(96), v2.RandomHorizontalFlip(1.0)])
    rows = [(folder / name, number) for number, name in enumerate(KINDS)]
    dataset = VideoClips(rows, frames=8, stride=3, clips=2, transform=chain)
    loader = DALILoader(dataset, 4, device=device)
    for _ in range(2):
        for (ours, labels), (theirs, their_labels) in zip(loader, DataLoader(dataset, 4), strict=True):
            assert torch.equal(labels.cpu(), their_labels)
            assert (ours.cpu().float() - theirs.float()).abs().mean() < 2
    free = torch.cuda.mem_get_info(device)[0]
    for _ in range(20):
        for _ in loader:
            break
    loader.close()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(device)[0] > free - 2**28


def test_a_bad_file_is_an_error_of_its_sample(folder: Path, tmp_path: Path, device: torch.device) -> None:
    data = (folder / "h264.mp4").read_bytes()
    (tmp_path / "text.mp4").write_bytes(b"no video")
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    rows = [(folder / "h264.mp4", 0), (tmp_path / "text.mp4", 1), (tmp_path / "cut.mp4", 2)]
    dataset = VideoClips(rows, frames=4, stride=2, clips=1, transform=v2.CenterCrop(96))
    loader = DALILoader(dataset, 3, device=device, on_error="replace")
    clips, labels = next(iter(loader))
    assert labels.tolist() == [0, 1, 2]
    assert clips[0].any()
    assert not clips[1:].any()
    assert [error.index for error in loader.errors] == [1, 2]
