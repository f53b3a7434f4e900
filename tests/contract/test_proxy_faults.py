"""Faults of datasets that are asked for samples are said in their turn, name the sample, and harm nothing after it."""

from __future__ import annotations

import io
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import CROP, PER_BATCH, assert_pairs, encoded, in_order
from helpers.crops import DOES, EXACT, WORKERS, Crops, Truth, every_number, every_way, raised
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

from torchdali import BatchShapeError, DALILoader, SampleError

pytestmark = pytest.mark.timeout(60)

BAD = 7
OF_BAD = BAD // PER_BATCH


class OwnError(Exception):
    """Raised by what users write."""


def events(loader: Any, turns: int = 12) -> list[Any]:
    """What comes of an epoch, errors too: labels of batches, and exceptions by their types."""
    seen: list[Any] = []
    try:
        iterator = iter(loader)
        for _ in range(turns):
            try:
                batch = next(iterator)
                seen.append(batch[1].tolist() if batch else batch)
            except OwnError as error:
                traceback.clear_frames(error.__traceback__)  # torch's hold the iterator
                seen.append(type(error))
    except Exception as error:  # noqa: BLE001 - StopIteration for one
        traceback.clear_frames(error.__traceback__)
        seen.append(type(error))
    return seen


# Errors of what users write


def refusing(index: int, image: Any) -> Any:
    if index == BAD:
        raise OwnError("mine")
    return image


@every_way
def test_error_of_the_dataset_comes_in_its_turn(workers: Any, does: Any, device: str) -> None:
    loader, truth = (
        DALILoader(Crops(refusing), PER_BATCH, device=device, **workers, **does),
        Truth(does.get("transform")),
    )
    for _ in range(2):
        iterator = iter(loader)
        assert_pairs([next(iterator) for _ in range(OF_BAD)], truth, in_order()[:OF_BAD])
        error = raised(OwnError, iterator)
        assert "in __getitem__" in error.text
        assert "in refusing" in error.text
        if does or device == "cuda":
            assert (f"sample {BAD}\n" in error.text) == (sys.version_info >= (3, 11))
        assert_pairs(list(iterator), truth, in_order()[OF_BAD + 1 :])


