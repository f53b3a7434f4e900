"""A loader that is closed gives back what it had, and can be used again; a copy of a loader is one of its own."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PER_BATCH, assert_pairs, in_order
from helpers.proxied import PathSamples
from torch.utils.data import BatchSampler, SequentialSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

KINDS = [
    pytest.param(False, {}, id="read"),
    pytest.param(True, {}, id="asked"),
    pytest.param(True, {"num_workers": 1}, id="asked by a worker"),
    pytest.param(True, {"num_workers": 1, "persistent_workers": True}, id="asked by a worker that stays"),
]


def make(dataset: ImageFolder, asked: bool, options: dict[str, Any], device: str) -> DALILoader[Any]:
    if asked:
        options = {**options, "transform": dataset.transform}
    return DALILoader(PathSamples(dataset) if asked else dataset, PER_BATCH, device=device, **options)


NATIVE_OR_FED = [KINDS[0], KINDS[3]]


def open_ones() -> list[int]:
    """Threads of the process, those that Python knows, and file descriptors."""
    count = [len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd")]
    return [threading.active_count(), *count]


@pytest.mark.parametrize(("asked", "options"), KINDS)
def test_closing_ends_epochs_and_the_loader_can_be_used_again(
    dataset: ImageFolder, asked: bool, options: dict[str, Any], device: str
) -> None:
    with make(dataset, asked, options, device) as loader:
        kept = next(iter(loader))
        content = kept[0].clone()
        under_way = iter(loader)
        next(under_way)
        loader.close()
        with pytest.raises(RuntimeError, match="the loader was closed"):
            next(under_way)
        assert_pairs(loader, dataset, in_order())
    loader.close()
    assert torch.equal(kept[0], content)
    assert not multiprocessing.active_children()
    assert_pairs(loader, dataset, in_order())
    loader.close()


@pytest.mark.parametrize(("asked", "options"), NATIVE_OR_FED)
def test_closing_ends_threads_and_files(dataset: ImageFolder, asked: bool, options: dict[str, Any]) -> None:
    """Though loaders and iterators are still there."""
    kept = []
    for _ in range(4):  # what DALI and torch start once for a process is there after the first
        with make(dataset, asked, options, "cpu") as loader:
            iterator = iter(loader)
            next(iterator)
        gc.collect()
        assert "memfd:torchdali" not in Path("/proc/self/maps").read_text(), "blocks of workers"
        kept.append((open_ones(), loader, None if options else iterator))  # torch's queues are files of an iterator
    before, after = kept[0][0], kept[-1][0]
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_closing_ends_epochs_of_dataloaders_own_kind(options: dict[str, Any]) -> None:
    """There are no images, and nothing to do for DALI."""
    with DALILoader([*range(24)], PER_BATCH, device="cpu", **options) as loader:
        whole = torch.stack(list(loader))
        under_way = iter(loader)
        next(under_way)
        assert bool(multiprocessing.active_children()) == bool(options)
    assert not multiprocessing.active_children()
    with pytest.raises(RuntimeError, match="the loader was closed"):
        next(under_way)
    over = iter(loader)
    assert torch.equal(torch.stack(list(over)), whole)
    loader.close()
    assert next(over, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "options"), KINDS)
def test_closing_gives_the_memory_of_the_gpu_back(dataset: ImageFolder, asked: bool, options: dict[str, Any]) -> None:
    dataset.transform = v2.Compose([v2.ToImage(), v2.Resize((1024, 1024))])
    used = []
    for _ in range(3):
        with make(dataset, asked, options, "cuda") as loader:
            list(loader)
        torch.cuda.synchronize()
        used.append(torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0])
    assert used[2] <= used[0]
    with make(dataset, asked, options, "cuda") as loader:
        batches = list(loader)
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] > used[0]
        assert len(batches) == len(in_order())


@pytest.mark.parametrize(("asked", "options"), NATIVE_OR_FED)
def test_a_used_loader_can_be_pickled(dataset: ImageFolder, asked: bool, options: dict[str, Any]) -> None:
    loader = make(dataset, asked, options, "cpu")
    list(loader)
    copied = pickle.loads(pickle.dumps(loader))
    assert type(copied) is DALILoader
    assert_pairs(copied, dataset, in_order())
    assert_pairs(loader, dataset, in_order())


@pytest.mark.parametrize(
    ("asked", "options", "images"),
    [(False, {}, True), (True, {"num_workers": 1}, True), (True, {"num_workers": 1}, False)],
)
def test_an_iterator_that_could_not_be_made_is_dropped_in_silence(
    dataset: ImageFolder, asked: bool, options: dict[str, Any], images: bool
) -> None:
    """What is raised in ``__del__`` fails a test."""

    class Broken(BatchSampler):
        def __iter__(self) -> Any:
            raise OwnError

    batches = Broken(SequentialSampler(dataset), PER_BATCH, drop_last=False)
    given = (PathSamples(dataset) if asked else dataset) if images else [*range(9)]
    options = {**options, "transform": dataset.transform if images and asked else None}
    loader = DALILoader(given, batch_sampler=batches, device="cpu", **options)
    with pytest.raises(OwnError):
        iter(loader)
    gc.collect()
    assert not multiprocessing.active_children()


class OwnError(Exception):
    pass


SCRIPT = """
import sys
from pathlib import Path
import PIL.Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchdali import DALILoader
from torchdali.workers.proxy import ParallelProxyIterator

class Asked(Dataset):
    def __len__(self):
        return len(folder)
    def __getitem__(self, index):
        return folder[index]

folder = ImageFolder(sys.argv[1])
transform = v2.Compose([v2.ToImage(), v2.CenterCrop(8)])
read = DALILoader(folder, 1, transform=transform, device="cpu")
asked = DALILoader(Asked(), 1, transform=transform, device="cpu", num_workers=1)
iterators = iter(read), iter(asked)
batches = [next(iterator) for iterator in iterators]
"""


def test_a_script_that_ends_in_an_epoch_says_nothing(pictures: Path) -> None:
    """Its loaders and iterators are finalised when the names of modules are gone."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(pictures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Exception ignored" not in done.stderr, done.stderr
