"""Samples with videos: all frames of one share their random numbers, and come out as one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.proxied import assert_near, decoded_in
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali import BatchShapeError, DALILoader, SampleError
from torchdali.transforms import Jitter, MedianBlur, ShotNoise, Water

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT, FRAMES, SIDES = 3, 4, (60, 70)


@pytest.fixture
def clips(pictures: Path) -> list[torch.Tensor]:
    """Clips of a camera that moves over a photograph, ``(T, C, H, W)``."""
    photographs = [F.pil_to_tensor(image.resize((90, 80))) for image in decoded_in(pictures, COUNT)]
    height, width = SIDES
    return [
        torch.stack([image[:, 4 * t : 4 * t + height, 5 * t : 5 * t + width] for t in range(FRAMES)])
        for image in photographs
    ]


class Clips(Dataset[Any]):
    """Samples of any structure with clips in it.

    Args:
        clips: The clips.
        shape: Makes a sample of a clip and its number.
        transform: Called with each sample, as in torchvision's examples for videos.
    """

    def __init__(self, clips: Any, shape: Callable[[Any, int], Any], transform: Any = None) -> None:
        self.clips, self.shape, self.transform = clips, shape, transform

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Any:
        sample = self.shape(self.clips[index], index)
        return self.transform(sample) if self.transform else sample


def as_video(clip: Any, index: int) -> Any:
    return tv_tensors.Video(clip), index


def as_images(clip: Any, index: int) -> Any:
    return [tv_tensors.Image(frame) for frame in clip], index


def add_noise(image: torch.Tensor) -> torch.Tensor:
    return image + torch.randint(0, 9, (1,), dtype=torch.uint8, device=image.device)


TO_FLOAT = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)]
CHAINS: dict[str, list[Any]] = {
    "crop": [v2.RandomCrop(32), v2.RandomHorizontalFlip()],
    "resized crop": [v2.RandomResizedCrop(32), v2.ColorJitter(0.4, 0.4, 0.4), *TO_FLOAT],
    "policy": [v2.RandAugment(), v2.CenterCrop(40)],
    "erasing": [v2.RandomRotation(30), *TO_FLOAT, v2.RandomErasing(1.0, value="random")],
    "moved pixels": [Jitter(4), Water(phase=(0, 6)), MedianBlur()],
    "views": [v2.FiveCrop(20)],
    "in torch": [v2.CenterCrop(40), v2.Lambda(add_noise)],
    "tail": [v2.CenterCrop(40), v2.ToDtype(torch.float64, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)],
}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_each_frame_is_as_an_image_of_the_sample(clips: Any, chain: Any, workers: int, device: str) -> None:
    options: Any = {"batch_size": 2, "transform": v2.Compose(chain), "seed": 3, "num_workers": workers}
    of_videos = list(DALILoader(Clips(clips, as_video), device=device, **options))
    of_images = list(DALILoader(Clips(clips, as_images), device=device, **options))
    for (videos, labels), (images, same_labels) in zip(of_videos, of_images, strict=True):
        assert torch.equal(labels, same_labels)
        if isinstance(videos, (list, tuple)):  # the views of a video, and a video of the views
            videos, images = torch.stack(list(videos)), [torch.stack(list(views)) for views in images]
        assert torch.equal(videos, torch.stack(images, -4))
    assert not torch.equal(of_videos[0][0][0], of_videos[0][0][1])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_frames_of_a_still_clip_stay_equal(clips: Any, workers: int, device: str) -> None:
    still = [clip[:1].expand(FRAMES, -1, -1, -1) for clip in clips]
    chain = v2.Compose([v2.RandomResizedCrop(32), v2.TrivialAugmentWide(), v2.RandomPerspective(p=1.0)])
    loader = DALILoader(Clips(still, as_video), 2, transform=chain, num_workers=workers, device=device)
    for videos, _ in loader:
        assert torch.equal(videos, videos[:, :1].expand_as(videos))


STRUCTURES: dict[str, Callable[[Any, int], Any]] = {
    "pair": as_video,
    "alone": lambda clip, i: tv_tensors.Video(clip),
    "dict": lambda clip, i: {"label": i, "clips": [tv_tensors.Video(clip), tv_tensors.Video(clip.flip(-1))]},
    "with image": lambda clip, i: (tv_tensors.Image(clip[0]), tv_tensors.Video(clip), f"text {i}"),
    "lengths by slot": lambda clip, i: (tv_tensors.Video(clip), tv_tensors.Video(clip[:2])),
    "boxes": lambda clip, i: (
        tv_tensors.Video(clip),
        {
            "boxes": tv_tensors.BoundingBoxes([[1 + i, 2, 30, 40]], format="XYXY", canvas_size=SIDES),  # pyright: ignore
            "mask": tv_tensors.Mask(torch.arange(60 * 70).reshape(60, 70) // 99),
        },
    ),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shape", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_batches_are_dataloaders(clips: Any, shape: Any, workers: int, device: str) -> None:
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop(33), v2.RandomHorizontalFlip(1.0)])
    for size in (2, None):
        theirs = list(DataLoader(Clips(clips, shape, chain), size))
        ours = DALILoader(Clips(clips, shape), size, transform=chain, num_workers=workers, device=device)
        assert_near(list(ours), theirs)


def test_types_are_dataloaders(clips: Any) -> None:
    for end in ([], [v2.ToPureTensor()]):
        chain = v2.Compose([v2.CenterCrop(33), *end])
        for kept in ("Tensor", "TVTensor"):
            with tv_tensors.set_return_type(kept):  # pyright: ignore[reportArgumentType]
                theirs = next(iter(DataLoader(Clips(clips, as_video, chain), 2)))[0]
                ours = next(iter(DALILoader(Clips(clips, as_video), 2, transform=chain, device="cpu")))[0]
            assert type(ours) is type(theirs)
        seen: list[Any] = []
        for loader in (
            DataLoader(Clips(clips, as_video, chain), 1, collate_fn=seen.extend),
            DALILoader(Clips(clips, as_video), 1, transform=chain, device="cpu", collate_fn=seen.extend),
        ):
            list(loader)
        assert len({type(video) for video, _ in seen}) == 1


EXCEPTIONS: dict[str, list[Any]] = {
    "Grayscale": [v2.Grayscale(), v2.CenterCrop(33)],
    "RandomGrayscale": [v2.RandomApply([v2.RandomGrayscale(1.0)], 1.0), v2.CenterCrop(33)],
    "one is grey": [v2.ToPureTensor(), v2.Grayscale(), v2.CenterCrop(33)],
    "frames": [v2.CenterCrop(33), v2.UniformTemporalSubsample(3), v2.UniformTemporalSubsample(5)],
    "frames of a tensor": [v2.CenterCrop(33), v2.ToPureTensor(), v2.UniformTemporalSubsample(3)],
    "frames in another": [v2.RandomApply([v2.UniformTemporalSubsample(2)], 1.0), v2.CenterCrop(33)],
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("chain", EXCEPTIONS.values(), ids=EXCEPTIONS.keys())
def test_what_torchvision_does_to_images_only_or_to_videos_only(
    clips: Any, chain: Any, workers: int, device: str
) -> None:
    chain = v2.Compose(chain)
    theirs = list(DataLoader(Clips(clips, as_video, chain), 2))
    ours = list(DALILoader(Clips(clips, as_video), 2, transform=chain, num_workers=workers, device=device))
    assert_near(ours, theirs)


@pytest.mark.parametrize("workers", [0, 1])
def test_images_have_no_frames_to_choose(clips: Any, workers: int, device: str) -> None:
    chain = v2.Compose([v2.UniformTemporalSubsample(2), v2.CenterCrop(33)])
    theirs = list(DataLoader(Clips(clips, as_images, chain), 2))
    ours = DALILoader(Clips(clips, as_images), 2, transform=chain, num_workers=workers, device=device)
    assert_near(list(ours), theirs)


def test_grey_videos_stay_grey(clips: Any, device: str) -> None:
    grey, chain = [clip[:, :1] for clip in clips], v2.Compose([v2.RGB(), v2.CenterCrop(33)])
    ours = list(DALILoader(Clips(grey, as_video), 2, transform=chain, device=device))
    assert_near(ours, list(DataLoader(Clips(grey, as_video, chain), 2)))


@pytest.mark.parametrize("transform", [v2.GaussianNoise(), ShotNoise(25.5**2 / 128)])
def test_each_frame_has_its_own_noise(clips: Any, transform: Any, device: str) -> None:
    flat = [torch.full_like(clip, 128) for clip in clips]
    options: Any = {"batch_size": 1, "transform": transform, "seed": 1, "device": device}
    (video, _), *_ = DALILoader(Clips(flat, as_video), **options)
    (images, _), *_ = DALILoader(Clips(flat, as_images), **options)
    noise = (video[0].double() - 128).flatten(1)
    assert torch.equal(video[0, 0], images[0][0])
    assert noise.mean(1).abs().max() < 1
    assert (noise.std(1) - 25.5).abs().max() < 1
    assert (torch.corrcoef(noise) - torch.eye(FRAMES, device=noise.device)).abs().max() < 0.05


@pytest.mark.parametrize("workers", [0, 1])
def test_videos_of_different_length(clips: Any, workers: int, device: str) -> None:
    uneven = [clip[: FRAMES - i] for i, clip in enumerate(clips)]
    chain = v2.CenterCrop(33)
    loader = DALILoader(Clips(uneven, as_video), 2, transform=chain, num_workers=workers, device=device)
    with pytest.raises(BatchShapeError, match=r"\(4, 3, 33, 33\) \(sample 0\).* and \(3, 3, .*one number of frames"):
        next(iter(loader))
    options: Any = {"batch_size": 2, "collate_fn": list}
    theirs = list(DataLoader(Clips(uneven, as_video, chain), **options))
    ours = DALILoader(Clips(uneven, as_video), transform=chain, num_workers=workers, device=device, **options)
    assert_near(list(ours), theirs)
    even = v2.Compose([v2.UniformTemporalSubsample(2), chain])
    ours = DALILoader(Clips(uneven, as_video), 2, transform=even, num_workers=workers, device=device)
    assert_near(list(ours), list(DataLoader(Clips(uneven, as_video, even), 2)))


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_samples(clips: Any, workers: int, device: str) -> None:
    def without_one(clip: Any, index: int) -> Any:
        return (None if index == 1 else tv_tensors.Video(clip)), 0

    options: Any = {"batch_size": COUNT, "transform": v2.CenterCrop(33), "num_workers": workers, "device": device}
    good = next(iter(DALILoader(Clips(clips, as_video), **options)))[0]
    for policy, stands_in in (("skip", good[2]), ("replace", torch.zeros_like(good[1]))):
        videos = next(iter(DALILoader(Clips(clips, without_one), **options, on_error=policy)))[0]
        assert torch.equal(videos, torch.stack([good[0], stands_in, good[2]]))
    bad = Clips(clips, lambda clip, i: (tv_tensors.Video(clip[None]), i))
    with pytest.raises(SampleError, match=r"sample 0 .*\(1, 4, 3, 60, 70\), not \(T, C, H, W\)"):
        next(iter(DALILoader(bad, **options)))
    small = [clip[..., :20] if i == 1 else clip for i, clip in enumerate(clips)]
    options["transform"] = v2.RandomCrop(33)
    with pytest.raises(SampleError, match="sample 1 "):
        next(iter(DALILoader(Clips(small, as_video), **options)))
