"""What is wrong with a sample is said in its batch's turn, names the sample, and harms nothing after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CROP, PER_BATCH, Numbered, assert_pairs, in_order
from helpers.damages import DAMAGES
from torch.utils.data import DataLoader, Subset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import BatchShapeError, DALILoader, SampleError

pytestmark = pytest.mark.timeout(30)

BAD = 7
OF_BAD = BAD // PER_BATCH
"""The batch that has the bad sample in it: the third of eight."""


def sample_path(dataset: ImageFolder, index: int = BAD) -> Path:
    return Path(dataset.samples[index][0])


# Files that are no pictures


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("known", [False, True], ids=["never read", "read before"])
def test_damaged_file_is_named_in_its_turn(
    fresh: ImageFolder, damage: Callable[[Path], object], known: bool, device: str
) -> None:
    loader = DALILoader(fresh, PER_BATCH, device=device)
    if known:
        assert_pairs(loader, fresh, in_order())
    path = sample_path(fresh)
    content = path.read_bytes()
    damage(path)
    with pytest.raises((OSError, SyntaxError)):
        fresh[BAD]

    for _ in range(2):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(OF_BAD)), fresh, in_order()[:OF_BAD])
        with pytest.raises(SampleError) as caught:
            next(iterator)
        assert (caught.value.index, caught.value.path) == (BAD, str(path))
        assert f"sample {BAD} ({path})" in str(caught.value)
        assert isinstance(caught.value, RuntimeError)
        assert_pairs(iterator, fresh, in_order()[OF_BAD + 1 :])

    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    path.write_bytes(content)
    assert_pairs(loader, fresh, in_order())


def test_a_pipe_is_named_and_not_waited_for(fresh: ImageFolder, device: str) -> None:
    path = sample_path(fresh)
    path.unlink()
    os.mkfifo(path)
    iterator = iter(DALILoader(fresh, PER_BATCH, device=device))
    assert_pairs((next(iterator) for _ in range(OF_BAD)), fresh, in_order()[:OF_BAD])
    with pytest.raises(SampleError, match=r"cannot be read as an image \(it is no regular file\)") as caught:
        next(iterator)
    assert caught.value.path == str(path)
    assert_pairs(iterator, fresh, in_order()[OF_BAD + 1 :])


def test_the_index_is_the_loaders(fresh: ImageFolder) -> None:
    sample_path(fresh).unlink()
    subset = Subset(fresh, [1, 2, BAD, 4])
    with pytest.raises(SampleError, match="no such file") as caught:
        next(iter(DALILoader(subset, 4, sampler=[3, -2], device="cpu")))
    assert (caught.value.index, caught.value.path) == (2, str(sample_path(fresh)))


def test_each_of_several_bad_files_is_named(fresh: ImageFolder, device: str) -> None:
    bad = {1: "vanished", 6: "truncated JPEG", 7: "garbage", 23: "truncated PNG"}
    for index, damage in bad.items():
        DAMAGES[damage](sample_path(fresh, index))
    iterator, named, whole = iter(DALILoader(fresh, PER_BATCH, device=device)), [], []
    for _ in range(8):
        try:
            whole.append(next(iterator))
        except SampleError as error:
            named.append(error.index)
    assert named in ([1, 6, 23], [1, 7, 23])
    assert_pairs(whole, fresh, [labels for labels in in_order() if not bad.keys() & set(labels)])
    assert next(iterator, None) is None


@pytest.mark.parametrize("given", [{"transform": "Resize"}, {"transform": [v2.ToImage(), 3]}, {"batch_transform": 3}])
def test_what_cannot_be_called_is_no_transform(dataset: ImageFolder, given: Any) -> None:
    with pytest.raises(TypeError, match=r"a transform must be callable, got ('Resize'|3)"):
        DALILoader(dataset, device="cpu", **given)


def test_no_batch_ahead_is_refused_when_dataloader_does(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, num_workers=1, prefetch_factor=0, device="cpu")
    with pytest.raises(AssertionError, match="prefetch_factor must be greater than 0"):
        iter(loader)


@pytest.mark.parametrize("asked", [False, True])
def test_all_samples_in_one_batch(dataset: ImageFolder, asked: bool) -> None:
    transform = {"transform": v2.CenterCrop(CROP)} if asked else {}
    samples: Any = [dataset[0], dataset[1]] if asked else dataset
    (batch,) = DALILoader(samples, sys.maxsize, device="cpu", **transform)
    assert len(batch[1]) == len(samples)


# Batches that cannot be made


class OnceBad:
    """An iterator that raises once and goes on."""

    def __init__(self) -> None:
        self.given = iter([0, 1, None, 2, 3, 4])

    def __iter__(self) -> OnceBad:
        return self

    def __next__(self) -> int:
        if (index := next(self.given)) is None:
            raise LookupError("mine")
        return index


def of_batches(*batches: Any) -> dict[str, Any]:
    return {"batch_sampler": batches}


def of_indices(*indices: Any) -> dict[str, Any]:
    return {"sampler": indices, "batch_size": 1}


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "beyond": lambda: of_indices(0, 99, 1, 2),
    "before": lambda: of_indices(0, -25, -24, 2),
    "in a batch": lambda: of_batches([0, 1], [2, 99], [3, 4]),
    "a word": lambda: of_batches([0, 1], ["x"], [3, 4]),
    "no batch": lambda: of_batches([0, 1], 7, [3, 4]),
    "without a length": lambda: of_batches(map(int, [0, 1]), (i for i in [2]), {3: 0, 4: 0}),
    "not batched": lambda: {"sampler": [0, 99, 1], "batch_size": None},
    "goes on": lambda: {"sampler": OnceBad(), "batch_size": 2},
    "at the end": lambda: of_indices(0, 1, 99),
}


def events(loader: Any) -> list[Any]:
    """Labels of batches, and the classes of what is raised, until the end."""
    seen: list[Any] = []
    iterator = iter(loader)
    while len(seen) < 9:
        try:
            seen.append(next(iterator)[1])
        except Exception as error:  # noqa: BLE001 - whatever it is
            seen.append(type(error))
            if isinstance(error, StopIteration):
                break
    return [label.tolist() if isinstance(label, torch.Tensor) else label for label in seen]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_after_a_bad_index_the_epoch_goes_on(
    dataset: ImageFolder, given: Callable[[], dict[str, Any]], workers: int
) -> None:
    """As DataLoader's, which is asked without workers: it could not send them every one of these."""
    theirs = events(DataLoader(dataset, **given()))
    assert theirs[-1] is StopIteration
    assert events(DALILoader(dataset, **given(), num_workers=workers, device="cpu")) == theirs


