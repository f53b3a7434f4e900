"""show_batch() draws the next batch, and changes nothing: neither the order, nor random numbers, nor an epoch."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import same
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, Subset
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.loader import loader as loader_module
from torchdali.loader.pictures import draw_batch, split_batch, to_pixels

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:This DataLoader will create")]

CHAIN = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(16), v2.RandomHorizontalFlip()])

FLOAT = [CHAIN, v2.ToDtype(torch.float32, scale=True)]


class Pictures(Dataset[Any]):
    """Pictures with a number that is drawn at random."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        pixels = np.full((20, 30, 3), 20 * index, np.uint8)
        return PIL.Image.fromarray(pixels), float(torch.rand(()) + random.random() + np.random.rand())  # noqa: NPY002


class Remembering(Sampler[int]):
    """A sampler that continues where its state says, and has a reference to the dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.epoch, self.count = dataset, 0, 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        for index in np.random.default_rng(self.epoch).permutation(12)[self.count :].tolist():
            self.count += 1
            yield index
        self.epoch, self.count = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.count = state["epoch"], state["count"]


LOADERS: dict[str, Callable[[ImageFolder, str], DALILoader[Any]]] = {
    "native": lambda folder, device: DALILoader(folder, 4, shuffle=True, transform=CHAIN, device=device),
    "a seed and a generator": lambda folder, device: DALILoader(
        folder, 4, shuffle=True, transform=CHAIN, device=device, seed=1, generator=torch.Generator().manual_seed(2)
    ),
    "a cache": lambda folder, device: DALILoader(
        folder, 4, shuffle=True, transform=CHAIN, device=device, cache="host", cache_bytes=2**20
    ),
    "worker-fed": lambda _, device: DALILoader(Pictures(), 4, shuffle=True, transform=CHAIN, device=device),
    "two workers": lambda _, device: DALILoader(
        Subset(Pictures(), range(12)), 4, shuffle=True, transform=CHAIN, device=device, num_workers=2
    ),
    "a stateful sampler": lambda folder, device: DALILoader(
        folder, 4, sampler=Remembering(folder), transform=CHAIN, device=device
    ),
    "a batch_transform": lambda folder, device: DALILoader(
        folder, 4, shuffle=True, transform=FLOAT, device=device, batch_transform=v2.MixUp(num_classes=30)
    ),
}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that would be drawn."""
    batches: list[Any] = []
    monkeypatch.setattr(loader_module, "draw_batch", lambda loader, batch, *_: batches.append(batch))
    return batches


def read_generators() -> list[Any]:
    _, words, *rest = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state(), random.getstate(), words.tolist(), rest]


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002


def run_epochs(loader: DALILoader[Any], show: bool) -> list[Any]:
    """Two epochs, the second of which is resumed, and what the global generators are after each batch."""
    seed_all()
    events: list[Any] = []

    def look() -> None:
        if show:
            loader.show_batch()
        events.append(read_generators())

    look()
    for batch in loader:
        events.append(batch)
        look()
    iterator = iter(loader)
    events.append(next(iterator))
    look()
    state = loader.state_dict()
    loader.load_state_dict(state)
    look()
    events += list(loader)
    look()
    loader.close()
    return events


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name == "two workers")) for name, make in LOADERS.items()],
)
def test_nothing_changes_and_the_next_batch_is_shown(
    dataset: ImageFolder, make: Callable[[ImageFolder, str], DALILoader[Any]], shown: list[Any], device: str
) -> None:
    dataset.transform = None
    loader = make(dataset, device)
    expected = run_epochs(make(dataset, device), show=False)
    assert same(run_epochs(loader, show=True), expected)
    batches = [event for event in expected if event[0].ndim == 4]
    count = len(loader)
    following = [*batches[: count + 1], batches[count + 1], batches[count + 1]]
    assert len(shown) == len(following) + 1
    for ours, theirs in zip(shown, following, strict=False):
        # Resumed workers do not know how often the ones before them have drawn.
        assert torch.equal(ours[0], theirs[0]) if loader.num_workers else same(ours, theirs)
    assert loader.errors == []


