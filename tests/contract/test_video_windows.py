"""Of the frames of clips no more is kept than the first crop shows, and the batches are those of whole frames."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from helpers import videos
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import VideoClips
from torchdali.datasets.video.colors import cut, find_colors
from torchdali.datasets.video.decoding import Box, HostDecoders
from torchdali.datasets.video.device_decoding import DeviceDecoders, convert
from torchdali.datasets.video.probe import Video, VideoError, probe
from torchdali.pipeline.engine import PipelineRunner
from torchdali.pipeline.readers.clips import join_clips
from torchdali.transforms import MultiView

pytestmark = pytest.mark.timeout(60)

COUNT = 12


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Videos of several sizes: one turned, one with odd sides, one of PIL, and one without a picture."""
    root = tmp_path_factory.mktemp("videos")
    pictures = [PIL.Image.fromarray(frame) for frame in videos.pan(COUNT, 75, 83)]
    pictures[0].save(root / "animation.webp", save_all=True, append_images=pictures[1:], duration=40, lossless=True)
    (root / "bad.mp4").write_bytes(b"no video")
    return [
        videos.write(root / "plain.mp4", videos.pan(COUNT)),
        videos.write(root / "turned.mp4", videos.pan(COUNT, 70, 90, "chelsea"), rotation=90),
        videos.write(root / "upside_down.mp4", videos.pan(COUNT, 70, 90), rotation=180),
        videos.write(root / "odd.webm", videos.pan(COUNT, 67, 91), codec="libvpx-vp9"),
        root / "animation.webp",
        root / "bad.mp4",
    ]


def epoch(paths: list[Path], chain: Any, device: str, size: int = 3, **options: Any) -> list[Any]:
    dataset = VideoClips(paths, frames=4, stride=2, transform=chain)
    return list(DALILoader(dataset, size, seed=5, device=device, **options))


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns an epoch of whole frames."""

    def make(*arguments: Any, **options: Any) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr("torchdali.pipeline.windows.find_window", lambda _: None)
            return epoch(*arguments, **options)

    return make


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all frames that DALI gets."""
    shapes: list[tuple[int, ...]] = []
    submit = PipelineRunner.submit

    def spy(self: PipelineRunner, images: Any, *arguments: Any) -> int:
        shapes.extend(tuple(image.shape) for image in images)
        return submit(self, images, *arguments)

    monkeypatch.setattr(PipelineRunner, "submit", spy)
    return shapes


