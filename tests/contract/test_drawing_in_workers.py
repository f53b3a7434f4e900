"""Workers draw the parameters of their batches: the same as the process that iterates, which draws the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, RandomSampler, Subset, SubsetRandomSampler
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from tests.conftest import same
from tests.helpers.annotated import Annotated
from torchdali import DALILoader, SampleError
from torchdali.pipeline.plan import Plan
from torchdali.transforms.targets import Targets

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

FLIP = [v2.RandomHorizontalFlip(), v2.RandomCrop(24, pad_if_needed=True)]
JOINT = [v2.RandomZoomOut(), v2.RandomIoUCrop(), *FLIP, v2.SanitizeBoundingBoxes()]


class Samples(Dataset[Any]):
    """The paths of a folder, the boxes of a dataset, and more images if that is said."""

    def __init__(self, folder: ImageFolder, images: int = 1) -> None:
        self.paths, self.images = [Path(path) for path, _ in folder.samples], images

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return [self.paths[index]] * self.images, index


class Boxed(Samples):
    """The same with boxes, which the transforms of detection need. Sample 5 has none."""

    def __getitem__(self, index: int) -> Any:
        (path,), _ = super().__getitem__(index)
        with path.open("rb") as file:
            size = v2.functional.get_size(Image.open(file))
        corners = [[2 + index, 3, 30, 40], [9, 9, 20, 24]]
        boxes: Any = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size)
        return path, {"boxes": boxes, "labels": torch.tensor([index, 1])} if index != 5 else {"labels": index}


ELSEWHERE = "drawn in workers"


@pytest.fixture
def drawn_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The numbers of samples for which this process has drawn. Workers write a letter a batch into a file."""
    counts, draw, own = list[int](), Plan.draw, os.getpid()

    def count(self: Plan, draws: Any, size: Any, targets: Targets | None = None) -> Any:
        if os.getpid() == own:
            counts.append(len(size))
        else:
            with (tmp_path / ELSEWHERE).open("a") as file:
                file.write("w")
        return draw(self, draws, size, targets)

    monkeypatch.setattr(Plan, "draw", count)
    return counts


def load(dataset: Any, chain: list[Any], workers: int, **options: Any) -> DALILoader[Any]:
    options = {"collate_fn": list, "num_workers": workers, "seed": 3, **options}
    return DALILoader(dataset, 4, transform=v2.Compose([v2.ToImage(), *chain]), device="cpu", **options)


def photographs(folder: ImageFolder) -> list[torch.Tensor]:
    return [v2.functional.pil_to_tensor(folder.loader(path)) for path, _ in folder.samples[:6]]


@pytest.mark.parametrize("masks", [False, True], ids=["boxes", "masks"])
def test_workers_draw_the_same(dataset: ImageFolder, drawn_here: list[int], masks: bool) -> None:
    annotated = Annotated(photographs(dataset), 14, masks=masks)
    expected = list(load(annotated, JOINT, 0))
    assert drawn_here
    drawn_here.clear()
    assert same(list(load(annotated, JOINT, 2)), expected)
    assert not drawn_here


class Label(torch.Tensor):
    """A label that is more than its values."""


class Labelled(Boxed):
    """The same, and the labels have a class of their own."""

    def __getitem__(self, index: int) -> Any:
        path, target = super().__getitem__(index)
        return path, {**target, "labels": torch.as_tensor(target["labels"]).as_subclass(Label)}


def test_labels_keep_their_class(dataset: ImageFolder, drawn_here: list[int]) -> None:
    expected, found = (list(load(Subset(Labelled(dataset), range(5)), JOINT, n)) for n in (0, 2))
    assert same(found, expected)
    assert {type(target["labels"]) for batch in found for _, target in batch} == {Label}


