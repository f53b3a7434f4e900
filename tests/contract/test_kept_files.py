"""Where opening a file takes long, each is opened once: it is kept in memory from its header's reading to DALI's."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from helpers.crops import EXACT
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from torchdali import DALILoader, SampleError
from torchdali.pipeline.readers import FirstBytes
from torchdali.pipeline.readers.memory_files import KeptFiles
from torchdali.runtime import machine

KINDS = ("jpg", "jpg", "png", "webp", "tif", "jpg")
"""DALI decodes the first three, but DALI's validator gets whole files of the third. PIL decodes TIFF."""


@pytest.fixture
def files(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """36 pictures on what looks like a network file system."""
    root = tmp_path / "share" / "all"
    root.mkdir(parents=True)
    paths: list[Path] = []
    for number, (path, kind) in enumerate(
        zip(itertools.cycle(sorted(pictures.rglob("*.jpg"))), KINDS * 6, strict=False)
    ):
        paths.append(root / f"{number:02}.{kind}")
        PIL.Image.open(path).convert("RGB").rotate(number).save(paths[-1])
    monkeypatch.setattr(machine, "is_on_network", lambda _: True)
    return paths


def count_open() -> int:
    """How many files in memory are open."""
    gc.collect()
    return sum("memfd:torchdali" in os.fspath(path.resolve()) for path in Path("/proc/self/fd").iterdir())


def make(files: list[Path], batch_size: int = 6, **options: Any) -> DALILoader:
    return DALILoader(ImageFolder(files[0].parents[1], EXACT), batch_size, device="cpu", **options)


def wait_for_one(loader: DALILoader) -> int:
    """The row of a file that is kept."""
    reader: Any = loader._session.reader
    for _ in range(1000):
        if rows := [*reader._kept._files]:
            assert count_open()
            return rows[0]
        time.sleep(0.01)
    raise AssertionError("none is kept")


def assert_same(ours: Iterator[Any], theirs: list[Any]) -> None:
    for (images, labels), (own, other) in zip(ours, theirs, strict=True):
        assert np.array_equal(images.numpy(), own.numpy())
        assert labels.tolist() == other.tolist()


def test_files_are_not_opened_again_for_their_contents(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = list(DataLoader(ImageFolder(files[0].parents[1], EXACT), batch_size=6))
    read = FirstBytes.read

    def read_and_remove(first: Any, begin: int, end: int, *patience: float) -> int:
        end = read(first, begin, end, *patience)
        for path in first._paths[begin:end]:
            Path(os.fsdecode(path)).unlink()
        return end

    monkeypatch.setattr(FirstBytes, "read", read_and_remove)
    loader = make(files)
    assert_same(iter(loader), theirs)
    assert not any(path.exists() for path in files)
    assert not count_open()


def test_files_on_a_disk_are_not_kept(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_on_network", lambda _: False)
    monkeypatch.setattr(KeptFiles, "add", None)
    assert len(list(make(files))) == 6


def test_files_on_a_slow_disk_are_kept_once_a_few_tell(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_on_network", lambda _: False)
    for number in range(36, 1200):
        (files[0].parent / f"{number}.jpg").hardlink_to(files[0])
    read, add, rows = FirstBytes._read, KeptFiles.add, list[int]()

    def read_slowly(first: Any, i: int) -> None:
        time.sleep(4e-3)
        read(first, i)

    def note(kept: KeptFiles, row: int, file: Any) -> None:
        add(kept, row, file)
        rows.append(row)

    monkeypatch.setattr(FirstBytes, "_read", read_slowly)
    monkeypatch.setattr(KeptFiles, "add", note)
    assert len(list(make(files, batch_size=100))) == 12
    assert 600 < len(rows) < 1200


def test_so_many_are_kept_as_may_be_open(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = list(DataLoader(ImageFolder(files[0].parents[1], EXACT), batch_size=36))
    add, rows = KeptFiles.add, list[int]()

    def note(kept: KeptFiles, row: int, file: Any) -> None:
        add(kept, row, file)
        rows.append(row)

    monkeypatch.setattr(KeptFiles, "add", note)
    monkeypatch.setattr(machine, "max_open_files", lambda: 60)
    assert_same(iter(make(files, batch_size=36)), theirs)
    assert len(rows) == 60 // 4


def test_there_is_room_again_for_files_that_were_taken(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "max_open_files", lambda: 8)
    kept = KeptFiles()
    with files[0].open("rb") as stream:
        for _ in range(3):
            for row in (0, 1):
                copy = kept.copy(stream.fileno(), 100)
                assert copy is not None
                kept.add(row, copy)
            assert kept.copy(stream.fileno(), 100) is None
            assert [*kept.take(np.array([1, 2, 0, 1]))] == [0, 2, 3]
        assert kept.copy(stream.fileno(), 2**29) is None, "too large"
        with monkeypatch.context() as patch:
            patch.setattr(os, "sendfile", lambda *_: Path("/no/such/file").stat())
            assert [kept.copy(stream.fileno(), 100) for _ in range(4)] == [None] * 4
        assert kept.copy(stream.fileno(), 100)


@pytest.mark.slow
def test_those_of_an_epoch_that_was_left_are_read_again(files: list[Path]) -> None:
    loader = make(files, batch_size=1)
    batches = iter(loader)
    next(batches)
    row = wait_for_one(loader)
    del batches
    files[row].write_bytes(files[0].read_bytes())
    assert_same(iter(loader), list(DataLoader(loader.dataset, batch_size=1)))
    assert not count_open()


@pytest.mark.slow
def test_closing_the_loader_drops_them(files: list[Path]) -> None:
    loader = make(files, batch_size=1)
    batches = iter(loader)
    next(batches)
    wait_for_one(loader)
    del batches
    loader.close()
    assert not count_open()


@pytest.mark.parametrize("number", [3, 4, 5])
def test_a_damaged_one_is_named_by_its_path(files: list[Path], number: int) -> None:
    files[number].write_bytes(files[number].read_bytes()[:-3000])
    with pytest.raises(SampleError, match=rf"sample {number} \(.*/{files[number].name}\): it cannot be") as raised:
        list(make(files))
    assert "/proc" not in str(raised.value)


def test_a_missing_one_is_skipped(files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    dataset = ImageFolder(files[0].parents[1], EXACT)
    files[5].unlink()
    batches = list(DALILoader(dataset, 6, device="cpu", on_error="skip"))
    assert [len(images) for images, _ in batches] == [6] * 6
    assert "05.jpg): there is no such file" in caplog.text
    assert not count_open()
