"""torchvision's datasets of videos: VideoClips takes their files and labels, and DALI the videos of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import videos
from torch.utils.data import DataLoader
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import VideoClips

pytestmark = pytest.mark.timeout(60)

LENGTHS = {"run/a.avi": 6, "run/b.avi": 7, "walk/c.avi": 3, "walk/d.avi": 9}
CHAIN = [v2.CenterCrop(40), v2.RandomHorizontalFlip(1.0)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as these datasets have them, with the lists of a split that leaves one out."""
    root = tmp_path_factory.mktemp("torchvision")
    for name, count in LENGTHS.items():
        (root / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        videos.write(root / "train" / name, videos.pan(count, 48, 64), codec="mpeg4")
    (root / "lists").mkdir()
    kept = [name for name in LENGTHS if "b.avi" not in name]
    (root / "lists" / "trainlist01.txt").write_text("".join(f"{name} 1\n" for name in kept))
    for kind in ("run", "walk"):
        lines = [f"{Path(name).name} {1 if name in kept else 2}\n" for name in LENGTHS if name.startswith(kind)]
        (root / "lists" / f"{kind}_test_split1.txt").write_text("".join(lines))
    return root


def make(name: str, root: Path, **options: Any) -> Any:
    """Make a dataset as TorchCodec lets torchvision make it."""
    paths = [str(root / "train" / name) for name in LENGTHS]
    pts = [torch.arange(count) for count in LENGTHS.values()]
    known = {"video_paths": paths, "video_pts": pts, "video_fps": [30.0] * len(paths)}
    options |= {"frames_per_clip": 3, "step_between_clips": 3, "_precomputed_metadata": known}
    if name == "Kinetics":
        return datasets.Kinetics(root, **options)
    return getattr(datasets, name)(root / "train", str(root / "lists"), **options)


@pytest.mark.parametrize("name", ["HMDB51", "Kinetics", "UCF101"])
def test_files_labels_and_clips(root: Path, tmp_path: Path, name: str) -> None:
    theirs = make(name, root)
    rows = theirs.samples if name == "Kinetics" else [theirs.samples[i] for i in theirs.indices]
    options: Any = {"frames": 3, "stride": 1, "clips": "uniform", "pad": False, "index": tmp_path / "index.npz"}
    ours = VideoClips(rows, **options)
    assert len(ours) == len(theirs) == (8 if name == "Kinetics" else 6)
    clips: Any = theirs.video_clips
    for index in range(len(ours)):
        number, place = clips.get_clip_location(index)
        assert ours.get_video(index).path == clips.video_paths[number]
        assert ours.choose_frames(index, ours.get_video(index), 0).tolist() == clips.clips[number][place].tolist()
        assert ours.read_target(index) == ["run", "walk"].index(Path(clips.video_paths[number]).parent.name)
    if name == "Kinetics":
        folder = VideoClips(root / "train", **options)
        assert [folder.get_video(i).path for i in range(8)] == [ours.get_video(i).path for i in range(8)]
        assert folder.classes == theirs.classes
        for (one, labels), (other, expected) in zip(
            DALILoader(ours, 4, device="cpu"), DataLoader(ours, 4), strict=True
        ):
            assert torch.equal(one, other)
            assert torch.equal(labels, expected)


def test_a_wrapped_dataset(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make("UCF101", root, output_format="TCHW")
    clips = torch.from_numpy(np.stack(videos.pan(18, 48, 64))).permute(0, 3, 1, 2).reshape(6, 3, 3, 48, 64)
    # TorchCodec would decode.
    monkeypatch.setattr(dataset.video_clips, "get_clip", lambda i: (clips[i], torch.zeros(1, 5), {}, i // 2))
    wrapped = datasets.wrap_dataset_for_transforms_v2(dataset)
    loader = DALILoader(wrapped, 3, device="cpu", transform=v2.Compose(CHAIN))
    for number, (ours, sounds, labels) in enumerate(loader):
        assert torch.equal(ours, v2.Compose(CHAIN)(clips[3 * number : 3 * number + 3]))
        assert sounds.shape == (3, 1, 5)
        assert labels.tolist() == [[0, 0, 1], [1, 1, 1]][number]


@pytest.mark.parametrize("split", ["train", None])
def test_moving_digits(tmp_path: Path, split: str | None) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (20, 4, 64, 64), np.uint8)
    (tmp_path / "MovingMNIST").mkdir()
    np.save(tmp_path / "MovingMNIST" / "mnist_test_seq.npy", frames)
    dataset = datasets.MovingMNIST(tmp_path, split, split_ratio=6, transform=tv_tensors.Video)
    plain = datasets.MovingMNIST(tmp_path, split, split_ratio=6, transform=v2.Compose([tv_tensors.Video, *CHAIN]))
    ours = list(DALILoader(dataset, 2, device="cpu", transform=v2.Compose(CHAIN)))
    assert [batch.shape for batch in ours] == [(2, 6 if split else 20, 1, 40, 40)] * 2
    assert all(torch.equal(one, other) for one, other in zip(ours, DataLoader(plain, 2), strict=True))
