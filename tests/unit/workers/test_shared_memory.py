"""Blocks of shared memory: filled by workers, read here, used again, and gone when nobody holds them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import multiprocessing
import os
import pickle
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import encoded
from skimage import data as photographs
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.workers import packing
from torchdali.workers.packed import Packed
from torchdali.workers.packed_reader import open_packed
from torchdali.workers.packing import Packer
from torchdali.workers.shared_memory import SharedBuffer, SharedBufferHandle, SharedBufferPool, align

pytestmark = pytest.mark.timeout(60)

PHOTOGRAPH = photographs.astronaut()


def sent(block: SharedBufferHandle) -> SharedBuffer:
    return pickle.loads(pickle.dumps(block))


def filled(ring: SharedBufferPool, number: int, length: int = 1000) -> SharedBuffer:
    memory, block = ring.take(length)
    memory[:length] = number
    return sent(block)


def holds(block: SharedBuffer, number: int, length: int = 1000) -> bool:
    contents = block.contents[:length]
    return len(contents) == length and bool((contents == number).all())


def open_blocks() -> int:
    """The blocks that this process has a file of; a mapping keeps one open, too."""
    blocks: set[int] = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            if "memfd:torchdali" in str(file.readlink()):
                blocks.add(file.stat().st_ino)
    return len(blocks)


def mapped_blocks() -> int:
    """The blocks that are mapped into this process."""
    return Path("/proc/self/maps").read_text().count("memfd:torchdali")


# One ring


@pytest.mark.parametrize("length", [1, 63, 64, 65, 4095, 10**6])
def test_what_is_written_is_read(length: int) -> None:
    ring, content = SharedBufferPool(), np.random.default_rng(0).integers(256, size=length, dtype=np.uint8)
    memory, block = ring.take(length)
    memory[:length] = content
    received = sent(block)
    assert np.array_equal(received.contents[:length], content)
    assert received.contents.ctypes.data % 64 == 0
    assert align(length) % 64 == 0 <= align(length) - length < 64


def test_a_block_is_used_again_only_when_it_was_read() -> None:
    before, ring = open_blocks(), SharedBufferPool()
    first, second = filled(ring, 1), filled(ring, 2)
    assert (holds(first, 1), holds(second, 2), open_blocks() - before) == (True, True, 2)
    view = first.contents
    del first
    third = filled(ring, 3)
    assert (holds(second, 2), holds(third, 3), open_blocks() - before) == (True, True, 2)
    assert (view[:1000] == 3).all()
    fourth = filled(ring, 4)
    assert (holds(second, 2), holds(third, 3), holds(fourth, 4), open_blocks() - before) == (True, True, True, 3)
    del ring
    assert (holds(second, 2), open_blocks() - before) == (True, 3)  # which are mapped here
    del second, third, fourth, view
    assert open_blocks() == before


def test_a_block_that_was_not_sent_is_not_lent_again() -> None:
    ring = SharedBufferPool()
    ring.take(10)
    ring.take(10)
    assert len(ring._blocks) == 2


def test_growing_batches_grow_one_block() -> None:
    before, ring = open_blocks(), SharedBufferPool()
    for number, length in enumerate([10, 4090, 5000, 100, 10**5, 3 * 10**6, 7]):
        received = filled(ring, number, length)
        kept = received.mapped_file
        assert holds(received, number, length)
        del received
    assert (open_blocks() - before, len(kept.memory)) == (1, kept.capacity)


def test_the_largest_block_is_used_again() -> None:
    """So that not all of them grow to what the largest batch takes."""
    ring = SharedBufferPool()
    received = [filled(ring, 1), filled(ring, 2, 10**6)]
    capacities = [block.capacity for block in ring._blocks]
    received.clear()
    assert holds(filled(ring, 3, 10**6), 3, 10**6)
    assert [block.capacity for block in ring._blocks] == capacities


def test_a_block_is_no_other_that_had_its_number() -> None:
    """Nor that of a process which had the same number."""
    first = filled(SharedBufferPool(), 1)
    second = filled(SharedBufferPool(), 2)
    assert first.mapped_file.key[0] == second.mapped_file.key[0] == os.getpid()
    assert (holds(first, 1), holds(second, 2)) == (True, True)


def test_nothing_stays_mapped() -> None:
    before, ring = mapped_blocks(), SharedBufferPool()
    received = [filled(ring, number) for number in range(3)]
    assert mapped_blocks() == before + 6
    del ring
    assert (holds(received[2], 2), mapped_blocks()) == (True, before + 3)
    del received
    assert mapped_blocks() == before


def test_a_forked_child_frees_nothing_that_its_parent_reads() -> None:
    ring = SharedBufferPool()
    received = filled(ring, 1)
    process = os.fork()
    if not process:
        del received
        os._exit(0)
    os.waitpid(process, 0)
    filled(ring, 2)
    assert holds(received, 1)


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [*((os, "posix_fallocate", getattr(errno, name)) for name in ("ENOSPC", "ENOMEM", "EFBIG")), (mmap, "mmap", 12)],
)
def test_too_little_memory_is_said_with_what_helps(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int
) -> None:
    ring = SharedBufferPool()

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as scarce:
        scarce.setattr(owner, name, refuse)
        with pytest.raises(MemoryError, match=r"needs 50 MiB of shared memory.*batch_size.*prefetch_factor"):
            ring.take(50 * 2**20)
    assert holds(filled(ring, 7), 7)
    assert len(ring._blocks) == 1


def fill_and_wait(results: Any) -> None:
    ring = SharedBufferPool()
    memory, block = ring.take(1000)
    memory[:1000] = 5
    results.send(block)
    time.sleep(60)


@pytest.mark.parametrize("read", ["before", "after"])
def test_a_block_outlives_its_worker(read: str) -> None:
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=fill_and_wait, args=(there,), daemon=True)
    worker.start()
    pickled = here.recv_bytes()
    received = pickle.loads(pickled) if read == "before" else None
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join()
    if received:
        assert holds(received, 5)
    else:
        with pytest.raises(RuntimeError, match=rf"pid {worker.pid}\) cannot be opened.*has ended"):
            pickle.loads(pickled)


# Under a loader


class Photographs(Dataset[Any]):
    """Crops of a photograph, each with its number and the blocks that its worker has."""

    def __init__(self, count: int = 24, sizes: tuple[int, ...] = (24,)) -> None:
        self.count, self.sizes = count, sizes

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> Any:
        size = self.sizes[index % len(self.sizes)]
        top, left = 31 * index % (512 - size), 53 * index % (512 - size)
        return PHOTOGRAPH[top : top + size, left : left + size]

    def __getitem__(self, index: int) -> Any:
        return self.image(index), index, open_blocks()


def of_right_images(batch: Any, dataset: Photographs, transform: Any) -> bool:
    images, numbers, *_ = batch
    truth = [transform(dataset.image(number)) for number in numbers.tolist()]
    return all(torch.equal(image, true) for image, true in zip(images, truth, strict=True))


@pytest.mark.parametrize("take", [1, 7])
def test_workers_use_their_blocks_again(take: int) -> None:
    dataset, transform = Photographs(150), v2.Compose([v2.ToImage(), v2.CenterCrop(16)])
    loader = DALILoader(dataset, 3, num_workers=2, transform=transform, device="cpu")
    here, most, late = open_blocks(), 0, []
    for batch in loader:
        late.append(batch)
        if len(late) == take:
            assert all(of_right_images(batch, dataset, transform) for batch in late)
            late.clear()
        most = max(most, int(batch[2].max()) - here)
    assert 1 <= most <= 9  # six in the window, two on their way, one being filled


@pytest.fixture
def packer(monkeypatch: pytest.MonkeyPatch) -> Packer:
    """As if this were a worker."""
    monkeypatch.setattr(packing, "get_worker_info", lambda: SimpleNamespace(id=0))
    return Packer(default_collate, True, True, True, in_worker=True)


def received(batch: Packed, rows: list[int], held: ExitStack, group: int = 0) -> Any:
    reader = open_packed(batch, batch.groups[group], lambda sample, *why: SampleError(sample, *why))
    return reader.read_inputs(np.array(rows), {}, held)


def test_images_hold_their_block_until_their_run_is_done(packer: Packer) -> None:
    def packed(first: int) -> Packed:
        return pickle.loads(pickle.dumps(packer([Photographs()[i] for i in range(first, first + 3)])))

    images, batch = [Photographs().image(i) for i in range(3)], packed(0)
    with ExitStack() as held:
        whole, (alone,) = (received(batch, rows, held) for rows in ([0, 1, 2], [1]))
        del batch
        beside = packed(3)
        assert np.array_equal(whole, images)
        assert np.array_equal(alone, images[1])
    assert packed(6).block.mapped_file is not beside.block.mapped_file  # pyright: ignore
    assert packer._pool is not None
    assert len(packer._pool._blocks) == 2


def test_numbers_lie_where_their_type_wants_them(packer: Packer) -> None:
    """Behind files of any length."""
    file = encoded(PIL.Image.fromarray(PHOTOGRAPH[:30, :40]), "PNG")
    floats = [np.full((9, 9 + i, 1), i, np.float64) for i in range(2)]
    batch = pickle.loads(pickle.dumps(packer([file + b"\0" * (1 - len(file) % 2), *floats])))
    with ExitStack() as held:
        found = received(batch, [0, 1], held, group=1)
        assert [image.flags.aligned for image in found] == [True, True]
        assert all(np.array_equal(one, other) for one, other in zip(found, floats, strict=True))


IDENTITIES: dict[str, Any] = {
    "ToImage": v2.ToImage(),
    "Identity": v2.Compose([v2.ToImage(), v2.Identity()]),
    "flip that never comes": v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(0.0)]),
    "crop of all": v2.Compose([v2.ToImage(), v2.CenterCrop(24)]),
    "of floats": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize([0.0], [1.0])]),
}


class Thin(Photographs):
    """Whose images have one channel, and one column, so that every order of their axes is the same in memory."""

    def image(self, index: int) -> Any:
        return super().image(index)[:, :1, :1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("name", "kind"), [("ToImage", Photographs), ("of floats", Thin), ("flip that never comes", Photographs)]
)
def test_batches_that_are_kept_do_not_change(name: str, kind: type[Photographs], workers: int) -> None:
    """Also where no transform has any reason to copy an image out of its block."""
    dataset, transform = kind(120), IDENTITIES[name]
    kept = list(DALILoader(dataset, 3, num_workers=workers, transform=transform, device="cpu"))
    assert len(kept) == 40
    assert all(of_right_images(batch, dataset, transform) for batch in kept)


class Reusing(Dataset[Any]):
    """Gives the same array again and again, with other contents."""

    def __init__(self) -> None:
        self.buffer = np.empty((24, 24, 3), np.uint8)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = Photographs().image(index)
        return self.buffer, index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("name", ["ToImage", "crop of all"])
def test_a_dataset_may_reuse_its_array(name: str, batch_size: int | None, workers: int) -> None:
    kept = list(DALILoader(Reusing(), batch_size, num_workers=workers, transform=IDENTITIES[name], device="cpu"))
    theirs = list(DataLoader(Reusing(), batch_size, collate_fn=None if batch_size else lambda x: (x[0].copy(), x[1])))
    assert len(kept) == len(theirs) == 40
    for (image, index), (true, number) in zip(kept, theirs, strict=True):
        assert int(index) == int(number)
        assert torch.equal(image.reshape(3, 24, 24), torch.as_tensor(true).reshape(24, 24, 3).permute(2, 0, 1))
