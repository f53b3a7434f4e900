"""VideoClips: the frames are PyAV's, in DataLoader and in DALILoader."""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import videos
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali import DALILoader, PipelineError, SampleError
from torchdali.datasets import VideoClips
from torchdali.datasets.video.decoding import HostDecoders
from torchdali.datasets.video.probe import probe
from torchdali.pipeline.engine import PipelineRunner
from torchdali.transforms import MultiView

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT = 40
VARYING = np.cumsum([20 + 13 * (i % 4) for i in range(COUNT)]).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of videos."""
    root = tmp_path_factory.mktemp("videos")
    for number, name in enumerate(("coffee", "chelsea", "rocket", "astronaut")):
        (root / "ab"[number % 2]).mkdir(exist_ok=True)
        videos.write(root / "ab"[number % 2] / f"{name}.mp4", videos.pan(COUNT - 5 * number, name=name))
    return root


KINDS: dict[str, dict[str, Any]] = {
    "h264.mp4": {},
    "h264.mkv": {},
    "varying.mkv": {"times": VARYING},
    "varying.mp4": {"times": VARYING},
    "hevc.mp4": {"codec": "libx265"},
    "vp9.webm": {"codec": "libvpx-vp9"},
    "vp8.webm": {"codec": "libvpx"},
    "mpeg4.avi": {"codec": "mpeg4"},
    "mjpeg.avi": {"codec": "mjpeg"},
    "turned.mp4": {"rotation": 90},
}


@pytest.mark.parametrize("name", KINDS)
def test_frames_are_those_of_the_whole_file(name: str, tmp_path: Path) -> None:
    path = videos.write(tmp_path / name, videos.pan(COUNT), **KINDS[name])
    whole = videos.decode(path)
    if "rotation" in KINDS[name]:
        whole = np.rot90(whole, 1, (1, 2))  # counterclockwise
    video, decoders, draws = probe(str(path)), HostDecoders(), np.random.default_rng(0)
    assert len(video) == len(whole) == COUNT
    assert video.size == whole.shape[1:3]
    assert np.allclose(video.seconds, np.array(videos.shown(path)) - videos.shown(path)[0], atol=1e-6)
    for frames in ([0], [COUNT - 1], [3, 3, 1], *draws.integers(0, COUNT, (12, 5)), np.arange(7, 40, 4)):
        assert np.array_equal(decoders.decode(video, np.array(frames)).numpy(), whole[frames])
    decoders.close()


def test_pictures_of_animations(tmp_path: Path) -> None:
    pictures = [PIL.Image.fromarray(frame) for frame in videos.pan(6)]
    for name, options in (("one.gif", {}), ("two.webp", {"lossless": True})):
        path = tmp_path / name
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=[40, 80] * 3, **options)
        dataset = VideoClips([path], frames=4, stride=1, clips=1)
        with PIL.Image.open(path) as image:
            whole: list[Any] = []
            for number in range(6):
                image.seek(number)
                whole.append(np.asarray(image.convert("RGB")))
        assert np.array_equal(dataset[0].permute(0, 2, 3, 1).numpy(), np.stack(whole[1:5]))
        by_time = VideoClips([path], frames=4, stride=1, clips=1, fps=25)  # 40 ms each
        assert by_time.choose_frames(0, by_time.get_video(0), 0).tolist() == [1, 2, 3, 3]


def test_which_frames_a_clip_has(folder: Path) -> None:
    path = folder / "a" / "coffee.mp4"

    def frames(**options: Any) -> list[list[int]]:
        dataset = VideoClips([path], **options)
        return [dataset.choose_frames(i, dataset.get_video(i), 0.999).tolist() for i in range(len(dataset))]

    assert frames(frames=4, stride=3, clips="random") == [[30, 33, 36, 39]]
    assert frames(frames=3, stride=2, clips=1) == [[17, 19, 21]]
    assert frames(frames=2, stride=1, clips=3) == [[0, 1], [19, 20], [38, 39]]
    assert frames(frames=4, stride=4, clips="uniform") == [[0, 4, 8, 12], [16, 20, 24, 28], [32, 36, 39, 39]]
    assert frames(frames=4, stride=4, clips="uniform", pad=False) == [[0, 4, 8, 12], [16, 20, 24, 28]]
    assert frames(frames=3, stride=30, clips="random") == [[0, 30, 39]]
    assert frames(frames=3, stride=1, clips=1, fps=10) == [[15, 18, 21]]
    assert frames(frames=3, stride=1, clips=2, fps=60) == [[0, 0, 1], [38, 39, 39]]
    with pytest.raises(ValueError, match=r"coffee\.mp4 has 40 frames, and a clip takes 61; .*pad=True"):
        frames(frames=3, stride=30, pad=False)


def test_clips_by_time_of_a_varying_rate(tmp_path: Path) -> None:
    path = videos.write(tmp_path / "varying.mkv", videos.pan(COUNT), times=VARYING)
    dataset = VideoClips([path], frames=8, stride=2, clips=2, fps=20)
    seconds = np.array(videos.shown(path))
    seconds -= seconds[0]
    first = [int(np.flatnonzero(seconds <= 0.1 * i + 1e-6)[-1]) for i in range(8)]
    assert dataset.choose_frames(0, dataset.get_video(0), 0).tolist() == first


def test_tables_and_lists(folder: Path, tmp_path: Path) -> None:
    path = folder / "a" / "coffee.mp4"
    table = tmp_path / "list.csv"
    table.write_text(f"file,label,start,end\n{path},3,0.2,0.5\n{path},4,,\n")
    options: Any = {"frames": 4, "stride": 1, "index": tmp_path / "index.npz"}
    for rows in (table, [(path, 3, 0.2, 0.5), (path, 4, None, None)]):
        first, second = VideoClips(rows, clips="random", **options), VideoClips(rows, clips="uniform", **options)
        chosen = [first.choose_frames(0, first.get_video(0), number).tolist() for number in (0, 0.999)]
        assert chosen == [[6, 7, 8, 9], [11, 12, 13, 14]]
        assert len(second) == 3 + 10
        assert [second.read_target(i) for i in (0, 2, 3)] == [3, 3, 4]
    alone = VideoClips([path], **options)
    assert type(alone[0]) is tv_tensors.Video
    with pytest.raises(ValueError, match="no frame between its start 9"):
        VideoClips([(path, 0, 9, 10)], **options)
    with pytest.raises(ValueError, match=r"must be a path, \(path, label\)"):
        VideoClips([(path, 0, 9)], **options)
    with pytest.raises(ValueError, match="list of paths, got"):
        VideoClips(tmp_path / "list.txt", **options)
    (tmp_path / "other.csv").write_text("path\nx.mp4\n")
    with pytest.raises(ValueError, match="no column 'file'; it has path"):
        VideoClips(tmp_path / "other.csv", **options)
    for name, value in (("frames", 0), ("stride", 1.5), ("clips", "all"), ("fps", 0)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            VideoClips([path], **{**options, name: value})
    with pytest.raises(ValueError, match="videos must have at least one video, got an empty list"):
        VideoClips([], **options)


@pytest.mark.parametrize("labels", [[3, 4], [0.73, 0.9], ["cat", "dog"]])
def test_labels_of_tables_keep_their_types(folder: Path, tmp_path: Path, labels: list[Any]) -> None:
    names = ["a/coffee.mp4", "b/chelsea.mp4"]
    rows = zip(names, labels, strict=True)
    (folder / "list.csv").write_text("file,label,end\n" + "".join(f"{name},{label},\n" for name, label in rows))
    pq.write_table(pa.table({"file": names, "label": labels, "start": [0.2, None]}), folder / "list.parquet")
    options: Any = {"frames": 2, "stride": 1, "clips": 1, "transform": CHAIN, "index": tmp_path / "index.npz"}
    for name in ("list.csv", "list.parquet"):
        dataset = VideoClips(folder / name, **options)
        found = [dataset[i][1] for i in range(2)]
        assert [(label, type(label)) for label in found] == [(label, type(label)) for label in labels]
        (_, ours), (_, theirs) = next(iter(DALILoader(dataset, 2, device="cpu"))), next(iter(DataLoader(dataset, 2)))
        assert type(ours) is type(theirs)
        assert list(ours) == list(theirs)
    assert dataset.choose_frames(0, dataset.get_video(0), 0).tolist() == [22, 23]
    for wrong in ([1, 2], [names[0], None], [b"a", b"b"]):
        pq.write_table(pa.table({"file": wrong}), tmp_path / "wrong.parquet")
        with pytest.raises(ValueError, match=r"wrong\.parquet.* must have a path in each row"):
            VideoClips(tmp_path / "wrong.parquet", **options)


CHAIN = v2.Compose([v2.CenterCrop(50), v2.RandomHorizontalFlip(1.0)])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("clips", ["uniform", 2])
def test_both_loaders_give_the_same(folder: Path, clips: Any, workers: int, device: str) -> None:
    dataset = VideoClips(folder, frames=4, stride=3, clips=clips, transform=CHAIN)
    assert dataset.classes == ["a", "b"]
    dataset[0]  # a worker is forked from a process that has decoded
    theirs = list(DataLoader(dataset, 3, num_workers=workers))
    ours = list(DALILoader(dataset, 3, device=device))
    assert len(ours) == len(theirs)
    for (videos_, labels), (their_videos, their_labels) in zip(ours, theirs, strict=True):
        assert type(videos_) is type(their_videos) is torch.Tensor
        assert torch.equal(labels.cpu(), their_labels)
        assert videos_.shape == their_videos.shape
        assert (videos_.cpu().float() - their_videos.float()).abs().mean() <= (0 if device == "cpu" else 2)


def test_random_starts_depend_on_seed_epoch_and_index(folder: Path, device: str) -> None:
    frames = v2.Compose([v2.UniformTemporalSubsample(2), v2.CenterCrop(50)])
    dataset = VideoClips(folder, frames=4, stride=2, transform=frames)

    def epochs(size: int, **options: Any) -> list[dict[int, torch.Tensor]]:
        loader = DALILoader(Subset(dataset, [2, 0, 3, 1]), size, seed=1, device=device, **options)
        batches = [[(video, label) for x in loader for video, label in zip(*x, strict=True)] for _ in range(2)]
        return [{i: video for i, (video, _) in enumerate(samples)} for samples in batches]

    first, again = epochs(1), epochs(3)
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(one[i], other[i]) for i in range(4))
    assert first[0][0].shape == (2, 3, 50, 50)
    assert any(not torch.equal(first[0][i], first[1][i]) for i in range(4))
    twice = next(iter(DALILoader(Subset(dataset, [0, 0]), 2, seed=1, device=device)))[0]
    assert not torch.equal(twice[0], twice[1])


def test_parts_and_sums_of_datasets(folder: Path, device: str) -> None:
    one = VideoClips(folder, frames=2, stride=3, clips=1, transform=CHAIN)
    two = VideoClips(folder, frames=2, stride=1, clips=2, transform=CHAIN, target_transform=str)
    for dataset in (ConcatDataset([one, Subset(one, [3, 1])]), Subset(two, [5, 0])):
        for (ours, labels), (theirs, their_labels) in zip(
            DALILoader(dataset, 4, device=device), DataLoader(dataset, 4), strict=True
        ):
            assert (ours.cpu().float() - theirs.float()).abs().mean() <= (0 if device == "cpu" else 2)
            assert list(labels) == list(their_labels)


def test_resuming(folder: Path) -> None:
    dataset = VideoClips(folder, frames=2, stride=3, clips="random", transform=v2.RandomCrop(40))
    loader = DALILoader(dataset, 1, shuffle=True, seed=2, device="cpu")
    epoch = iter(loader)
    next(epoch)
    state, rest = loader.state_dict(), [video for video, _ in epoch]
    again = DALILoader(dataset, 1, shuffle=True, seed=2, device="cpu")
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, (b, _) in zip(rest, again, strict=True))
    assert len(rest) == 3


def test_several_views(folder: Path, device: str) -> None:
    dataset = VideoClips(folder, frames=3, stride=2, clips=1, transform=v2.FiveCrop(30))
    ours, theirs = next(iter(DALILoader(dataset, 2, device=device)))[0], next(iter(DataLoader(dataset, 2)))[0]
    assert [view.shape for view in ours] == [(2, 3, 3, 30, 30)] * 5
    difference = torch.stack(ours).cpu().float() - torch.stack(theirs).float()
    assert difference.abs().mean() <= (0 if device == "cpu" else 2)


def test_views_of_one_clip_draw_for_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = HostDecoders.decode

    def count(self: HostDecoders, *arguments: Any) -> torch.Tensor:
        decoded.append(1)
        return decode(self, *arguments)

    monkeypatch.setattr(HostDecoders, "decode", count)
    crop = v2.RandomCrop(40)
    views = MultiView([crop, crop, v2.Compose([v2.CenterCrop(40), v2.RandomHorizontalFlip(1.0)])])
    dataset = VideoClips(folder, frames=3, stride=2, clips=1, transform=views)
    first, second, third = next(iter(DALILoader(dataset, 4, seed=3, device="cpu")))[0]
    assert len(decoded) == 4
    assert not torch.equal(first, second)
    for i in range(4):
        video = dataset.get_video(i)
        whole = decode(dataset.decoders, video, dataset.choose_frames(i, video, 0)).permute(0, 3, 1, 2)
        windows = whole.unfold(2, 40, 1).unfold(3, 40, 1).movedim((2, 3), (0, 1)).flatten(0, 1)  # one for each place
        for view in (first, second):
            assert (windows == view[i]).flatten(1).all(1).any(), "all frames of a view are cut at one place"
        assert torch.equal(third[i], v2.functional.horizontal_flip(v2.functional.center_crop(whole, [40, 40])))


def test_bad_files(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = folder / "a" / "coffee.mp4"
    data = good.read_bytes()
    files = {"cut.mp4": data[: len(data) // 2], "text.mp4": b"no video", "empty.mp4": b"", "wrong.gif": data}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    late = videos.write(tmp_path / "late.mkv", videos.pan(COUNT))
    late.write_bytes(late.read_bytes()[: len(late.read_bytes()) * 3 // 4])
    bad = [*(tmp_path / name for name in files), tmp_path / "missing.mp4"]
    rows = [(good, 0), *((path, number) for number, path in enumerate(bad, start=1))]
    dataset = VideoClips(rows, frames=2, stride=1, clips=1, transform=v2.CenterCrop(40))
    for number, path in enumerate(bad, start=1):
        with pytest.raises(SampleError, match=rf"sample 0 \({path}\): .*it"):
            next(iter(DALILoader(Subset(dataset, [number]), 1, device="cpu")))
        with pytest.raises(OSError, match=str(path)):
            dataset[number]
    for policy in ("skip", "replace"):
        loader = DALILoader(dataset, 3, on_error=policy, device="cpu")
        if policy == "replace":
            batches = list(loader)
            assert [len(videos_) for videos_, _ in batches] == [3, 3]
            assert not batches[1][0].any()
            assert len(loader.errors) == len(bad)
            assert caplog.text.count("; a black clip takes its place") == len(bad)
        else:
            videos_, labels = next(iter(loader))
            assert labels.tolist() == [0, 0, 0]
            assert torch.equal(videos_[1], videos_[0])
    shortened = VideoClips([late], frames=2, stride=1, clips="uniform")
    assert 0 < len(shortened) < COUNT // 2
    assert shortened[len(shortened) - 1].shape == (2, 3, 64, 96)


def test_sound_alone_no_frame_and_wrong_names(folder: Path, tmp_path: Path) -> None:
    sound, nothing = videos.write_sound(tmp_path / "sound.mp4"), videos.write_nothing(tmp_path / "nothing.mp4")
    matroska = videos.write(tmp_path / "clip.mkv", videos.pan(6))
    named = {matroska: tmp_path / "matroska.mp4", folder / "a" / "coffee.mp4": tmp_path / "coffee.avi"}
    for path, other in named.items():
        other.write_bytes(path.read_bytes())
    dataset = VideoClips([sound, nothing, *named.values()], frames=3, stride=1, clips=1)
    for number, fault in enumerate(("it has no video, only sound", "it has no video")):
        with pytest.raises(SampleError, match=rf"sample 0 \({dataset.paths[number]}\): .*\({fault}\)$"):
            next(iter(DALILoader(Subset(dataset, [number]), 1, device="cpu")))
        with pytest.raises(OSError, match=rf"{dataset.paths[number]}: {fault}$"):
            dataset[number]
    for number, path in enumerate(named, start=2):
        start = (len(whole := videos.decode(path)) - 3) // 2
        assert np.array_equal(dataset[number].permute(0, 2, 3, 1).numpy(), whole[start : start + 3])


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", [DataLoader, DALILoader])
def test_a_file_that_changes_is_an_error(folder: Path, tmp_path: Path, is_open: bool, kind: Any) -> None:
    path = tmp_path / "changed.mp4"
    path.write_bytes((folder / "a" / "coffee.mp4").read_bytes())
    loader = kind(VideoClips([path], frames=2, stride=1, clips=1), 1)
    if is_open:
        next(iter(loader))
    path.write_bytes((folder / "a" / "coffee.mp4").read_bytes() + b"changed")
    with pytest.raises((OSError, SampleError), match="it has changed since the index was made"):
        next(iter(loader))
    path.unlink()
    with pytest.raises((OSError, SampleError), match=r"changed\.mp4"):
        next(iter(loader))


def test_a_file_that_was_repaired_has_changed(folder: Path, tmp_path: Path) -> None:
    path, missing = tmp_path / "bad.mp4", tmp_path / "missing.mp4"
    path.write_bytes(b"no video")
    dataset = VideoClips([path, missing], frames=2, stride=1, clips=1)
    with pytest.raises(OSError, match="it cannot be read as a video"):
        dataset[0]
    with pytest.raises(OSError, match=r"missing\.mp4: it cannot be opened"):
        dataset[1]
    for number, repaired in enumerate((path, missing)):
        repaired.write_bytes((folder / "a" / "coffee.mp4").read_bytes())
        with pytest.raises(OSError, match="it has changed since the index was made; delete the index, and it is made"):
            dataset[number]


def test_a_clip_that_dali_refuses_is_named_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [folder / "a" / "coffee.mp4", folder / "b" / "chelsea.mp4"]
    dataset = VideoClips(paths, frames=3, stride=1, clips=1, transform=v2.Resize((50, 50)))
    refused, submit = videos.decode(paths[1])[(35 - 3) // 2], PipelineRunner.submit

    def refuse(self: PipelineRunner, images: Any, *arguments: Any) -> int:
        if any(np.array_equal(image, refused) for image in images):
            raise RuntimeError("refused")
        return submit(self, images, *arguments)

    monkeypatch.setattr(PipelineRunner, "submit", refuse)
    with pytest.raises(PipelineError, match=r"DALI failed on 1 of 2 samples \(.*chelsea\.mp4\): refused"):
        next(iter(DALILoader(dataset, 2, device="cpu")))


def test_the_index_is_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index.npz"
    first = VideoClips(folder, frames=2, stride=1, clips=2, index=index)
    monkeypatch.setattr("torchdali.datasets.video.index.probe", None)
    second = VideoClips(folder, frames=2, stride=1, clips=2, index=index)
    assert all(torch.equal(first[i][0], second[i][0]) for i in range(len(first)))
    copied = pickle.loads(pickle.dumps(second))
    assert torch.equal(copied[1][0], first[1][0])
    with pytest.raises(ValueError, match="is the index of other videos than"):
        VideoClips([folder / "a" / "coffee.mp4"], index=index)
    np.savez(index, names=np.load(index)["names"])
    with pytest.raises(ValueError, match="is damaged: it lacks an array"):
        VideoClips(folder, index=index)


def list_open_videos() -> list[str]:
    found: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread closes its files
            found.append(str(link.readlink()))
    return sorted(name for name in found if name.endswith((".mp4", ".avi")))


def assert_closed_soon(before: list[str]) -> None:
    end = time.monotonic() + 20
    while list_open_videos() != before and time.monotonic() < end:
        time.sleep(0.05)  # a thread closes its file when it has decoded its clip
    assert list_open_videos() == before


def test_no_file_is_left_open(folder: Path) -> None:
    dataset = VideoClips(folder, frames=2, stride=1, clips="uniform", transform=CHAIN)
    before, loader = list_open_videos(), DALILoader(dataset, 2, device="cpu")
    for _ in loader:
        break
    loader.close()
    assert_closed_soon(before)


def test_no_file_is_left_open_by_epochs_and_errors(folder: Path, tmp_path: Path) -> None:
    damaged = videos.write(tmp_path / "damaged.avi", videos.pan(12), codec="mjpeg")
    data = damaged.read_bytes()
    second = data.index(b"\xff\xd8", data.index(b"\xff\xd8") + 2)
    damaged.write_bytes(data[:second] + bytes(len(data) - second))
    paths = [damaged, folder / "a" / "coffee.mp4", folder / "b" / "chelsea.mp4"]
    dataset = VideoClips(paths, frames=2, stride=1, clips=1, transform=v2.CenterCrop(40))
    before, loader = list_open_videos(), DALILoader(Subset(dataset, [1, 2]), 1, device="cpu")
    for _ in range(12):
        assert sum(len(clips) for clips in loader) == 2
    kept = [name for name in list_open_videos() if name not in before]
    assert len(kept) <= 2, "one decoder of each file stays open between epochs"
    loader.close()
    assert_closed_soon(before)
    loader = DALILoader(dataset, 1, device="cpu")
    for _ in range(3):
        with pytest.raises(SampleError, match=r"damaged\.avi"):
            next(iter(loader))
    loader.close()
    assert_closed_soon(before)


def test_explain_names_the_decoder(folder: Path) -> None:
    text = io.StringIO()
    DALILoader(VideoClips(folder, transform=CHAIN), 2, device="cpu").explain(file=text)
    assert "decode     PyAV, in threads of this process" in text.getvalue()
    assert "uint8 (T, 3, 50, 50)" in text.getvalue()
