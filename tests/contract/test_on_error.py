"""Samples that cannot be read or decoded are raised, skipped or replaced, and nothing else changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import CROP
from helpers.damages import DAMAGES, next_good
from helpers.proxied import PathSamples
from torch.utils.data import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError

pytestmark = pytest.mark.timeout(60)

BATCH = 5
BAD = {2: "garbage", 3: "vanished", 9: "truncated JPEG", 11: "JPEG without its last bytes", 20: "empty"}
RANDOM = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(CROP), v2.ToDtype(torch.float32, scale=True)])


def spoil(dataset: ImageFolder, bad: dict[int, str] | None = None) -> None:
    for index, how in (bad or BAD).items():
        DAMAGES[how](Path(dataset.samples[index][0]))


def loader_of(dataset: ImageFolder, device: str, **options: Any) -> DALILoader[Any]:
    dataset.transform = RANDOM
    options = {"batch_size": BATCH, "shuffle": True, "seed": 5, **options}
    return DALILoader(dataset, device=device, generator=torch.Generator().manual_seed(3), **options)


def epochs(loader: DALILoader[Any], count: int = 2) -> list[list[Any]]:
    return [[[part.cpu() for part in batch] for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("cache", [None, "host", "device"])
@pytest.mark.parametrize("mode", ["skip", "replace"])
def test_all_but_the_bad_samples_are_what_they_were(
    fresh: ImageFolder, device: str, mode: str, cache: Any, caplog: Any
) -> None:
    with loader_of(fresh, device, cache=cache) as loader:
        true = epochs(loader)
    spoil(fresh)
    with caplog.at_level(logging.WARNING, "torchdali"), loader_of(fresh, device, cache=cache, on_error=mode) as loader:
        seen = epochs(loader)
        errors = loader.errors
    for epoch, true_epoch in zip(seen, true, strict=True):
        for (images, labels), (true_images, true_labels) in zip(epoch, true_epoch, strict=True):
            asked = true_labels.tolist()
            for place, label in enumerate(asked):
                if label not in BAD:
                    assert labels[place] == label
                    assert torch.equal(images[place], true_images[place])
                elif mode == "replace":
                    assert labels[place] == label
                    assert not images[place].any()
                else:
                    assert labels[place] == next_good(asked, place, BAD)
                    assert images[place].any()
                    assert not torch.equal(images[place], images[asked.index(int(labels[place]))])  # other numbers
    assert {error.index for error in errors} == set(BAD)
    assert len(errors) == len(BAD)
    for error in errors:
        assert error.path == fresh.samples[error.index][0]
        assert sum(error.path in record.getMessage() for record in caplog.records) == 1


def test_raising_is_the_default(fresh: ImageFolder) -> None:
    spoil(fresh)
    loader = loader_of(fresh, "cpu")
    with pytest.raises(SampleError):
        list(loader)
    assert not loader.errors


@pytest.mark.parametrize("mode", ["skip", "replace"])
@pytest.mark.parametrize("limit", [0, 2, len(BAD)])
def test_there_may_be_so_many(fresh: ImageFolder, mode: str, limit: int) -> None:
    spoil(fresh)
    loader = loader_of(fresh, "cpu", on_error=mode, max_errors=limit)
    if limit == len(BAD):
        assert len(epochs(loader, 3)) == 3  # each counts once, not in every epoch
        return
    with pytest.raises(SampleError, match=f"max_errors={limit} were found before") as raised:
        list(loader)
    assert len(loader.errors) == limit
    assert raised.value.index in BAD
    assert raised.value.index not in [error.index for error in loader.errors]


def test_a_batch_of_bad_samples_is_raised_in_its_turn_and_the_epoch_goes_on(fresh: ImageFolder) -> None:
    spoil(fresh, dict.fromkeys([4, 5, 6, 7], "empty"))
    loader = loader_of(fresh, "cpu", shuffle=False, batch_size=4, on_error="skip")
    for _ in range(2):
        iterator = iter(loader)
        assert next(iterator)[1].tolist() == [0, 1, 2, 3]
        with pytest.raises(SampleError, match="no other sample of its batch can take its place") as caught:
            next(iterator)
        assert isinstance(caught.value.__cause__, SampleError)
        rest = [batch[1].tolist() for batch in iterator]
        assert rest[0] == [8, 9, 10, 11] or rest[0] == [8, 8, 10, 11]
    black = epochs(loader_of(fresh, "cpu", shuffle=False, batch_size=4, on_error="replace"))
    assert [images.any(dim=(1, 2, 3)).tolist() for images, _ in black[1]][:3] == [[True] * 4, [False] * 4, [True] * 4]


def test_a_place_is_found_again(fresh: ImageFolder) -> None:
    """The state is that of DataLoader's order; who stands in for whom follows from the batch."""
    spoil(fresh)
    loader = loader_of(fresh, "cpu", on_error="skip")
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    rest = [*iterator, *loader]
    other = loader_of(fresh, "cpu", on_error="skip")
    other.load_state_dict(state)
    again = [*other, *other]
    assert len(again) == len(rest)
    assert all(torch.equal(a, b) for ours, true in zip(again, rest, strict=True) for a, b in zip(ours, true))  # noqa: B905