def test_a_share_of_a_rank(dataset: ImageFolder, shown: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdali.state.sharding.get_rank_and_world_size", lambda: (1, 2))
    dataset.transform = None
    options: dict[str, Any] = {"shuffle": True, "transform": CHAIN, "seed": 1, "distributed": "auto", "device": "cpu"}
    expected = run_epochs(DALILoader(dataset, 4, **options), show=False)
    assert same(run_epochs(DALILoader(dataset, 4, **options), show=True), expected)
    batches = [event for event in expected if isinstance(event[0], torch.Tensor) and event[0].ndim == 4]
    assert same(shown[:2], batches[:2])


def test_its_time_is_not_the_training_steps(dataset: ImageFolder, shown: list[Any]) -> None:
    loader = DALILoader(dataset, 4, device="cpu")
    iterator = iter(loader)
    next(iterator)
    clock = loader._clock
    assert clock is not None
    skipped: list[float] = []
    clock.skip = skipped.append
    loader.show_batch()
    assert len(shown) == 1
    assert skipped[0] > 0


def test_samples_that_are_bad_are_not_counted(fresh_pictures: Path, shown: list[Any]) -> None:
    sorted(fresh_pictures.rglob("*.jpg"))[1].write_bytes(b"no picture")
    loader = DALILoader(fresh_pictures, 4, transform=CHAIN, device="cpu", on_error="replace", max_errors=1)
    for _ in range(3):
        loader.show_batch()
    assert (loader.errors, len(shown)) == ([], 3)
    reader = loader._session.reader
    assert reader is not None
    assert reader.bad_rows == frozenset()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(3, 20, 30, dtype=torch.uint8), 1)] * 4)


def test_what_cannot_be_shown(dataset: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^show_batch\(\) needs num_workers above 0 for an IterableDataset, got 0"):
        DALILoader(Stream(), 2, transform=CHAIN, device="cpu").show_batch()
    with pytest.raises(ValueError, match=r"^show_batch\(\) needs a batch, and this loader has none$"):
        DALILoader(Subset(dataset, []), 2, device="cpu").show_batch()
    with pytest.raises(ValueError, match=r"^show_batch\(\) needs images in the batch, and found none$"):
        DALILoader([1, 2], 2, device="cpu").show_batch()  # pyright: ignore[reportArgumentType]
    sampler = RandomSampler(dataset)
    vars(sampler)["lock"] = threading.Lock()
    with pytest.raises(TypeError, match=r"^show_batch\(\) needs samplers that copy\.deepcopy\(\) can copy, got Type"):
        DALILoader(dataset, 2, sampler=sampler, device="cpu").show_batch()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"^show_batch\(\) needs matplotlib, which is not installed: pip install"):
        DALILoader(dataset, 2, device="cpu").show_batch()


# Pictures


def read_titles(file: Path) -> list[str]:
    """The titles in an SVG. Matplotlib writes texts into comments."""
    return [line.strip()[5:-4] for line in file.read_text().splitlines() if line.strip().startswith("<!-- ")]


def test_a_grid_of_real_pictures(photographs: ImageFolder, tmp_path: Path) -> None:
    normalize = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)]
    chain = v2.Compose([v2.ToImage(), v2.Resize((40, 60)), *normalize])
    loader = DALILoader(photographs, 6, transform=chain, device="cpu")
    loader.show_batch(5, tmp_path / "grid.svg")
    assert read_titles(tmp_path / "grid.svg") == [photographs.classes[label] for label in photographs.targets[:5]]
    loader.show_batch(file=tmp_path / "grid.png")
    grid = np.asarray(PIL.Image.open(tmp_path / "grid.png").convert("RGB"))
    assert grid.shape == (360, 720, 3)
    image = next(iter(DALILoader(photographs, 6, transform=[v2.ToImage(), v2.Resize((40, 60))], device="cpu")))[0][0]
    shown = grid[22:175, 6:234]  # the first picture
    assert np.abs(shown.mean((0, 1)) - image.numpy().mean((1, 2))).max() < 3, "the normalization is undone"


IMAGES = torch.zeros(3, 3, 20, 30)
BOXES = tv_tensors.BoundingBoxes([[2, 3, 12, 13], [4, 4, 8, 8]], format="XYXY", canvas_size=(20, 30))  # pyright: ignore
MASK = tv_tensors.Mask(torch.ones(2, 20, 30, dtype=torch.bool))
BATCHES: dict[str, tuple[Any, list[list[Any]]]] = {
    "images and labels": ((IMAGES, torch.tensor([4, 5, 6])), [[4], [5], [6]]),
    "images alone": (IMAGES, [[], [], []]),
    "a dictionary": ({"name": ["a", "b", "c"], "image": IMAGES}, [["a"], ["b"], ["c"]]),
    "targets of each sample": ((list(IMAGES), [{"boxes": BOXES}, {}, {"n": 7}]), [[BOXES], [], [7]]),
    "targets beside a tensor": ((IMAGES, ({"boxes": BOXES}, {}, {"n": 7})), [[BOXES], [], [7]]),
    "samples": ([(image, number) for number, image in enumerate(IMAGES)], [[0], [1], [2]]),
    "views": (([IMAGES, IMAGES[:, :, :9]], torch.tensor([1, 2, 3])), [[1], [2], [3]]),
    "nested": (({"pixels": {"image": IMAGES}, "id": torch.arange(3)}, None), [[0], [1], [2]]),
    "nothing": ((torch.zeros(3, 4), ["a"]), []),
}


