"""DALILoader yields what DataLoader yields: the same samples in the same order and structure, and the same errors."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CROP, Numbered
from helpers.arguments import ARGUMENTS, COMBINED, WORKERS, Uneven
from torch.utils.data import (
    DataLoader,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import torchdali
from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


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


@pytest.mark.parametrize(("arguments", "workers", "own_generator"), COMBINED)
def test_order_and_generators_are_dataloaders(
    dataset: ImageFolder, arguments: Any, workers: dict[str, Any], own_generator: bool
) -> None:
    theirs = epochs(DataLoader, dataset, arguments, own_generator, **workers)
    ours = epochs(DALILoader, dataset, arguments, own_generator, **workers, device="cpu")
    assert_same_epochs(ours, theirs, "cpu")


def test_order_of_a_generator_that_is_seeded_for_each_epoch(dataset: ImageFolder) -> None:
    """The iterator before, which lives on until then, takes back what it asked too early, and does so once."""

    def last_epoch(kind: type, **options: Any) -> Any:
        generator, iterator = torch.Generator(), iter(())
        loader = kind(dataset, batch_sampler=Uneven(24, generator), num_workers=2, generator=generator, **options)
        for _ in range(3):
            generator.manual_seed(3)
            iterator = iter(loader)
        return [labels.tolist() for _, labels in iterator], generator.get_state().tolist()

    assert last_epoch(DALILoader, device="cpu") == last_epoch(DataLoader)


@pytest.mark.parametrize("arguments", [pytest.param(ARGUMENTS[name], id=name) for name in ("shuffle", "random")])
@pytest.mark.parametrize("before_the_end", [1, 2])
def test_order_while_an_iterator_that_was_left_near_its_end_is_alive(
    dataset: ImageFolder, arguments: Any, before_the_end: int
) -> None:
    """As trainers leave it: they keep the iterator that they have, until they ask for the next one."""
    found = []
    for kind in (DataLoader, DALILoader):
        generator = torch.Generator().manual_seed(5)
        loader = kind(dataset, generator=generator, **arguments(len(dataset), generator))
        kept: list[Any] = []
        seen: list[Any] = []
        for _ in range(3):
            kept.append(iter(loader))
            seen.append([next(kept[-1])[1].tolist() for _ in range(len(loader) - before_the_end)])
        found.append((seen, [labels.tolist() for _, labels in loader], generator.get_state().tolist()))
    theirs, ours = found
    assert ours == theirs
    assert len(theirs[0][0]) >= 1


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


def test_signature_is_dataloaders_and_thirteen_more(dataset: ImageFolder) -> None:
    theirs = dict(inspect.signature(DataLoader).parameters)
    ours = dict(inspect.signature(DALILoader).parameters)
    added = {name: p.default for name, p in ours.items() if name not in theirs}
    own = {"transform": None, "batch_transform": None, "device": "auto", "seed": None, "fidelity": "exact"}
    own |= {"cache": None, "cache_bytes": None, "distributed": None, "on_error": "raise", "max_errors": None}
    own |= {"images": None, "decode_bytes": None, "cache_dir": None}
    assert added == own
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all((ours[name].kind, ours[name].default) == (p.kind, p.default) for name, p in theirs.items())
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in added)


@pytest.mark.parametrize("name", ["batch_size", "seed", "on_error", "max_errors", "fidelity", "images"])
def test_what_is_settled_is_not_set_in_vain(dataset: ImageFolder, name: str) -> None:
    loader = DALILoader(dataset, device="cpu")
    for one in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        with pytest.raises(ValueError, match=f"^{name} attribute should not be set after DALILoader is initialized"):
            setattr(one, name, getattr(one, name))


def test_a_class_of_transforms_is_no_transform(dataset: ImageFolder) -> None:
    for one in ("transform", v2.RandomCrop), ("transform", [v1.ToTensor]), ("batch_transform", v2.MixUp):
        wrong: dict[str, Any] = dict([one])
        with pytest.raises(TypeError, match=r"^(\w+) is a class of transforms: give what \1\(\.\.\.\) makes"):
            DALILoader(dataset, **wrong)
    for other in ("x", [v2.ToImage(), None]):
        with pytest.raises(TypeError, match=r"a transform must be callable, got ('x'|None)$"):
            torchdali.compile(other)
    with pytest.raises(TypeError, match="Compose was given a generator, which the first call uses up"):
        torchdali.compile(v1.Compose(one for one in [v2.ToImage()]))


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
    assert str(ours.value) == str(theirs.value).replace("DataLoader.__init__()", "DALILoader.__init__()")