def test_the_same_bad_sample_twice_in_a_batch(fresh: ImageFolder) -> None:
    spoil(fresh, {2: "garbage"})
    for mode, labels in (("skip", [1, 4, 4, 4]), ("replace", [1, 2, 2, 4])):
        loader = loader_of(fresh, "cpu", shuffle=None, batch_sampler=[[1, 2, 2, 4]], batch_size=1, on_error=mode)
        ((images, of_images),) = loader
        assert of_images.tolist() == labels
        assert len(loader.errors) == 1
        assert not torch.equal(images[2], images[3])


def test_what_cannot_be_transformed_is_raised(fresh: ImageFolder) -> None:
    fresh.transform = v2.Compose([v2.ToImage(), v2.RandomCrop(80)])
    loader = DALILoader(fresh, BATCH, on_error="skip", device="cpu")
    with pytest.raises(SampleError, match="RandomCrop"):
        list(loader)
    assert not loader.errors


def test_black_images_are_of_the_size_of_others(fresh: ImageFolder) -> None:
    """Where no transform brings images to one size, they have it already."""
    for path, _ in fresh.samples:
        Path(path).write_bytes(Path(fresh.samples[0][0]).read_bytes())
    fresh.transform = v2.Compose([v2.ToImage()])
    spoil(fresh)
    shapes = {images.shape[1:] for images, _ in DALILoader(fresh, BATCH, on_error="replace", device="cpu")}
    assert len(shapes) == 1


@pytest.mark.parametrize("asked", [False, True], ids=["read", "asked"])
def test_a_black_image_is_as_large_as_the_next_one_that_can_be_read(fresh: ImageFolder, asked: bool) -> None:
    bad = {1: 3, 2: 3, 7: 4}
    sizes = [image.size[::-1] for image, _ in ImageFolder(fresh.root)]
    assert len(set(sizes[:8])) > 4
    spoil(fresh, dict.fromkeys(bad, "garbage"))
    fresh.transform = None
    options: dict[str, Any] = {"transform": v2.ToImage(), "on_error": "replace", "collate_fn": list, "device": "cpu"}
    loader = DALILoader(PathSamples(fresh) if asked else fresh, 4, **options)
    seen = [tuple(image.shape[1:]) for batch in loader for image, _ in batch]
    assert seen == [sizes[bad.get(index, index)] for index in range(len(fresh))]


@pytest.mark.parametrize("mode", ["skip", "replace"])
def test_engines_are_given_back(fresh: ImageFolder, mode: str) -> None:
    """Those too in which batches were run again."""
    spoil(fresh)
    loader = loader_of(fresh, "cpu", on_error=mode)
    list(loader)
    assert len(loader.errors) == len(BAD)
    assert loader._session.native_plan is not None
    assert not loader._session.native_plan.pool._in_use


def test_arguments_and_words(dataset: ImageFolder) -> None:
    for options, words in (
        ({"on_error": "ignore"}, "on_error must be 'raise', 'skip' or 'replace', got 'ignore'"),
        ({"on_error": "skip", "max_errors": -1}, "max_errors must be None or an int of 0 or more, got -1"),
        ({"max_errors": 3}, "max_errors goes with on_error='skip' or on_error='replace'"),
    ):
        with pytest.raises(ValueError, match=words):
            DALILoader(dataset, **options)
    loader = DALILoader(dataset, on_error="skip", max_errors=cast("Any", np.int64(3)), device="cpu")
    assert "for up to 3 samples; 0 found so far" in loader._error_policy.describe()


@pytest.mark.parametrize("mode", ["skip", "replace"])
def test_ranks_keep_in_step(fresh: ImageFolder, mode: str) -> None:
    """Though all bad samples are one rank's."""
    spoil(fresh, dict.fromkeys([0, 2, 6], "empty"))
    shapes = []
    for rank in range(2):
        sampler = DistributedSampler(fresh, 2, rank, shuffle=False)
        loader = loader_of(fresh, "cpu", shuffle=None, sampler=sampler, on_error=mode)
        shapes.append([images.shape for images, _ in loader])
        assert len(loader.errors) == (3 if rank == 0 else 0)
    assert shapes[0] == shapes[1]