@pytest.mark.parametrize(
    ("chain", "advice"),
    [
        ([v2.ToImage()], "Resize((224, 224))"),
        ([v2.ToImage(), v2.Resize(32)], "add CenterCrop(32)"),
        ([v2.ToImage(), v2.Lambda(torch.clone)], "RandomResizedCrop(224)"),
    ],
    ids=["no size", "one side", "in torch"],
)
def test_unequal_shapes_name_two_samples_and_a_transform(
    pictures: Path, numbered: Numbered, chain: Any, advice: str, device: str
) -> None:
    dataset = numbered(pictures, v2.Compose(chain))
    shapes = [tuple(dataset[index][0].shape) for index in range(4)]
    other = next(index for index in range(4) if shapes[index] != shapes[0])
    loader = DALILoader(dataset, 4, device=device)
    iterator = iter(loader)
    with pytest.raises(BatchShapeError) as caught:
        next(iterator)
    for index in (0, other):
        assert f"{shapes[index]} (sample {index}, {sample_path(dataset, index)})" in str(caught.value)
    assert advice in str(caught.value)
    with pytest.raises(BatchShapeError, match="sample 4, "):
        next(iterator)
    assert len(list(DALILoader(dataset, 1, device=device))) == 24


@pytest.mark.parametrize(
    ("last", "advice"),
    [
        (v2.RandomApply([v2.Pad(1)]), "a transform after CenterCrop changes sizes"),
        (v2.RandomApply([v2.Grayscale()]), r"with v2\.RGB\(\) or v2\.Grayscale\(num_output_channels=3\)"),
    ],
)
def test_advice_is_not_what_is_done_already(pictures: Path, numbered: Numbered, last: Any, advice: str) -> None:
    dataset = numbered(pictures, v2.Compose([v2.ToImage(), v2.Resize(32), v2.CenterCrop(24), last]))
    with pytest.raises(BatchShapeError, match=f"differ in shape: .*; .*{advice}"):
        next(iter(DALILoader(dataset, 24, device="cpu", seed=0)))


def test_crop_larger_than_a_picture_names_both(pictures: Path, numbered: Numbered, device: str) -> None:
    dataset = numbered(pictures, v2.Compose([v2.ToImage(), v2.RandomCrop(70)]))
    smaller = [min(picture.size) < 70 for picture, _ in numbered(pictures, None)]
    small, large = ([i for i in range(24) if smaller[i] is which] for which in (True, False))
    iterator = iter(DALILoader(dataset, PER_BATCH, sampler=[*large[:3], large[0], small[0], *large[:3]], device=device))
    assert next(iterator)[0].shape == (3, 3, 70, 70)
    with pytest.raises(SampleError, match=r"transform 2, RandomCrop\(size=\(70, 70\).*larger than the image") as caught:
        next(iterator)
    assert (caught.value.index, caught.value.path) == (small[0], str(sample_path(dataset, small[0])))
    assert next(iterator)[1].tolist() == large[1:3]


