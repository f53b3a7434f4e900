"""With a cache, bad files, bad arguments and early ends have the same consequences as without one."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvidia.dali
import PIL.Image
import pytest
from conftest import PER_BATCH, Numbered, assert_pairs, encoded, in_order
from helpers.damages import DAMAGES
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import BatchShapeError, DALILoader, SampleError

pytestmark = pytest.mark.timeout(30)

BAD = 7
BATCH_OF_BAD = BAD // PER_BATCH

Load = Callable[..., DALILoader[Any]]


@pytest.fixture(params=["host", "device"])
def load(request: pytest.FixtureRequest) -> Load:
    """Make a loader with a cache."""

    def make(dataset: Any, batch_size: int = PER_BATCH, **options: Any) -> DALILoader[Any]:
        size = {} if "batch_sampler" in options else {"batch_size": batch_size}
        return DALILoader(dataset, cache=request.param, **{**size, "device": "cpu", **options})

    return make


def path_of(dataset: ImageFolder, index: int = BAD) -> Path:
    return Path(dataset.samples[index][0])


# Bad samples


@pytest.mark.parametrize("read_before", [False, True], ids=["never read", "read before"])
@pytest.mark.parametrize("damage", ["garbage", "truncated JPEG", "truncated PNG", "empty", "vanished"])
def test_a_damaged_file_is_named_in_its_turn(
    load: Load, fresh: ImageFolder, damage: str, read_before: bool, device: str
) -> None:
    loader, path = load(fresh, device=device), path_of(fresh)
    if read_before:
        assert_pairs(loader, fresh, in_order())
    content = path.read_bytes()
    DAMAGES[damage](path)
    for _ in range(2):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(BATCH_OF_BAD)), fresh, in_order()[:BATCH_OF_BAD])
        with pytest.raises(SampleError) as caught:
            next(iterator)
        assert (caught.value.index, caught.value.path) == (BAD, str(path))
        assert_pairs(iterator, fresh, in_order()[BATCH_OF_BAD + 1 :])
    path.write_bytes(content)
    assert_pairs(loader, fresh, in_order())


def test_each_of_several_bad_files_is_named(load: Load, fresh: ImageFolder, device: str) -> None:
    bad = {1: "vanished", 6: "truncated JPEG", 13: "garbage", 23: "truncated PNG"}
    for index, damage in bad.items():
        DAMAGES[damage](path_of(fresh, index))
    iterator, named, whole = iter(load(fresh, device=device)), list[int](), list[Any]()
    for _ in range(8):
        try:
            whole.append(next(iterator))
        except SampleError as error:
            named.append(error.index)
    assert named == [*bad]
    assert_pairs(whole, fresh, [labels for labels in in_order() if not bad.keys() & set(labels)])


def test_an_error_gives_the_index_of_the_loader(load: Load, fresh: ImageFolder) -> None:
    path_of(fresh).unlink()
    with pytest.raises(SampleError, match="no such file") as caught:
        next(iter(load(Subset(fresh, [1, 2, BAD, 4]), 4, sampler=[3, -2])))
    assert (caught.value.index, caught.value.path) == (2, str(path_of(fresh)))


def test_unequal_shapes_name_two_samples(load: Load, pictures: Path, numbered: Numbered, device: str) -> None:
    dataset = numbered(pictures, v2.Compose([v2.ToImage(), v2.Resize(32)]))
    shapes = [tuple(dataset[index][0].shape) for index in range(4)]
    other = next(index for index in range(4) if shapes[index] != shapes[0])
    with pytest.raises(BatchShapeError) as caught:
        next(iter(load(dataset, 4, device=device)))
    for index in (0, other):
        assert f"{shapes[index]} (sample {index}, {path_of(dataset, index)})" in str(caught.value)


def test_an_error_of_the_users_transform_is_raised_in_its_turn(load: Load, dataset: ImageFolder, exact: Any) -> None:
    calls = iter(range(1000))

    def fail_once(image: Any) -> Any:
        if next(calls) == BAD:
            raise LookupError("mine")
        return image

    dataset.transform = v2.Compose([*exact.transforms, v2.Lambda(fail_once)])
    iterator = iter(load(dataset))
    assert [next(iterator)[1].tolist() for _ in range(BATCH_OF_BAD)] == in_order()[:BATCH_OF_BAD]
    with pytest.raises(LookupError, match="mine"):
        next(iterator)
    assert [labels.tolist() for _, labels in iterator] == in_order()[BATCH_OF_BAD + 1 :]


# Odd batches


@pytest.mark.parametrize("workers", [0, 2])
def test_an_index_beyond_the_dataset_comes_after_the_batches_before(
    load: Load, dataset: ImageFolder, workers: int
) -> None:
    loader = load(dataset, batch_sampler=[*in_order()[:2], [1, 24]], num_workers=workers)
    for _ in range(2):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(2)), dataset, in_order()[:2])
        with pytest.raises(IndexError, match="24"):
            next(iterator)


def test_batches_of_any_size(load: Load, dataset: ImageFolder, device: str) -> None:
    batches = [[*range(size)] for size in (1, 5, 3, 17, 1, 24, 2)] + [[4, 4, 4]]
    loader = load(dataset, batch_sampler=batches, device=device)
    for _ in range(2):
        assert_pairs(loader, dataset, batches)


def test_nothing_to_load(load: Load, dataset: ImageFolder) -> None:
    assert list(load(dataset, sampler=[])) == []
    assert list(load(Subset(dataset, []))) == []
    dataset.samples = []
    assert list(load(dataset)) == []


# Odd files


@pytest.mark.parametrize("kind", ["GIF", "CMYK JPEG", "RGBA PNG"])
def test_an_odd_file_is_read_as_pil_reads_it(load: Load, fresh: ImageFolder, kind: str, device: str) -> None:
    mode, _, suffix = kind.rpartition(" ")
    with PIL.Image.open(path_of(fresh)) as image:
        path_of(fresh).write_bytes(encoded(image.convert(mode or "RGB"), suffix))
    loader = load(fresh, device=device)
    for _ in range(2):
        assert_pairs(loader, fresh, in_order())


@pytest.mark.parametrize("size", [(30, 20), (140, 130)], ids=["smaller", "larger"])
def test_a_file_that_is_rewritten_between_epochs_is_read_anew(
    load: Load, fresh: ImageFolder, size: tuple[int, int], device: str
) -> None:
    loader = load(fresh, device=device)
    assert_pairs(loader, fresh, in_order())
    with PIL.Image.open(path_of(fresh, 1)) as image:
        path_of(fresh).write_bytes(encoded(image.resize(size), "JPEG"))
    assert_pairs(loader, fresh, in_order())


# Ends


def eventually(count: Callable[[], int], wanted: int) -> int:
    """Wait until a count has fallen to what is wanted, for at most two seconds, and return it."""
    end = time.monotonic() + 2
    while count() > wanted and time.monotonic() < end:
        time.sleep(0.02)
    return count()


def dali_threads() -> int:
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            names.append((task / "comm").read_text())
    return sum("DALI" in name for name in names)


def test_a_deleted_loader_frees_its_pipeline_at_once(load: Load, dataset: ImageFolder) -> None:
    gc.collect()
    before = dali_threads()
    gc.disable()
    try:
        loader = load(dataset, num_workers=2)
        assert_pairs(loader, dataset, in_order())
        assert dali_threads() > before
        del loader
        assert eventually(dali_threads, before) == before
    finally:
        gc.enable()


def test_no_thread_outlives_an_epoch(load: Load, dataset: ImageFolder) -> None:
    before = threading.active_count()
    loader = load(dataset, num_workers=2, timeout=20)
    for stop in (8, 2):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(stop)), dataset, in_order()[:stop])
        del iterator
        assert eventually(threading.active_count, before) == before


def test_the_epoch_after_a_timeout_does_not_hang(
    load: Load, monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder
) -> None:
    loader = load(dataset, num_workers=1, timeout=1)
    go_on, share = threading.Event(), nvidia.dali.Pipeline.share_outputs
    with monkeypatch.context() as slow:
        slow.setattr(nvidia.dali.Pipeline, "share_outputs", lambda *args, **kw: (go_on.wait(30), share(*args, **kw))[1])
        iterator = iter(loader)
        with pytest.raises(RuntimeError, match="timed out after 1 second"):
            next(iterator)
    assert_pairs(loader, dataset, in_order())
    go_on.set()
    del iterator
    assert_pairs(loader, dataset, in_order())