class Batched(Crops):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def refusing_red(image: Any) -> Any:
    """A transform that torchdali does not know, and which refuses one picture."""
    if bool((image[0] > 250).all()):
        raise OwnError("red")
    return image


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize("stacks", [True, False])
def test_error_of_a_transform_in_torch_names_its_sample(stacks: bool, device: str) -> None:
    red = PIL.Image.new("RGB", (CROP, CROP), "red")
    images = [red if i == BAD else PIL.Image.new("RGB", (CROP, CROP)) for i in range(BAD + 2)]
    collate = None if stacks else list
    transform = v2.Compose([EXACT, refusing_red])
    loader = DALILoader(images, PER_BATCH, collate_fn=collate, transform=transform, device=device)
    iterator = iter(loader)
    assert [len(next(iterator)) for _ in range(OF_BAD)] == [PER_BATCH] * OF_BAD
    with pytest.raises(OwnError) as caught:
        next(iterator)
    assert caught.value.__notes__ == [f"while refusing_red ran in torch on sample {BAD}"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_damaged_file_that_pil_has_opened_is_named(tmp_path: Path, on_error: Any, caplog: Any) -> None:
    path = tmp_path / "7.png"
    path.write_bytes(as_bytes(Crops(lambda _, image: image, 12)[BAD][0], "PNG", 0.6))
    with PIL.Image.open(path) as opened:
        dataset = Crops(lambda index, image: opened if index == BAD else as_bytes(image, "PNG"), 12)
        batches = iter(DALILoader(dataset, 12, transform=EXACT, device="cpu", on_error=on_error))
        if on_error == "raise":
            assert raised(SampleError, batches).path == str(path)
        else:
            assert len(list(batches)) == 1
            assert f"sample {BAD} ({path})" in caplog.text


@every_number
def test_samples_without_image_that_cannot_be_collated_are_described(workers: Any, device: str) -> None:
    """Arrays of two axes and float64, for one, which are no images to torchdali, and not of one size."""
    grey = [np.zeros((height, 9)) for height in range(20, 20 + PER_BATCH)]
    loader = DALILoader(grey, PER_BATCH, transform=EXACT, device=device, **workers)
    error = raised(RuntimeError, iter(loader))
    assert "no image for transform= was found in a sample, which is ndarray (20, 9) float64" in error.text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_error_of_a_batch_names_its_samples() -> None:
    loader = DALILoader(Batched(refusing), PER_BATCH, transform=EXACT, device="cpu")
    with pytest.raises(OwnError) as caught:
        list(loader)
    assert caught.value.__notes__ == ["while the dataset was asked for samples [6, 7, 8]"]


class Sampler:
    """A batch sampler that fails after so many batches."""

    def __init__(self, whole: int) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[list[int]]:
        yield from in_order()[: self.whole]
        raise OwnError("mine")


def failing_start(worker: int) -> None:
    raise OwnError("mine")


def failing_collate(samples: list[Any]) -> Any:
    if samples[0][1] == 6:
        raise OwnError("mine")
    return default_collate([(torch.as_tensor(image), label) for image, label in samples])


def stopping(index: int, image: Any) -> Any:
    if index == BAD:
        raise StopIteration
    return image


LIKE_DATALOADER: dict[str, dict[str, Any]] = {
    "sampler at once": {"batch_sampler": Sampler(0)},
    "sampler": {"batch_sampler": Sampler(6)},
    "index": {"batch_sampler": [[1], ["x"], [2]]},
    "not iterable": {"batch_sampler": [[1], 3, [2]]},
    "start": {"batch_size": 3, "worker_init_fn": failing_start},
    "collate": {"batch_size": 3, "collate_fn": failing_collate},
    "empty batch": {"batch_sampler": [[1], [], [2, 3]]},
    "empty batches": {"batch_sampler": [[], []]},
    "empty batch, own collate": {
        "batch_sampler": [[1], [], [2, 3]],
        "collate_fn": lambda x: default_collate(x) if x else x,
    },
    "nothing": {"batch_sampler": []},
    "empty dataset": {"dataset": Crops(count=0), "batch_size": 3},
    "drop": {"batch_size": 25, "drop_last": True},
    "any size": {"batch_sampler": [[*range(i)] for i in (1, 5, 2, 24, 3)]},
    "stop": {"dataset": Crops(stopping), "batch_size": 3},
    "each": {"dataset": Crops(refusing, 9), "batch_size": 1},
}


@pytest.mark.parametrize(
    ("case", "workers", "does"),
    [
        pytest.param(
            case, *row, id=f"{name}-{'-'.join(row)}", marks=[pytest.mark.slow] * (number > 3 and row[0] != "none")
        )
        for number, (name, case) in enumerate(LIKE_DATALOADER.items())
        for row in (
            [("none", "transform"), ("workers", "batch_transform")],
            [("persistent", "transform")],
            [("none", "batch_transform")],
            [("workers", "transform")],
        )[number % 4]
    ],
)
def test_faults_are_dataloaders(case: dict[str, Any], workers: str, does: str) -> None:
    """The same batches and exceptions, in the same order, in two epochs."""
    case = {"dataset": Crops(), **case, **WORKERS[workers]}
    ours, theirs = DALILoader(**case, **DOES[does], device="cpu"), DataLoader(**case)
    assert [events(ours), events(ours)] == [events(theirs), events(theirs)]


# Samples that cannot be used


def as_bytes(image: Any, kind: str, keep: float = 1) -> bytes:
    data = encoded(PIL.Image.fromarray(image), kind)
    return data[: round(keep * len(data))]


def closed(image: Any) -> Any:
    with PIL.Image.open(io.BytesIO(as_bytes(image, "JPEG"))) as opened:
        return opened


def scrambled(image: Any) -> bytes:
    """Header and end are well, so that only the decoder finds out."""
    data = bytearray(as_bytes(image, "JPEG"))
    table = data.index(b"\xff\xc4")  # of Huffman codes
    data[table + 4 : table + 20] = b"\xff" * 16
    return bytes(data)


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "scrambled": scrambled,
    "truncated JPEG": lambda image: as_bytes(image, "JPEG", 0.7),
    "JPEG without its last bytes": lambda image: as_bytes(image, "JPEG", 0.98),
    "truncated PNG": lambda image: np.frombuffer(as_bytes(image, "PNG", 0.6), np.uint8),
    "truncated GIF": lambda image: torch.frombuffer(bytearray(as_bytes(image, "GIF", 0.5)), dtype=torch.uint8),
    "header alone": lambda image: as_bytes(image, "JPEG")[:20] + bytes(500),
    "no image": lambda image: b"Not Found",
    "no bytes": lambda image: b"",
    "closed": closed,
    "lazy": lambda image: PIL.Image.open(io.BytesIO(as_bytes(image, "PNG", 0.6))),
    "no such file": lambda image: Path("/nonexistent/7.jpg"),
    "directory": lambda image: Path("/proc"),
    "empty array": lambda image: image[:0],
}


