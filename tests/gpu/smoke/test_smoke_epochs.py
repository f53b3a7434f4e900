"""What may happen to an epoch on the GPU: bad samples, resuming, streams, forks and early ends."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CROP, PER_BATCH, Script, assert_pairs, in_order
from helpers.damages import DAMAGES
from helpers.proxied import PathSamples
from helpers.smoke import DEVICE, assert_batches
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

BAD = {2: "garbage", 9: "truncated JPEG", 20: "empty"}
RANDOM = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip(), v2.ColorJitter(0.3)])

kinds = pytest.mark.parametrize("worker_fed", [False, True], ids=["native", "worker-fed"])


def make(dataset: ImageFolder, worker_fed: bool, **options: Any) -> DALILoader[Any]:
    options = {"batch_size": PER_BATCH, "device": DEVICE, **options}
    if not worker_fed:
        return DALILoader(dataset, **options)
    return DALILoader(PathSamples(dataset), transform=dataset.transform, num_workers=2, **options)


# Bad samples


@kinds
def test_a_bad_sample_is_named(fresh: ImageFolder, worker_fed: bool) -> None:
    DAMAGES["garbage"](Path(fresh.samples[4][0]))
    iterator = iter(make(fresh, worker_fed))
    next(iterator)
    with pytest.raises(SampleError) as caught:
        next(iterator)
    assert (caught.value.index, caught.value.path) == (4, fresh.samples[4][0])
    assert_pairs(iterator, fresh, in_order()[2:])


@kinds
def test_bad_samples_are_skipped(fresh: ImageFolder, worker_fed: bool) -> None:
    for index, damage in BAD.items():
        DAMAGES[damage](Path(fresh.samples[index][0]))
    loader = make(fresh, worker_fed, on_error="skip")
    batches = list(loader)
    assert sorted(error.index for error in loader.errors) == sorted(BAD)
    labels = [batch[1].tolist() for batch in batches]
    assert [len(batch) for batch in labels] == [PER_BATCH] * 8
    assert not BAD.keys() & {label for batch in labels for label in batch}
    assert_pairs(batches, fresh)


# Resuming


@kinds
def test_an_epoch_is_resumed_in_the_middle(dataset: ImageFolder, worker_fed: bool) -> None:
    dataset.transform = RANDOM
    loader = make(dataset, worker_fed, shuffle=True, seed=5, generator=torch.Generator().manual_seed(3))
    list(loader)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    rest = [list(iterator), list(loader)]
    again = make(dataset, worker_fed, shuffle=True, seed=5, generator=torch.Generator().manual_seed(8))
    again.load_state_dict(state)
    for expected in rest:
        assert_batches(again, expected)


# Streams


def side_stream() -> Any:
    return torch.cuda.stream(torch.cuda.Stream()) if DEVICE == "cuda" else contextlib.nullcontext()  # pyright: ignore


def keep_busy(cycles: int) -> None:
    """Keep the current stream busy, so that what follows is queued behind it."""
    if DEVICE == "cuda":
        torch.cuda._sleep(cycles)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@kinds
def test_batches_are_whole_on_another_stream(dataset: ImageFolder, worker_fed: bool) -> None:
    expected = [images.clone() for images, _ in make(dataset, worker_fed)]
    synchronize()
    for _ in range(3):
        with side_stream():
            batches = [images * 1 for images, _ in make(dataset, worker_fed)]
        synchronize()
        assert all(torch.equal(images, true) for images, true in zip(batches, expected, strict=True))


@kinds
def test_a_dropped_batch_is_not_reused_before_it_was_read(dataset: ImageFolder, worker_fed: bool) -> None:
    expected = [images.double().sum().item() for images, _ in make(dataset, worker_fed)]
    sums: list[torch.Tensor] = []
    for images, _ in make(dataset, worker_fed):
        keep_busy(20_000_000)
        sums.append(images.double().sum())
        del images
    assert [one.item() for one in sums] == expected


def test_a_cached_batch_may_be_changed_in_place(dataset: ImageFolder) -> None:
    with make(dataset, worker_fed=False, cache="device") as loader:
        expected = [images.clone() for images, _ in loader]
        for images, _ in loader:
            images.fill_(7)
        assert all(torch.equal(images, true) for (images, _), true in zip(loader, expected, strict=True))


def test_tensors_are_moved_to_the_device() -> None:
    """A transform of the batch is what gives DALILoader something to do on a device."""
    dataset = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12))
    loader = DALILoader(dataset, 5, num_workers=2, device=DEVICE, batch_transform=lambda *parts: list(parts))
    assert_batches(loader, DataLoader(dataset, 5))


# Forks and ends

FORK = """
import os, sys
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchdali import DALILoader

root, device = sys.argv[1:]
dataset = ImageFolder(root, v2.Compose([v2.ToImage(), v2.CenterCrop(24)]))
loader = DALILoader(dataset, 3, device=device)
iterator = iter(loader)
next(iterator)
child = os.fork()
if not child:
    assert len(list(DALILoader(dataset, 5, device="cpu"))) == 5
    try:
        next(iterator)
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(list(DataLoader(dataset, 4, num_workers=2))) == 6
assert len(list(DALILoader([*range(9)], 3, num_workers=2, device=device))) == 3
assert len(list(iterator)) == 7
"""


def test_processes_fork_while_a_loader_is_alive(pictures: Path, run_script: Script) -> None:
    done = run_script(FORK, pictures, DEVICE, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr


@kinds
def test_a_loader_may_be_closed_in_an_epoch_and_used_again(dataset: ImageFolder, worker_fed: bool) -> None:
    with make(dataset, worker_fed) as loader:
        kept = next(iter(loader))
        content = kept[0].clone()
        iterator = iter(loader)
        next(iterator)
        loader.close()
        with pytest.raises(RuntimeError, match="the loader was closed"):
            next(iterator)
        assert_pairs(loader, dataset, in_order())
    assert torch.equal(kept[0], content)


def test_a_break_leaves_the_next_epoch_whole(dataset: ImageFolder) -> None:
    loader = make(dataset, worker_fed=False)
    for stop in range(4):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(stop)), dataset, in_order()[:stop])
        del iterator
        assert_pairs(loader, dataset, in_order())
