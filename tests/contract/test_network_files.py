"""On network file systems, an image folder's files are opened once in each epoch, the first included."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.runtime import machine

CHAIN = v2.Compose([v2.RandomResizedCrop(20), v2.RandomHorizontalFlip(), v2.ToImage()])


class Opens:
    """Counts how often files are opened, by anyone (inotify)."""

    def __init__(self, root: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(os.O_NONBLOCK)
        self._folders = {}
        for folder in root.iterdir():
            number = libc.inotify_add_watch(self._queue, os.fsencode(folder), 0x20)  # IN_OPEN
            assert number > 0, os.strerror(ctypes.get_errno())
            self._folders[number] = folder.name

    def take(self) -> Counter[str]:
        """Return the files that were opened since the last call."""
        counts: Counter[str] = Counter()
        try:
            while data := os.read(self._queue, 2**16):
                while data:
                    folder, _, _, length = struct.unpack_from("iIII", data)
                    name = data[16 : 16 + length].rstrip(b"\0").decode()
                    counts[f"{self._folders[folder]}/{name}"] += bool(name)
                    data = data[16 + length :]
        except BlockingIOError:
            return +counts
        raise AssertionError

    def close(self) -> None:
        os.close(self._queue)


@pytest.fixture
def root(pictures: Path, tmp_path: Path) -> Path:
    shutil.copytree(pictures, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def opens(root: Path) -> Iterator[Opens]:
    opens = Opens(root)
    yield opens
    opens.close()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_on_network", lambda _: True)


def make(dataset: Any, device: str = "cpu", **options: Any) -> DALILoader:
    return DALILoader(dataset, 2, shuffle=True, seed=1, device=device, **options)


def collect(loader: DALILoader, epochs: int = 2) -> list[Any]:
    torch.manual_seed(0)
    return [batch for _ in range(epochs) for batch in loader]


@pytest.mark.usefixtures("network")
def test_each_file_is_opened_once(root: Path, opens: Opens) -> None:
    dataset = ImageFolder(root, CHAIN)
    loader = make(dataset)
    for _ in range(3):
        assert len(list(loader)) == len(loader)
        assert opens.take() == dict.fromkeys((str(Path(path).relative_to(root)) for path, _ in dataset.samples), 1)


def test_elsewhere_the_first_epoch_opens_files_for_their_headers(root: Path, opens: Opens) -> None:
    loader = make(ImageFolder(root, CHAIN))
    for number in (2, 1):
        list(loader)
        assert {*opens.take().values()} == {number}


def test_the_batches_are_the_same(root: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Subset(ImageFolder(root, CHAIN), [*range(3, 20), 7, 7])
    local = collect(make(dataset, device))
    monkeypatch.setattr(machine, "is_on_network", lambda _: True)
    assert same(collect(make(dataset, device)), local)


@pytest.mark.usefixtures("network")
def test_epochs_may_overlap(root: Path) -> None:
    whole = collect(make(ImageFolder(root, CHAIN)))
    loader = make(ImageFolder(root, CHAIN))
    torch.manual_seed(0)
    first = iter(loader)
    batches = [next(first), next(first)]  # later ones are not begun yet
    assert len(list(iter(loader))) == len(loader)  # all headers are known now
    batches += first
    assert same(batches, whole[: len(loader)])


@pytest.mark.usefixtures("network")
def test_damaged_and_missing_files_are_named_and_replaced(root: Path) -> None:
    dataset = ImageFolder(root, v2.Compose([v2.CenterCrop(20), v2.ToImage()]))
    cut, gone = (Path(dataset.samples[i][0]) for i in (4, 9))
    cut.write_bytes(cut.read_bytes()[:-200])
    gone.unlink()
    whole = DALILoader(dataset, len(dataset), device="cpu", on_error="replace")
    for _ in range(2):
        ((images, _),) = whole
        assert [not image.any() for image in images] == [i in (4, 9) for i in range(len(dataset))]
    for number, path in ((4, cut), (9, gone)):
        with pytest.raises(SampleError, match=f"sample 0 .*{path.name}"):
            list(DALILoader(Subset(dataset, [number]), 1, device="cpu"))