def test_each_epoch_has_other_numbers_and_repeated_samples_too(dataset: ImageFolder, drawn_here: list[int]) -> None:
    """The key of an epoch, and how often a sample came up, go with the indices."""
    samples, epochs = Samples(dataset), list[Any]()
    for workers in (0, 2):
        generator = torch.Generator().manual_seed(4)
        sampler = RandomSampler(samples, replacement=True, num_samples=40, generator=generator)
        loader = load(samples, FLIP, workers, sampler=sampler, persistent_workers=bool(workers))
        drawn_here.clear()
        epochs.append([list(loader) for _ in range(2)])
    assert not drawn_here
    assert same(*epochs)
    assert len({index for batch in epochs[0][0] for _, index in batch}) < 40
    assert not same(*epochs[0])


def test_an_epoch_resumes(dataset: ImageFolder, drawn_here: list[int]) -> None:
    """Also the samples before the point of resumption count."""
    order = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    loader, resumed = (load(Samples(dataset), FLIP, 1, sampler=order) for _ in range(2))
    batches = iter(loader)
    next(batches)
    resumed.load_state_dict(loader.state_dict())
    assert same(list(resumed), list(batches))
    assert not drawn_here


def two_images(dataset: ImageFolder) -> tuple[Any, list[Any], dict[str, Any]]:
    return Samples(dataset, images=2), FLIP, {}


def videos(dataset: ImageFolder) -> tuple[Any, list[Any], dict[str, Any]]:
    frames = torch.stack([v2.functional.center_crop(image, [40, 40]) for image in photographs(dataset)])
    return [(tv_tensors.Video(frames[first : first + 2]), first) for first in range(4)], FLIP[1:], {}


def warped_masks(dataset: ImageFolder) -> tuple[Any, list[Any], dict[str, Any]]:
    return Annotated(photographs(dataset), 6, points=False), [v2.RandomRotation(20)], {}


@pytest.mark.parametrize("case", [two_images, videos, warped_masks], ids=lambda case: case.__name__)
def test_this_process_draws_what_workers_cannot(dataset: ImageFolder, drawn_here: list[int], case: Any) -> None:
    samples, chain, options = case(dataset)
    expected = list(load(samples, chain, 0))
    drawn_here.clear()
    assert same(list(load(samples, chain, 1, **options)), expected)
    assert drawn_here


def test_masks_are_warped_in_vain_only_once(dataset: ImageFolder, drawn_here: list[int], tmp_path: Path) -> None:
    """The worker learns from the first batch that it need not draw for masks."""
    samples, chain, _ = warped_masks(dataset)
    assert len(list(load(samples, chain, 1))) == len(drawn_here) == 2
    assert (tmp_path / ELSEWHERE).read_text() == "w"


def test_the_error_of_a_sample_is_the_same(dataset: ImageFolder) -> None:
    """Workers leave it to this process, which names the sample in the batch's turn."""
    errors: list[str] = []
    for workers in (0, 1):
        batches: Iterator[Any] = iter(load(Boxed(dataset), JOINT, workers, sampler=SubsetRandomSampler([4, 5])))
        with pytest.raises(SampleError) as caught:
            next(batches)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert "transform 3, RandomIoUCrop" in errors[0]


def test_substitutes_are_drawn_for_here(fresh: ImageFolder, drawn_here: list[int]) -> None:
    """A truncated file is found after the worker has drawn for it. The sample in its place has other boxes."""
    bad, next_one = (Path(path) for path, _ in fresh.samples[2:4])
    whole = next_one.read_bytes()  # of one size, so that the size alone does not tell
    bad.write_bytes(whole[:-200])
    expected = list(load(Boxed(fresh), FLIP, 0, on_error="skip", sampler=[0, 1, 2, 3]))
    drawn_here.clear()
    found = list(load(Boxed(fresh), FLIP, 1, on_error="skip", sampler=[0, 1, 2, 3]))
    assert same(found, expected)
    assert drawn_here == [4]
    assert [int(target["labels"][0]) for _, target in found[0]] == [0, 1, 3, 3]
