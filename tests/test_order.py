"""DALILoader yields what DataLoader yields: the same samples in the same order and structure, and the same errors."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CROP, Numbered
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, UnsupportedDatasetError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

WORKERS = [
    pytest.param({"num_workers": 0}, id="0 workers"),
    pytest.param({"num_workers": 2}, id="2 workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="2 persistent"),
]


class Uneven:
    """A batch sampler of no fixed size that draws as it goes, and has no length."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count, self.generator = count, generator

    def __iter__(self) -> Iterator[list[int]]:
        for size in (3, 1, 7, 2, 5):
            yield torch.randint(self.count, (size,), generator=self.generator).tolist()


class Eager:
    """A sampler that draws when it is asked for an iterator, not when that is asked for an index."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count, self.generator = count, generator

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count, generator=self.generator).tolist())


class EagerBatches(Eager):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(self.count, generator=self.generator).view(-1, 4).tolist())


def weighted(count: int, generator: torch.Generator | None, replacement: bool) -> WeightedRandomSampler:
    return WeightedRandomSampler(np.arange(1, count + 1), count, replacement, generator)


def subset_random(count: int, generator: torch.Generator | None) -> SubsetRandomSampler:
    return SubsetRandomSampler(range(2, count, 2), generator)


def distributed(count: int, *, shuffle: bool) -> DistributedSampler[Any]:
    return DistributedSampler(range(count), num_replicas=2, rank=1, shuffle=shuffle, seed=3)  # pyright: ignore


Arguments = dict[str, Any]
ARGUMENTS: dict[str, Callable[[int, torch.Generator | None], Arguments]] = {
    "nothing": lambda n, g: {},
    "batch_size": lambda n, g: {"batch_size": 5},
    "shuffle": lambda n, g: {"batch_size": 5, "shuffle": True},
    "shuffle, drop_last": lambda n, g: {"batch_size": 5, "shuffle": True, "drop_last": True},
    "batch_size=None": lambda n, g: {"batch_size": None},
    "batch_size=None, shuffle": lambda n, g: {"batch_size": None, "shuffle": True},
    "sequential": lambda n, g: {"batch_size": 7, "sampler": SequentialSampler(range(n))},
    "random": lambda n, g: {"batch_size": 7, "sampler": RandomSampler(range(n), generator=g)},
    "random, many": lambda n, g: {"batch_size": 7, "sampler": RandomSampler(range(n), num_samples=2 * n + 3)},
    "replacement": lambda n, g: {"batch_size": 6, "sampler": RandomSampler(range(n), True, 70, g)},
    "weighted": lambda n, g: {"batch_size": 5, "sampler": weighted(n, g, replacement=True)},
    "weighted, once": lambda n, g: {"batch_size": 5, "sampler": weighted(n, g, replacement=False)},
    "subset": lambda n, g: {"batch_size": 4, "sampler": subset_random(n, g)},
    "distributed": lambda n, g: {"batch_size": 5, "sampler": distributed(n, shuffle=True)},
    "distributed in order": lambda n, g: {"batch_size": 5, "sampler": distributed(n, shuffle=False)},
    "uneven batches": lambda n, g: {"batch_sampler": Uneven(n, g)},
    "lists": lambda n, g: {"batch_sampler": [[0], [3, 3, 2], list(range(n)), [1]]},
    "tensors": lambda n, g: {"batch_size": 5, "sampler": torch.arange(n - 1, -1, -1)},
    "numpy integers": lambda n, g: {"batch_size": 5, "sampler": np.random.default_rng(1).permutation(n)},
    "negative": lambda n, g: {"batch_size": 5, "sampler": range(-1, -n - 1, -1)},
    "drawn at iter": lambda n, g: {"batch_size": 5, "sampler": Eager(n, g)},
    "drawn at iter, batch_size=None": lambda n, g: {"batch_size": None, "sampler": Eager(n, g)},
    "batches drawn at iter": lambda n, g: {"batch_sampler": EagerBatches(n, g)},
}


def length(loader: DataLoader[Any]) -> int | type[Exception]:
    try:
        return len(loader)
    except TypeError as error:
        return type(error)


def epochs(loader_class: type, dataset: Any, arguments: Any, own_generator: bool, **options: Any) -> list[Any]:
    """Of three epochs: targets by batch, pictures, and the states of the generators after it; and the length."""
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(5) if own_generator else None
    loader = loader_class(dataset, generator=generator, **arguments(len(dataset), generator), **options)
    seen: list[Any] = [length(loader)]
    for number in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(number)
        batches = list(loader)
        targets = [torch.as_tensor(target).tolist() for _, target in batches]
        states = [torch.get_rng_state().tolist(), generator.get_state().tolist() if generator else None]
        seen.append((targets, states, torch.cat([images.reshape(-1, 3, CROP, CROP).cpu() for images, _ in batches])))
    return seen


def assert_same_epochs(ours: list[Any], theirs: list[Any], device: str) -> None:
    assert ours[0] == theirs[0], "len"
    for (targets, states, images), (true_targets, true_states, true_images) in zip(ours[1:], theirs[1:], strict=True):
        assert targets == true_targets
        assert states[0] == true_states[0], "torch's global generator"
        assert states[1] == true_states[1], "the generator that was given"
        assert_same_pictures(images, true_images, device)


def assert_same_pictures(ours: torch.Tensor, theirs: torch.Tensor, device: str) -> None:
    """Equal on the CPU; on CUDA, whose JPEG decoder is another one, nearer than two of the photographs ever are."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    if device == "cpu":
        assert torch.equal(ours, theirs)
    else:
        difference = (ours.cpu().float() - theirs.float()).abs().flatten(1).mean(1)
        assert difference.max() < 5