CHAINS: dict[str, tuple[Any, int]] = {
    # and the longest side that is kept; 0 for that of whole frames
    "RandomResizedCrop": (v2.RandomResizedCrop(31, scale=(0.05, 0.3)), 70),
    "CenterCrop": (v2.CenterCrop((41, 45)), 48),
    "RandomCrop": (v2.RandomCrop(37), 40),
    "two crops": (v2.Compose([v2.CenterCrop(60), v2.RandomHorizontalFlip(0), v2.RandomCrop(35)]), 62),
    "fused crops": (v2.Compose([v2.RandomCrop(50), v2.ToDtype(torch.uint8), v2.CenterCrop(33)]), 36),
    "fewer frames": (v2.Compose([v2.UniformTemporalSubsample(2), v2.RandomCrop(37)]), 40),
    "negative border": (v2.Compose([v2.Pad(-11), v2.Resize((40, 40))]), 76),
    "larger CenterCrop": (v2.CenterCrop(101), 0),
    "border": (v2.RandomCrop(37, padding=40), 91),
    "narrow border": (v2.RandomCrop(40, padding=9), 96),
    "border if needed": (v2.RandomCrop(80, pad_if_needed=True), 0),
    "mirrored border": (v2.RandomCrop(37, padding=9, padding_mode="reflect"), 0),
    "flip first": (v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(37)]), 0),
    "several views": (MultiView([v2.RandomCrop(37), v2.RandomResizedCrop(37)]), 0),
    "five crops": (v2.FiveCrop(30), 0),
    "nothing": (v2.Compose([v2.Resize((40, 40))]), 0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_batches_are_those_of_whole_frames(
    files: list[Path], name: str, whole: Any, fed: list[tuple[int, ...]], device: str
) -> None:
    chain, longest = CHAINS[name]
    ours = epoch(files[:-1], chain, device)
    seen = len(fed)
    theirs = whole(files[:-1], chain, device)
    for one, other in zip(ours, theirs, strict=True):
        views = zip(one, other, strict=True) if isinstance(one, (list, tuple)) else [(one, other)]
        assert all(torch.equal(a, b) for a, b in views)
    kept, whole_frames = fed[:seen], fed[seen:]
    assert max(max(shape) for shape in whole_frames) == 96
    assert max(max(shape) for shape in kept) <= (longest or 96)
    if longest and device == "cpu":  # on a GPU the boxes of a batch are parts of one tensor, with the largest sides
        assert sum(map(math.prod, kept)) < sum(map(math.prod, whole_frames))


def test_kept_frames_are_small_before_they_are_fed(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[torch.Tensor] = []
    decode = HostDecoders.decode

    def spy(self: HostDecoders, video: Video, frames: Any, box: Box) -> torch.Tensor:
        assert not any(box[axis] % 2 for axis in (0, 1))
        assert not any(box[axis + 2] % 2 and box[axis + 2] < video.size[axis] for axis in (0, 1))
        decoded.append(decode(self, video, frames, box))
        return decoded[-1]

    monkeypatch.setattr(HostDecoders, "decode", spy)
    epoch(files[:-1], v2.RandomCrop(37), "cpu")
    assert len(decoded) == 5
    assert all(clip.untyped_storage().nbytes() <= 4 * 40 * 40 * 3 for clip in decoded)


@pytest.mark.parametrize("policy", ["replace", "skip"])
@pytest.mark.parametrize("name", ["RandomCrop", "RandomResizedCrop", "border"])
def test_substitutes_are_those_of_whole_frames(
    files: list[Path], policy: str, name: str, whole: Any, device: str
) -> None:
    arguments = files, CHAINS[name][0], device
    for ours, theirs in zip(epoch(*arguments, on_error=policy), whole(*arguments, on_error=policy), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_that_failed_is_run_again(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = epoch(files[:2], v2.RandomCrop(37), "cpu")
    submit, calls = PipelineRunner.submit, []

    def fail_once(self: PipelineRunner, *arguments: Any) -> int:
        calls.append(1)
        number = submit(self, *arguments)
        if len(calls) == 1:
            monkeypatch.setattr(self, "take", fail)
        return number

    def fail(*_: Any) -> Any:
        raise RuntimeError("it failed once")

    monkeypatch.setattr(PipelineRunner, "submit", fail_once)
    (ours,) = epoch(files[:2], v2.RandomCrop(37), "cpu")
    assert len(calls) == 2
    assert torch.equal(ours, expected[0])


def test_boxes_of_several_shapes_are_one_tensor(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    same, other = torch.rand(2, 3, 4, 5, 3), torch.rand(3, 6, 2, 3)
    joined = join_clips(list(same), [True, True])
    assert isinstance(joined, torch.Tensor)
    assert torch.equal(joined, same.flatten(0, 1))
    frames = join_clips([same[0], other], [True, False])
    assert [frame.shape for frame in frames] == [(4, 5, 3)] * 3 + [(6, 2, 3)] * 3
    joined = join_clips([same[0], other], [False, False])
    assert isinstance(joined, torch.Tensor)
    assert joined.shape == (6, 6, 5, 3)
    assert torch.equal(joined[:3, :4], same[0])
    assert torch.equal(joined[3:, :, :2], other)
    large = torch.rand(3, 6, 5, 3)
    joined = join_clips([large, other], [True, False])
    assert isinstance(joined, torch.Tensor)
    assert torch.equal(joined[:3], large)

    expected, submit = epoch(files[:-1], v2.RandomCrop(37), "cpu"), PipelineRunner.submit

    def join(self: PipelineRunner, images: Any, *arguments: Any) -> int:
        sides = np.array([image.shape for image in images]).max(0)
        frames = [np.full(sides, 255, np.uint8) for _ in images]
        for frame, image in zip(frames, images, strict=True):
            frame[: len(image), : image.shape[1]] = image
        return submit(self, frames, *arguments)

    monkeypatch.setattr(PipelineRunner, "submit", join)
    for ours, theirs in zip(epoch(files[:-1], v2.RandomCrop(37), "cpu"), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_a_box_of_coded_frames_has_the_colors_of_the_whole(rotation: int) -> None:
    colors = find_colors(1, 1)
    assert colors
    coded = torch.randint(256, (3, 36, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    size = (40, 24) if rotation % 180 else (24, 40)
    video = Video("clip.mp4", (0, 0), size, rotation)
    shown = torch.rot90(colors.convert(coded), rotation // 90, (1, 2))
    assert torch.equal(convert(video, colors, coded, None), shown)
    for top, left, bottom, right in ((0, 0, *size), (4, 6, 10, 22), (size[0] - 2, 0, size[0], 2)):
        pixels = convert(video, colors, coded, (top, left, bottom, right))
        assert torch.equal(pixels, shown[:, top:bottom, left:right])
        assert pixels.untyped_storage().nbytes() == pixels.numel()
    with pytest.raises(VideoError, match="another size"):
        convert(Video("clip.mp4", (0, 0), (24, 38), rotation), colors, coded, None)
    with pytest.raises(ValueError, match=r"must have even sides, got \(1, 0, 4, 4\)"):
        cut(coded, 1, 0, 4, 4)


class Engine:
    """Decodes as an engine does, by PyAV."""

    def __init__(self, device: torch.device, video: Video) -> None:
        self.path = video.path

    def decode(self, video: Video, frames: Any, box: Box | None) -> torch.Tensor:
        colors, coded = find_colors(*video.colors), torch.from_numpy(videos.read_nv12(Path(video.path)))
        assert colors
        return convert(video, colors, coded[frames], box)


@pytest.mark.parametrize("near", [8.0, -1.0])
def test_boxes_of_an_engine_are_parts_of_its_frames(
    files: list[Path], near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchdali.datasets.video.device_decoding._Engine", Engine)
    monkeypatch.setattr("torchdali.datasets.video.device_decoding._NEAR", near)
    frames = np.array([1, 4, 4, 9])
    for path in files[:4]:
        video, decoders = probe(str(path)), DeviceDecoders(torch.device("cpu"))
        first, box, whole = (decoders.decode(video, frames, one) for one in ((2, 4, 40, 52), (2, 4, 40, 52), None))
        assert torch.equal(box, whole[:, 2:40, 4:52])
        assert torch.equal(first, box)
        assert first.untyped_storage().nbytes() == first.numel()
        by_pyav = HostDecoders().decode(video, frames)
        assert torch.equal(whole, by_pyav) == (path.suffix == ".webm" or near < 0)
        assert (whole.float() - by_pyav.float()).abs().mean() < 1


def test_a_probe_feeds_boxes(files: list[Path]) -> None:
    loader = DALILoader(VideoClips(files[:2], frames=2, stride=1, transform=v2.RandomCrop(37)), 2, device="cpu")
    assert loader.stats(probe=True).probe
    loader.close()


def test_more_batches_of_fixed_crops_are_in_flight(tmp_path: Path) -> None:
    path = videos.write(tmp_path / "large.mp4", [np.zeros((1080, 1920, 3), np.uint8)] * 2)
    for transform, depth in ((v2.RandomCrop(128), 6), (v2.CenterCrop(128), 6), (v2.RandomResizedCrop(128), 2)):
        text = io.StringIO()
        DALILoader(VideoClips([path], frames=16, transform=transform), 16, device="cpu").explain(file=text)
        assert f"prefetch   depth {depth} batches" in text.getvalue()
        assert "of this process; frames are cut where the first crop" in text.getvalue()
    text = io.StringIO()
    DALILoader(VideoClips([path], frames=16, transform=v2.Resize((9, 9))), 16, device="cpu").explain(file=text)
    assert "first crop" not in text.getvalue()