class OwnError(Exception):
    """Raised by what users write."""


def failing_at(call: int) -> Callable[[Any], Any]:
    """An identity that fails once."""
    calls = iter(range(1000))

    def maybe(value: Any) -> Any:
        if next(calls) == call:
            raise OwnError("mine")
        return value

    return maybe


@pytest.mark.parametrize("place", ["transform", "target_transform", "collate_fn"])
def test_errors_of_users_code_are_theirs(
    pictures: Path, numbered: Numbered, dataset: ImageFolder, place: str, device: str
) -> None:
    whole = numbered(pictures)
    collate = default_collate
    if place == "transform":
        dataset.transform = v2.Compose([*dataset.transform.transforms, v2.Lambda(failing_at(BAD))])
    elif place == "target_transform":
        dataset.target_transform = failing_at(BAD)
    else:
        fail = failing_at(OF_BAD)
        collate = lambda samples: fail(default_collate(samples))  # noqa: E731
    loader = DALILoader(dataset, PER_BATCH, collate_fn=collate, device=device)
    iterator = iter(loader)
    assert_pairs((next(iterator) for _ in range(OF_BAD)), whole, in_order()[:OF_BAD])
    with pytest.raises(OwnError, match="mine") as caught:
        next(iterator)
    if sys.version_info >= (3, 11) and place != "collate_fn":
        on = f"sample {BAD}, {sample_path(dataset)}"
        notes = {
            "transform": f"while Lambda ran in torch on {on}",
            "target_transform": f"while the target was made of {on}",
        }
        assert caught.value.__notes__ == [notes[place]]
    assert_pairs(iterator, whole, in_order()[OF_BAD + 1 :])
    assert_pairs(loader, whole, in_order())


class Raising:
    """A batch sampler that fails after two batches."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from in_order()[:2]
        raise OwnError("mine")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("sampler", "error", "text"),
    [
        (Raising(), OwnError, "mine"),
        ([*in_order()[:2], [1, 24]], IndexError, "24"),
        ([*in_order()[:2], [-25, 0]], IndexError, "-25"),
        ([*in_order()[:2], ["x"]], TypeError, r"gave 'x' \(str\), which is no index$"),
        ([*in_order()[:2], [1.0]], TypeError, r"gave 1.0 \(float\), which is no index$"),
        ([*in_order()[:2], [[1, 2]]], TypeError, r"gave \[1, 2\] \(list\), which is no index; .* as batch_sampler="),
    ],
    ids=["raises", "too large", "too small", "text", "float", "list"],
)
def test_errors_of_the_sampler_come_after_the_batches_before(
    dataset: ImageFolder, sampler: Any, error: type[Exception], text: str, workers: int
) -> None:
    loader = DALILoader(dataset, batch_sampler=sampler, num_workers=workers, device="cpu")
    for _ in range(2):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(2)), dataset, in_order()[:2])
        with pytest.raises(error, match=text):
            next(iterator)


def test_nothing_to_load(dataset: ImageFolder) -> None:
    assert list(DALILoader(dataset, sampler=[], device="cpu")) == []
    assert list(DALILoader(dataset, batch_sampler=[], num_workers=2, device="cpu")) == []
    assert list(DALILoader(dataset, 25, drop_last=True, device="cpu")) == []
    assert list(DALILoader(Subset(dataset, []), device="cpu")) == []
    dataset.samples = []
    loader = DALILoader(dataset, device="cpu")
    assert (list(loader), len(loader)) == ([], 0)


def test_empty_batch_is_what_collate_makes_of_it(dataset: ImageFolder) -> None:
    batches = [[1], [], [2]]
    assert [len(batch) for batch in DALILoader(dataset, batch_sampler=batches, collate_fn=list, device="cpu")] == [
        1,
        0,
        1,
    ]
    iterator = iter(DALILoader(dataset, batch_sampler=batches, device="cpu"))
    next(iterator)
    with pytest.raises(IndexError):
        next(iterator)
    assert_pairs(iterator, dataset, [[2]])


def test_batches_of_any_size(dataset: ImageFolder, device: str) -> None:
    """Also larger than the one that was declared, growing and shrinking, and a short last one."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(24, size=size).tolist() for size in (1, 2, 5, 3, 17, 1, 40, 40, 2, 16)]
    loader = DALILoader(dataset, batch_sampler=batches, device=device)
    assert_pairs(loader, dataset, batches)
    assert_pairs(loader, dataset, batches)
    assert_pairs(
        DALILoader(dataset, 10, device=device), dataset, [list(range(i, min(i + 10, 24))) for i in (0, 10, 20)]
    )