@pytest.mark.parametrize(
    ("damage", "bad", "workers", "batch_size"),
    [
        *((name, BAD, {}, 2) for name in DAMAGES),
        *((name, BAD - 1, {}, 2) for name in ("scrambled", "closed")),
        *((name, BAD, {}, size) for name in ("scrambled", "no bytes") for size in (1, None)),
        *((name, BAD, {"num_workers": 2}, 2) for name in ("scrambled", "closed", "truncated PNG", "no such file")),
        ("no image", BAD - 1, {"num_workers": 2}, 1),
    ],
)
def test_damaged_sample_is_named_in_its_turn(damage: str, bad: int, workers: Any, batch_size: int | None) -> None:
    """Also the first of a batch, and one that is a batch of its own."""

    def fault(index: int, image: Any) -> Any:
        return DAMAGES[damage](image) if index == bad else as_bytes(image, "PNG")

    loader = DALILoader(Crops(fault, 12), batch_size, transform=EXACT, device="cpu", **workers)
    iterator, seen = iter(loader), []
    before = bad // (batch_size or 1)
    seen += itertools.islice(iterator, before)
    error = raised(SampleError, iterator)
    seen += iterator
    assert (error.index, f"sample {bad} (" in str(error), len(error.reason) > 10) == (bad, True, True)
    if batch_size is None:
        seen = [(image[None], torch.tensor([label])) for image, label in seen]
    assert_pairs(seen, Truth(EXACT))
    assert sum(len(batch[1]) for batch in seen) == 12 - (batch_size or 1)
    assert next(iterator, None) is None


@every_number
def test_after_a_damaged_sample_among_images_of_other_kinds_batches_are_whole(workers: Any) -> None:
    """Of each batch DALI has a run for each kind, and all of them are to be taken."""

    def given(damage: Callable[[Any], Any]) -> Any:
        def fault(index: int, image: Any) -> Any:
            kind = damage if index == BAD else lambda image: as_bytes(image, "JPEG")
            return image if index % PER_BATCH == PER_BATCH - 1 else kind(image)

        return iter(DALILoader(Crops(fault, 12), PER_BATCH, transform=EXACT, device="cpu", **workers))

    true, iterator = list(given(lambda image: as_bytes(image, "JPEG"))), given(DAMAGES["scrambled"])
    seen = [next(iterator) for _ in range(OF_BAD)]
    assert raised(SampleError, iterator).index == BAD
    seen += [None, *iterator]
    assert len(seen) == len(true) == 4
    for batch, before in zip(seen, true, strict=True):
        assert batch is None or (torch.equal(batch[0], before[0]) and torch.equal(batch[1], before[1]))


