"""What a sample is made of: where its images are, which of them there may be, and what they become."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import CROP, encoded, same
from helpers.proxied import EXACT, Image, Samples, assert_near, decoded_in, pair
from torch.utils.data import DataLoader, default_collate, default_convert, get_worker_info
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali import DALILoader, TransformError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT = 5
SAME_SIZE = (60, 50)


@pytest.fixture
def photographs(pictures: Path) -> list[Image]:
    return decoded_in(pictures, COUNT)


class Parts(NamedTuple):
    text: str
    image: Any
    number: float


STRUCTURES: dict[str, Callable[[Any, int], Any]] = {
    "the image alone": lambda image, i: image,
    "tuple": lambda image, i: (i, image, f"text {i}", b"label %d" % i, 0.5 * i, torch.arange(i, i + 3)),
    "list": lambda image, i: [image, [i, [np.float32(i), np.arange(3) + i]], True],
    "dict": lambda image, i: {"b": i, "a": {"deep": [(image, i)], 7: np.array([i], np.int16)}, "c": "x"},
    "OrderedDict": lambda image, i: OrderedDict(z=i, a=image),
    "defaultdict": lambda image, i: defaultdict(list, {"label": i, "image": image}),
    "UserDict": lambda image, i: UserDict(label=i, image=image),
    "namedtuple": lambda image, i: Parts(str(i), image, 1.5 * i),
    "namedtuple in dict": lambda image, i: {"x": Parts("x", (image,), i), "y": (i,)},
    "two images": lambda image, i: {"one": image, "label": i, "two": (image, "and text")},
    "an array beside a PIL image": lambda image, i: (np.full((3, 4, 2), i), image, torch.full((3, 5, 5), float(i))),
}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_structures_are_dataloaders(photographs: Any, shape: Any, workers: int, device: str) -> None:
    for size in (3, None):
        theirs = DataLoader(Samples(photographs, shape, EXACT), size)
        ours = DALILoader(Samples(photographs, shape), size, transform=EXACT, num_workers=workers, device=device)
        assert_near(list(ours), list(theirs))


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    label: int
    about: dict[str, Any]


@pytest.mark.parametrize("workers", [0, 1])
def test_dataclasses_which_dataloader_does_not_take(photographs: Any, workers: int, device: str) -> None:
    def sample(image: Any, index: int) -> Frozen:
        return Frozen(image, index, {"text": str(index)})

    loader = DALILoader(Samples(photographs, sample), 3, transform=EXACT, num_workers=workers, device=device)
    first = next(iter(loader))
    assert type(first) is Frozen
    assert first.about == {"text": ["0", "1", "2"]}
    assert first.label.tolist() == [0, 1, 2]  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(first.image.cpu(), torch.stack([EXACT(image) for image in photographs[:3]]))


def test_samples_are_not_changed(photographs: Any) -> None:
    """A dataset that keeps its samples gives the same objects in every epoch."""
    kept: list[dict[str, Any]] = [
        {"image": image, "inside": [image, {"label": i}], "frozen": Frozen(image, i, {})}
        for i, image in enumerate(photographs)
    ]
    before = [(id(sample["inside"]), sample["image"].tobytes()) for sample in kept]
    loader = DALILoader(kept, 2, transform=EXACT, device="cpu")  # pyright: ignore[reportArgumentType]
    first, second = ([{**batch, "frozen": vars(batch["frozen"])} for batch in loader] for _ in range(2))
    assert same(first, second)
    assert [(id(sample["inside"]), sample["image"].tobytes()) for sample in kept] == before
    assert all(type(sample["inside"][0]) is Image and sample["inside"][0] is sample["image"] for sample in kept)
    assert all(sample["frozen"].image is sample["image"] for sample in kept)


def test_batches_that_are_kept_do_not_change(photographs: Any) -> None:
    """Where the dataset hands out one buffer again and again, and where batches are held while others come."""
    buffer = np.empty((*SAME_SIZE, 3), np.uint8)

    def sample(image: Image, index: int) -> Any:
        np.copyto(buffer, np.asarray(image.resize(SAME_SIZE[::-1])))
        return buffer, index

    for workers in (0, 1):
        kept = list(DALILoader(Samples(photographs, sample), 1, transform=EXACT, num_workers=workers, device="cpu"))
        true = [EXACT(image.resize(SAME_SIZE[::-1])) for image in photographs]
        assert same([images[0] for images, _ in kept], [image.as_subclass(torch.Tensor) for image in true])


def test_first_that_is_like_an_image(photographs: Any, device: str) -> None:
    """Where there is neither a PIL image nor a tv_tensors.Image; not what has other axes or too many channels."""

    def sample(image: Any, index: int) -> Any:
        plane, deep = torch.full((7, 7), index), torch.zeros(5, 8, 8)
        return plane, np.zeros((4, 4, 5)), deep, b"no file", np.arange(9, dtype=np.uint8), image, torch.ones(3, 4, 4)

    images = [image.resize(SAME_SIZE) for image in photographs]
    for make in (np.array, F.pil_to_tensor, lambda image: encoded(image, "PNG")):
        theirs = DataLoader(Samples(images, sample, EXACT), 2)
        ours = DALILoader(Samples(images, sample, make), 2, transform=EXACT, device=device)
        assert_near(list(ours), list(theirs))


RANDOM = v2.Compose([v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4), v2.ToImage()])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 5])
def test_random_transforms_are_those_of_a_folder(pictures: Path, seed: int | None, workers: int, device: str) -> None:
    """Whether samples are asked for or read: the same numbers, so the same images."""
    folder = ImageFolder(pictures)
    asked = Samples([image for image, _ in folder], lambda image, i: (image, folder.targets[i]))
    seen: list[Any] = []
    for dataset in (folder, asked):
        torch.manual_seed(2)
        loader = DALILoader(dataset, 5, shuffle=True, transform=RANDOM, seed=seed, num_workers=workers, device=device)
        seen.append([list(loader) for _ in range(2)])
    read, proxied = seen
    for (images, labels), (true, true_labels) in zip(
        chain.from_iterable(proxied), chain.from_iterable(read), strict=True
    ):
        assert torch.equal(labels, true_labels)
        assert (images.float() - true.float()).abs().mean() <= (5 if device == "cuda" else 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_a_sample_share_their_random_numbers(photographs: Any, workers: int, device: str) -> None:
    in_torch = v2.Lambda(lambda image: image + torch.randint(0, 9, (1,), dtype=torch.uint8, device=image.device))
    chain = v2.Compose([v2.ToImage(), v2.RandomCrop(CROP), v2.RandomRotation(20), v2.RandomHorizontalFlip(), in_torch])

    def sample(image: Image, index: int) -> Any:
        red = image.getchannel(0)
        return {"image": image, "grey": red, "again": F.to_image(image), "index": index}

    dataset = Samples(photographs, sample)
    for batch in DALILoader(dataset, 2, transform=chain, num_workers=workers, seed=1, device=device):
        assert torch.equal(batch["image"], batch["again"])
        assert torch.equal(batch["image"][:, :1], batch["grey"])
    alone = DALILoader(Samples(photographs, pair), COUNT, transform=chain, seed=1, device=device)
    together = DALILoader(dataset, COUNT, transform=chain, seed=1, device=device)
    assert torch.equal(next(iter(alone))[0], next(iter(together))["image"])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("end", ["Image", "tensor", "PIL", "lambda"])
def test_collate_fn_gets_samples_as_torchvision_gives_them(
    photographs: Any, end: str, workers: int, device: str
) -> None:
    ends = {"Image": [v2.ToImage()], "tensor": [v2.ToImage(), v2.ToPureTensor()], "PIL": []}
    chain = v2.Compose([v2.CenterCrop(CROP), *ends.get(end, [v2.Lambda(lambda image: (image, image.size))])])

    def collate(samples: list[Any]) -> Any:
        return samples, [type(sample["image"]) for sample in samples], get_worker_info() is None

    def sample(image: Any, index: int) -> Any:
        return {"label": index, "image": image, "more": (f"{index}", [index])}

    theirs = list(DataLoader(Samples(photographs, sample, chain), 2, collate_fn=collate))
    ours = list(
        DALILoader(
            Samples(photographs, sample), 2, collate_fn=collate, transform=chain, num_workers=workers, device=device
        )
    )
    assert_near(ours, theirs)
    assert end != "Image" or ours[0][0][0]["image"].device.type == device


@pytest.mark.parametrize(
    "batches", [{"batch_size": None}, {"batch_size": 2}, {"batch_sampler": [[1, 0], [2]]}], ids=str
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_default_convert_is_a_list_of_samples(
    photographs: Any, batches: dict[str, Any], workers: int, device: str
) -> None:
    chain, options = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)]), {"collate_fn": default_convert, **batches}
    theirs = list(DataLoader(Samples(photographs, pair, chain), **options))
    ours = DALILoader(Samples(photographs, pair), transform=chain, num_workers=workers, device=device, **options)
    assert_near(list(ours), theirs)


def test_another_collate_fn_in_a_later_epoch(photographs: Any) -> None:
    """An attribute that DataLoader lets be set."""
    loader = DALILoader(Samples(photographs, pair), COUNT, transform=EXACT, device="cpu")
    stacked, one_by_one = next(iter(loader))[0], []
    for function in (list, default_collate, list):
        loader.collate_fn = function
        one_by_one.append([image for image, *_ in next(iter(loader))] if function is list else next(iter(loader))[0])
    for images in one_by_one:
        assert torch.equal(torch.stack(list(images)), stacked)


def test_collate_fn_gets_a_counter(photographs: Any) -> None:
    def sample(image: Any, index: int) -> Any:
        return image, Counter("ab" * index)

    options = {"transform": v2.CenterCrop(CROP), "collate_fn": lambda samples: [other for _, other in samples]}
    (counters,) = DALILoader(Samples(photographs, sample), COUNT, device="cpu", **options)
    assert [(type(one), one) for one in counters] == [(Counter, Counter("ab" * index)) for index in range(COUNT)]


def test_collate_fn_without_transform_runs_in_the_workers(photographs: Any, device: str) -> None:
    def collate(samples: list[Any]) -> Any:
        info = get_worker_info()
        return torch.stack([F.pil_to_tensor(image.resize(SAME_SIZE)) for image, _ in samples]), info and info.id

    loader = DALILoader(Samples(photographs, pair), 1, collate_fn=collate, num_workers=2, device=device)
    batches = list(loader)
    assert [worker for _, worker in batches] == [0, 1, 0, 1, 0]
    assert batches[0][0].device.type == device


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_transform_gets_the_whole_batch(photographs: Any, workers: int, device: str) -> None:
    chain = v2.Compose([EXACT, v2.ToDtype(torch.float32, scale=True)])
    dataset = Samples(photographs, pair)
    options = {"transform": chain, "num_workers": workers, "device": device}
    plain = list(DALILoader(dataset, 3, **options))
    mix = v2.MixUp(num_classes=COUNT)
    mixed = [list(DALILoader(dataset, 3, **options, batch_transform=mix, seed=4)) for _ in range(2)]
    assert same(*mixed)
    epochs = DALILoader(dataset, COUNT, **options, batch_transform=mix, seed=4)
    assert len({next(iter(epochs))[1][0, 0].item() for _ in range(3)}) == 3
    for (images, labels), (true, true_labels) in zip(mixed[0], plain, strict=True):
        share = labels[0, true_labels[0]]
        assert 0 < share < 1
        assert torch.allclose(images, share * true + (1 - share) * true.roll(1, 0), atol=1e-6)
    cut = DALILoader(dataset, 3, **options, batch_transform=lambda images, labels: {"n": len(images), "y": labels + 1})
    assert [batch["n"] for batch in cut] == [3, 2]


def test_several_views(photographs: Any, device: str) -> None:
    crops = v2.Compose([v2.ToImage(), v2.FiveCrop(20)])
    theirs = list(DataLoader(Samples(photographs, pair, crops), 2))
    mixed = [np.array(image) if i % 2 else image for i, image in enumerate(photographs)]
    for images in (photographs, mixed):
        assert_near(list(DALILoader(Samples(images, pair), 2, transform=crops, device=device)), theirs)


def test_chains_that_end_in_images_need_a_collate_fn(photographs: Any, device: str) -> None:
    loader = DALILoader(Samples(photographs, pair), 2, transform=v2.CenterCrop(CROP), device=device)
    with pytest.raises(TransformError, match=r"add v2.ToImage\(\)"):
        next(iter(loader))
    single = DALILoader(Samples(photographs, pair), None, transform=v2.CenterCrop(CROP), device=device)
    assert_near(list(single), list(DataLoader(Samples(photographs, pair, v2.CenterCrop(CROP)), None)))


@pytest.mark.parametrize("workers", [0, 1])
def test_videos_beside_masks_and_boxes(photographs: Any, workers: int) -> None:
    mask = tv_tensors.Mask(torch.zeros(SAME_SIZE, dtype=torch.uint8))
    boxes: Any = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=SAME_SIZE)  # pyright: ignore
    video = tv_tensors.Video(torch.arange(2 * 3 * 60 * 50).reshape(2, 3, *SAME_SIZE).to(torch.uint8))
    samples = [{"image": image, "target": [video, mask, boxes]} for image in map(F.to_image, photographs)]
    dataset: Any = [{**sample, "image": F.resize(sample["image"], SAME_SIZE)} for sample in samples]
    theirs = list(DataLoader([EXACT(sample) for sample in dataset], 2))
    assert_near(list(DALILoader(dataset, 2, transform=EXACT, num_workers=workers, device="cpu")), theirs)
    inside = Samples(photographs, lambda image, i: {"image": image, "target": [mask, boxes]}, EXACT)
    assert_near(list(DALILoader(inside, 2, num_workers=workers, device="cpu")), list(DataLoader(inside, 2)))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_without_image_are_collated_with_one_warning(workers: int, device: str) -> None:
    dataset: Any = [(torch.full((4,), i), f"text {i}", b"bytes") for i in range(COUNT)]
    loader = DALILoader(dataset, 2, transform=EXACT, num_workers=workers, device=device)
    with pytest.warns(UserWarning, match="no image was found in a sample, which is \\[0\\] Tensor") as caught:
        batches = list(loader)
    assert len([one for one in caught if "no image" in str(one.message)]) == 1
    assert_near(batches, list(DataLoader(dataset, 2)))
    assert_near(list(loader), list(DataLoader(dataset, 2)))