def same(ours: Any, theirs: Any) -> bool:
    """Whether two objects are equal in types and values all through."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, dict):
        return same(list(ours.items()), list(theirs.items()))
    return ours == theirs


def identity(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("own_generator", [False, True], ids=["torch.manual_seed", "generator"])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_order_and_generators_are_dataloaders(
    dataset: ImageFolder, arguments: Any, workers: dict[str, Any], own_generator: bool
) -> None:
    theirs = epochs(DataLoader, dataset, arguments, own_generator, **workers)
    ours = epochs(DALILoader, dataset, arguments, own_generator, **workers, device="cpu")
    assert_same_epochs(ours, theirs, "cpu")


def test_order_on_each_device(dataset: ImageFolder, device: str) -> None:
    theirs = epochs(DataLoader, dataset, ARGUMENTS["shuffle"], own_generator=False)
    ours = epochs(DALILoader, dataset, ARGUMENTS["shuffle"], own_generator=False, device=device)
    assert_same_epochs(ours, theirs, device)


def test_shuffled_epochs_differ_and_pictures_are_told_apart(dataset: ImageFolder) -> None:
    _, first, second, _ = epochs(DataLoader, dataset, ARGUMENTS["shuffle"], own_generator=False)
    assert first[0] != second[0]
    pictures = torch.stack([image for image, _ in dataset]).float().flatten(1)
    distances = torch.cdist(pictures, pictures, p=1) / pictures.shape[1]
    assert distances.fill_diagonal_(torch.inf).min() > 10


@pytest.mark.parametrize("workers", WORKERS[:2])
@pytest.mark.parametrize("after", [1, 3])
def test_order_after_a_break_and_with_other_draws_between(dataset: ImageFolder, workers: Any, after: int) -> None:
    def run(loader_class: type, **options: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = loader_class(dataset, batch_size=4, shuffle=True, **workers, **options)
        seen: list[Any] = []
        for _ in range(2):
            iterator = iter(loader)
            seen += [(torch.rand(1).item(), next(iterator)[1].tolist()) for _ in range(after)]
            seen.append(torch.rand(1).item())
        return [*seen, [(labels.tolist(), torch.rand(1).item()) for _, labels in loader]]

    assert run(DALILoader, device="cpu") == run(DataLoader)


@pytest.mark.parametrize("workers", WORKERS[:2])
def test_global_generators_are_left_alone(pictures: Path, numbered: Numbered, workers: dict[str, Any]) -> None:
    """In whatever runs: rules, transforms left to torch, target transforms."""
    draw_all = v2.Lambda(lambda x: x + torch.rand(1) + np.random.rand() + random.random())  # noqa: NPY002
    random_chain = v2.Compose(
        [v2.ToImage(), v2.RandomResizedCrop(CROP), v2.ColorJitter(0.2), v2.RandomPosterize(4), draw_all]
    )
    dataset = numbered(pictures, random_chain, target_transform=lambda i: i + 0 * random.random())
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)

    def states() -> list[Any]:
        return [random.getstate(), *(np.asarray(x).tolist() for x in np.random.get_state()[1:3])]  # noqa: NPY002

    before = states()
    theirs = epochs(DataLoader, numbered(pictures), ARGUMENTS["shuffle"], own_generator=False)
    ours = epochs(DALILoader, dataset, ARGUMENTS["shuffle"], own_generator=False, device="cpu", **workers)
    assert states() == before
    assert [epoch[:2] for epoch in ours[1:]] == [epoch[:2] for epoch in theirs[1:]]
    assert not torch.equal(ours[1][2], ours[2][2]), "the chain does draw"


CHAINS = {
    "uint8": v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)]),
    "PILToTensor": v2.Compose([v2.CenterCrop(CROP), v2.PILToTensor()]),
    "float32": v2.Compose([v2.ToImage(), v2.CenterCrop((20, 30)), v2.ToDtype(torch.float32, scale=True)]),
    "v1": v1.Compose([v1.CenterCrop(CROP), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)]),
    "one channel": v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), v2.Grayscale()]),
    "in torch": v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), v2.Lambda(lambda x: x.double())]),
    "resized": v2.Compose([v2.ToImage(), v2.Resize((40, 40))]),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("batch_size", [None, 5])
def test_structure_is_dataloaders(
    pictures: Path, numbered: Numbered, chain: Any, batch_size: int | None, device: str
) -> None:
    dataset = numbered(pictures, chain)
    ours = list(DALILoader(dataset, batch_size, device=device))
    for batch, true in zip(ours, DataLoader(dataset, batch_size), strict=True):
        assert type(batch) is type(true) is list
        (images, labels), (true_images, true_labels) = batch, true
        assert type(images) is type(true_images)
        assert (images.shape, images.dtype) == (true_images.shape, true_images.dtype)
        assert images.device.type == device
        assert images.is_contiguous()
        if batch_size is None:
            assert type(labels) is int
        else:
            assert labels.device.type == device
            assert (labels.dtype, labels.shape) == (torch.int64, images.shape[:1])
            labels, true_labels = labels.tolist(), true_labels.tolist()
        assert labels == true_labels
        if device == "cpu":  # 2 levels of 256, away from the border
            ours_inside, true_inside = (x[..., 4:-4, 4:-4].double() for x in (images, true_images))
            assert (ours_inside - true_inside).abs().max() <= (0.04 if images.dtype == torch.float32 else 2)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(
    "chain",
    [None, v2.ToImage(), v2.PILToTensor(), v2.Compose([v2.ToImage(), v2.ToPureTensor()]), v2.Lambda(np.asarray)],
    ids=["PIL", "ToImage", "PILToTensor", "ToPureTensor", "numpy"],
)
def test_collate_fn_gets_samples_as_torchvision_gives_them(
    pictures: Path, numbered: Numbered, chain: Any, batch_size: int | None
) -> None:
    dataset = numbered(pictures, chain)
    theirs = list(DataLoader(dataset, batch_size, collate_fn=identity))
    ours = list(DALILoader(dataset, batch_size, collate_fn=identity, device="cpu"))
    assert len(ours) == len(theirs)
    for batch, true in zip(ours, theirs, strict=True):
        assert type(batch) is type(true)
        for sample, true_sample in zip(*([x] if batch_size is None else x for x in (batch, true)), strict=True):
            assert (type(sample), len(sample)) == (tuple, 2)
            (image, target), (true_image, true_target) = sample, true_sample
            assert (type(target), target) == (type(true_target), true_target)
            is_pil = hasattr(true_image, "getpixel")
            assert hasattr(image, "getpixel") == is_pil
            assert is_pil or type(image) is type(true_image)
            assert not is_pil or image.mode == true_image.mode
            assert np.array_equal(np.asarray(image), np.asarray(true_image))


def test_collate_fn_gets_images_on_the_device(pictures: Path, numbered: Numbered, device: str) -> None:
    (image, target), *_ = next(
        iter(DALILoader(numbered(pictures, v2.ToImage()), 2, collate_fn=identity, device=device))
    )
    assert (type(image), image.device.type, target) == (tv_tensors.Image, device, 0)


@pytest.mark.parametrize(
    "target_transform",
    [lambda i: i + 100, str, float, lambda i: {"number": i, "pair": (i, [i])}, np.int64, torch.tensor, bool],
    ids=["int", "str", "float", "dict", "numpy", "tensor", "bool"],
)
@pytest.mark.parametrize("place", ["target_transform", "samples"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_targets_of_any_kind_are_dataloaders(
    pictures: Path, numbered: Numbered, target_transform: Any, place: str, batch_size: int | None
) -> None:
    dataset = numbered(pictures)
    if place == "samples":
        dataset.samples = [(path, target_transform(target)) for path, target in dataset.samples]
    else:
        dataset.target_transform = target_transform
    ours = DALILoader(dataset, batch_size, device="cpu")
    assert same(list(ours), list(DataLoader(dataset, batch_size)))


NESTED: dict[str, Callable[[ImageFolder, ImageFolder], Any]] = {
    "subset": lambda a, b: Subset(a, [5, 3, 3, -1]),
    "subset of tensor": lambda a, b: Subset(a, torch.tensor([5, 3, 9])),  # pyright: ignore
    "empty subset": lambda a, b: Subset(a, []),
    "subset of subset": lambda a, b: Subset(Subset(a, range(20, 0, -1)), np.arange(3, 9)),  # pyright: ignore
    "random_split": lambda a, b: random_split(a, [10, len(a) - 10], torch.Generator().manual_seed(0))[1],
    "concat": lambda a, b: ConcatDataset([a, b, a]),
    "nested": lambda a, b: Subset(ConcatDataset([Subset(b, [4, 2]), ConcatDataset([a, b])]), [1, 30, 0, 45, -2]),
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED.keys())
def test_nested_datasets(pictures: Path, numbered: Numbered, nest: Any) -> None:
    other = numbered(pictures, first=100, target_transform=lambda i: i + 1)
    dataset = nest(numbered(pictures), other)
    ours = DALILoader(dataset, 3, device="cpu")
    assert len(ours) == len(DataLoader(dataset, 3))
    assert same(list(ours), list(DataLoader(dataset, 3)))


@pytest.mark.parametrize("kind", [str, Path])
def test_dataset_may_be_a_path(pictures: Path, exact: Any, kind: type) -> None:
    ours = DALILoader(kind(pictures), 5, transform=exact, device="cpu")
    assert isinstance(ours.dataset, ImageFolder)
    assert same(list(ours), list(DataLoader(ImageFolder(pictures, exact), 5)))


def test_transform_follows_the_datasets_own(pictures: Path, numbered: Numbered) -> None:
    more = v2.CenterCrop(10)
    ours = DALILoader(numbered(pictures), 5, transform=more, device="cpu")
    chained = numbered(pictures, v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), more]))
    assert same(list(ours), list(DataLoader(chained, 5)))


def change_transform(dataset: ImageFolder) -> None:
    dataset.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(10)])


def change_inside_transform(dataset: ImageFolder) -> None:
    dataset.transform.transforms[1] = v2.CenterCrop(10)


def change_samples(dataset: ImageFolder) -> None:
    dataset.samples = dataset.samples[::-1]


def append_samples(dataset: ImageFolder) -> None:
    dataset.samples.append((dataset.samples[3][0], 99))


def change_one_sample(dataset: ImageFolder) -> None:
    dataset.samples[0] = (dataset.samples[3][0], 99)


def change_target_transform(dataset: ImageFolder) -> None:
    dataset.target_transform = str


CHANGES = [change_transform, change_inside_transform, change_samples, append_samples, change_one_sample]


@pytest.mark.parametrize("change", [*CHANGES, change_target_transform])
@pytest.mark.parametrize("iterated", [False, True], ids=["before the first epoch", "between epochs"])
@pytest.mark.parametrize("nest", [identity, lambda folder: ConcatDataset([folder])], ids=["folder", "concat"])
def test_changed_dataset_is_seen_by_the_next_epoch(
    pictures: Path, numbered: Numbered, change: Any, iterated: bool, nest: Any
) -> None:
    folder = numbered(pictures, v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)]))
    ours = DALILoader(nest(folder), 5, device="cpu", sampler=range(24))
    before = list(ours) if iterated else list(DataLoader(nest(folder), 5, sampler=range(24)))
    change(folder)
    true = list(DataLoader(nest(folder), 5, sampler=range(24)))
    assert same(list(ours), true)
    assert change is append_samples or not same(before, true)


def test_appended_samples_are_loaded(dataset: ImageFolder) -> None:
    ours = DALILoader(dataset, 5, device="cpu")
    list(ours)
    append_samples(dataset)
    assert len(ours) == 5
    assert list(ours)[-1][1].tolist() == [20, 21, 22, 23, 99]


class Overriding(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class OverridingSubset(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> Any:
        return super().__getitems__(indices)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def load_grey(path: str) -> Any:
    raise AssertionError("never called")


REJECTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "__getitem__": (Overriding, "Overriding overrides how samples are fetched"),
    "__getitems__": (lambda p: OverridingSubset(ImageFolder(p), [0]), "OverridingSubset"),
    "loader": (lambda p: ImageFolder(p, loader=load_grey), "loader of its own, load_grey"),
    "iterable": (lambda p: Stream(), "Stream is an IterableDataset"),
    "tensors": (lambda p: TensorDataset(torch.ones(3)), "TensorDataset is not an image folder"),
    "list": (lambda p: [1, 2], "list is not an image folder"),
    "inside": (lambda p: ConcatDataset([ImageFolder(p), Subset(Overriding(p), [0])]), "Overriding"),
    "transforms": (
        lambda p: ConcatDataset([ImageFolder(p, v2.CenterCrop(3)), ImageFolder(p, v2.CenterCrop(4))]),
        "different transforms",
    ),
}


@pytest.mark.parametrize(("make", "text"), REJECTED.values(), ids=REJECTED.keys())
def test_other_datasets_are_rejected(pictures: Path, make: Any, text: str) -> None:
    with pytest.raises(UnsupportedDatasetError, match=text) as caught:
        DALILoader(make(pictures), device="cpu")
    assert isinstance(caught.value, TypeError)
    if text != "different transforms":
        assert "keep torch.utils.data.DataLoader" in str(caught.value)


def test_signature_is_dataloaders_and_four_more(dataset: ImageFolder) -> None:
    theirs = dict(inspect.signature(DataLoader).parameters)
    ours = dict(inspect.signature(DALILoader).parameters)
    added = {name: p.default for name, p in ours.items() if name not in theirs}
    assert added == {"transform": None, "device": "auto", "seed": None, "fidelity": "exact"}
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all((ours[name].kind, ours[name].default) == (p.kind, p.default) for name, p in theirs.items())
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in added)


def test_is_a_dataloader(dataset: ImageFolder) -> None:
    options = {"batch_size": 5, "drop_last": True, "timeout": 3, "num_workers": 2, "prefetch_factor": 4}
    ours, theirs = DALILoader(dataset, **options, device="cpu"), DataLoader(dataset, **options)
    assert isinstance(ours, DataLoader)
    names = [*options, "dataset", "collate_fn", "generator", "pin_memory", "persistent_workers", "in_order"]
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert ours.collate_fn is default_collate
    with pytest.raises(ValueError, match="batch_size attribute should not be set after DALILoader is initialized"):
        ours.batch_size = 3


WRONG: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"num_workers": 1, "prefetch_factor": -1},
    {"persistent_workers": True},
    {"shuffle": True, "sampler": range(3)},
    {"batch_size": 2, "batch_sampler": [[1]]},
    {"drop_last": True, "batch_sampler": [[1]]},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": 2.5},
    {"drop_last": "yes"},
    {"multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "thread"},
    {"unheard_of": 1},
]


@pytest.mark.parametrize("arguments", WRONG, ids=repr)
def test_argument_errors_are_dataloaders(dataset: ImageFolder, arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as theirs:
        DataLoader(dataset, **arguments)
    with pytest.raises(type(theirs.value)) as ours:
        DALILoader(dataset, **arguments, device="cpu")
    assert type(ours.value) is type(theirs.value)
    assert str(ours.value) == str(theirs.value)