@pytest.mark.parametrize(("batch", "parts"), BATCHES.values(), ids=BATCHES.keys())
def test_the_samples_of_a_batch(batch: Any, parts: list[list[Any]]) -> None:
    samples = split_batch(batch)
    assert len(samples) == len(parts)
    for sample, expected in zip(samples, parts, strict=True):
        assert sample.image.shape == (3, 20, 30)
        numbers = [int(x) if isinstance(x, torch.Tensor) and x.ndim == 0 else x for x in sample.parts]
        assert same(numbers, expected)


def test_frames_of_a_video_stand_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    videos = torch.arange(3 * 7).view(3, 7, 1, 1, 1).expand(3, 7, 3, 20, 30) / 21
    samples = split_batch((videos, torch.arange(3)))
    assert [[int(part) for part in sample.parts] for sample in samples] == [[0], [1], [2]]
    for number, sample in enumerate(samples):
        assert sample.image.shape == (3, 20, 4 * 30)
        assert torch.equal(sample.image[0, 0, ::30], videos[number, [0, 2, 4, 6], 0, 0, 0])
    (short,) = split_batch((videos[:1, :2], torch.zeros(1)))
    assert short.image.shape == (3, 20, 2 * 30)
    loader: Any = SimpleNamespace(dataset=Pictures(), transform=None)
    draw_batch(loader, (videos, torch.arange(3)), 3, tmp_path / "strips.png")
    with PIL.Image.open(tmp_path / "strips.png") as grid:
        assert grid.size == (960, 540), "one strip beside the other has no place"


def test_masks_of_a_batch_keep_their_class() -> None:
    (first, _) = split_batch((IMAGES[:2], tv_tensors.Mask(torch.ones(2, 20, 30, dtype=torch.uint8))))
    assert [type(part) for part in first.parts] == [tv_tensors.Mask]
    assert first.parts[0].shape == (20, 30)


def test_what_is_drawn_over_an_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    points = tv_tensors.KeyPoints([[[3, 4], [5, 6]]], canvas_size=(20, 30))
    rotated = tv_tensors.BoundingBoxes(torch.tensor([[10.0, 10, 6, 4, 90]]), format="CXCYWHR", canvas_size=(20, 30))  # pyright: ignore
    labels = tv_tensors.Mask(torch.tensor([[0, 255], [1, 9]]).repeat_interleave(10, 0).repeat_interleave(15, 1))
    calls: list[tuple[str, Any]] = []

    class Axes:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: calls.append((name, (args, options)))

    grid = SimpleNamespace(flat=[Axes()])
    figure = SimpleNamespace(subplots=lambda *_, **__: grid, axes=[], savefig=lambda _: None)
    monkeypatch.setattr("matplotlib.figure.Figure", lambda *_, **__: figure)
    loader = SimpleNamespace(dataset=SimpleNamespace(classes=["$x$", "dog"]), transform=None)
    draw_batch(loader, [(IMAGES[0], [BOXES, rotated, MASK, labels, points, 0])], 9, tmp_path / "x")
    names = [name for name, _ in calls]
    assert names == ["imshow", "fill", "fill", "fill", "imshow", "imshow", "plot", "set_title"]
    xs, ys = calls[1][1][0]
    assert (xs.tolist(), ys.tolist()) == ([2, 12, 12, 2], [3, 3, 13, 13])
    turned = sorted(zip(*(np.round(axis).tolist() for axis in calls[3][1][0]), strict=True))
    assert turned == [(8, 7), (8, 13), (12, 7), (12, 13)], "a quarter turn swaps width and height"
    instances, semantic = calls[4][1][0][0], calls[5][1][0][0]
    assert instances.shape == semantic.shape == (20, 30, 4)
    assert set(instances[..., 3].ravel()) == {0.5}
    assert semantic[0, 0, 3] == semantic[0, 29, 3] == 0, "background and what is to be ignored"
    assert semantic[19, 0, 3] == semantic[19, 29, 3] == 0.5
    assert [axis.tolist() for axis in calls[6][1][0][:2]] == [[3, 5], [4, 6]]
    assert calls[7][1] == (("$x$",), {"fontsize": 9, "parse_math": False})


def test_pixels() -> None:
    assert to_pixels(torch.full((1, 2, 2), 255, dtype=torch.uint8)).tolist() == [[[1, 1, 1]] * 2] * 2
    assert to_pixels(torch.full((3, 1, 1), 127.5)).tolist() == [[[0.5] * 3]]
    assert to_pixels(torch.full((3, 1, 1), 0.25)).tolist() == [[[0.25] * 3]]
    assert to_pixels(torch.ones(4, 1, 1, dtype=torch.bool)).shape == (1, 1, 3)
    assert to_pixels(PIL.Image.new("L", (2, 1), 255)).tolist() == [[[1, 1, 1]] * 2]
    mean, std = torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25)
    assert to_pixels(torch.full((3, 1, 1), -1.0), [(mean, std)]).tolist() == [[[0.25] * 3]]
    assert to_pixels(torch.full((3, 1, 1), float("nan"))).tolist() == [[[0] * 3]]