def test_a_file_that_vanishes_is_named(fresh_pictures: Path) -> None:
    paths = sorted(fresh_pictures.glob("*/*.jpg"))
    fail = {4: Path.unlink, 10: lambda path: path.write_bytes(path.read_bytes()[:-300])}
    loader = DALILoader([(path, i) for i, path in enumerate(paths)], 3, transform=EXACT, device="cpu")
    whole = list(loader)
    for index, damage in fail.items():
        damage(paths[index])
    for workers in WORKERS.values():
        iterator = iter(
            DALILoader([(path, i) for i, path in enumerate(paths)], 3, transform=EXACT, device="cpu", **workers)
        )
        for number in range(8):
            if number in (1, 3):
                error, index = raised(SampleError, iterator), (4, 10)[number // 3]
                assert (error.index, error.path) == (index, str(paths[index]))
            else:
                assert torch.equal(next(iterator)[0], whole[number][0])


@every_number
def test_what_cannot_be_drawn_is_named(workers: Any, device: str) -> None:
    """Where the images of a kind that comes second in the batch cannot be run."""

    def fault(index: int, image: Any) -> Any:
        gray = PIL.Image.fromarray(image[..., 0])
        return [PIL.Image.fromarray(image), gray, gray.resize((50, 50)) if index == BAD else gray]

    transform = v2.Compose([v2.ToImage(), v2.RandomCrop(26), v2.Resize((8, 8))])
    loader = DALILoader(Crops(fault), PER_BATCH, transform=transform, device=device, **workers)
    for _ in range(2):
        iterator, labels = iter(loader), []
        for turn in range(8):
            if turn == OF_BAD:
                error = raised(SampleError, iterator)
                assert error.index == BAD
                assert "differ in size" in error.reason
            else:
                images, label = next(iterator)
                labels.append(label.tolist())
                assert all(len(column) == 3 for column in images)
        assert labels == [*in_order()[:OF_BAD], *in_order()[OF_BAD + 1 :]]


class Nested(Crops):
    """A dataset that has a loader of its own."""

    def __getitem__(self, index: int) -> Any:
        return next(iter(DALILoader(Crops(), 2, sampler=[index, 5], transform=EXACT, device="cpu")))


def test_a_loader_in_a_worker_is_no_worker() -> None:
    assert_pairs(DataLoader(Nested(count=2), None, num_workers=1), Truth(), [[0, 5], [1, 5]])


@pytest.mark.parametrize("kind", [np.asarray, PIL.Image.fromarray], ids=["of one kind", "of two kinds"])
def test_unequal_shapes_name_two_samples(kind: Any, device: str) -> None:
    def fault(index: int, image: Any) -> Any:
        return kind(image[:30]) if index == BAD else image

    for workers in WORKERS.values():
        iterator = iter(DALILoader(Crops(fault), PER_BATCH, transform=v2.ToImage(), device=device, **workers))
        assert [next(iterator)[1].tolist() for _ in range(OF_BAD)] == in_order()[:OF_BAD]
        assert "(3, 32, 40) (sample 6) and (3, 30, 40) (sample 7)" in raised(BatchShapeError, iterator).text
        assert [batch[1].tolist() for batch in iterator] == in_order()[OF_BAD + 1 :]


def test_error_of_users_code_on_batches_is_theirs(device: str) -> None:
    def refuse(image: Any, label: Any) -> Any:
        if 7 in label:
            raise OwnError("mine")
        return image, label

    def collate(samples: Any) -> Any:
        return refuse(*default_collate(samples))

    for workers in WORKERS.values():
        for what in ({"batch_transform": refuse}, {"collate_fn": collate}):
            iterator = iter(DALILoader(Crops(), PER_BATCH, transform=EXACT, device=device, **workers, **what))
            assert_pairs([next(iterator) for _ in range(OF_BAD)], Truth(), in_order()[:OF_BAD])
            assert raised(OwnError, iterator).args == ("mine",)
            assert_pairs(iterator, Truth(), in_order()[OF_BAD + 1 :])
