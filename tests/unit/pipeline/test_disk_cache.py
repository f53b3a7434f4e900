"""``cache="disk"``: bounded, shared by processes, and right after a crash."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from torchdali.pipeline.cache.disk import DiskObjects
from torchdali.sources.remote import Range

BLOCK = 4096


def part(number: int, tag: str = "") -> Range:
    return Range("s3://bucket/key", number, number + 1, tag)


def content(number: int, length: int = 1000) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, length, np.uint8)


def opened(folder: Path, budget: int | None = 100 * BLOCK) -> DiskObjects:
    return DiskObjects("state", budget, folder)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("??/*") if path.is_file()]


def age(folder: Path) -> None:
    """Let all files be of an earlier run."""
    for path in files(folder):
        os.utime(path, (1, 1))


def test_what_was_added_is_there_in_the_next_run(tmp_path: Path) -> None:
    first = opened(tmp_path / "new" / "folder")
    assert first.get(part(0)) is None
    for number in range(5):
        first.add(part(number), content(number))
    first.close()
    second = opened(tmp_path / "new" / "folder")
    for number in range(5):
        found = second.get(part(number))
        assert found is not None
        assert np.array_equal(found, content(number))
    assert second.get(part(0, "another tag")) is None
    assert second.get(Range("s3://bucket/key")) is None
    assert "0.0 MiB of at most 0.4 MiB (cache_bytes)" in second.describe()
    assert "half of what was free" in opened(tmp_path, None).describe()


def test_it_stays_within_its_budget_and_keeps_what_this_run_uses(tmp_path: Path) -> None:
    cache = opened(tmp_path, 10 * BLOCK)
    for number in range(30):
        cache.add(part(number), content(number))
    assert len(files(tmp_path)) == 10
    assert [number for number in range(30) if cache.get(part(number)) is not None] == list(range(10))
    age(tmp_path)
    later = opened(tmp_path, 10 * BLOCK)
    assert later.get(part(3)) is not None
    for number in range(30, 60):
        later.add(part(number), content(number))
    assert len(files(tmp_path)) == 10
    assert later.get(part(3)) is not None
    assert sum(later.get(part(number)) is not None for number in range(30, 60)) == 9
    huge = opened(tmp_path / "other", 10 * BLOCK)
    huge.add(part(0), content(0, 11 * BLOCK))
    assert files(tmp_path / "other") == []


def test_a_damaged_file_is_forgotten(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    for number in range(4):
        cache.add(part(number), content(number))
    paths = {number: cache._path(part(number)) for number in range(4)}
    paths[0].write_bytes(b"")
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    damaged = bytearray(paths[2].read_bytes())
    damaged[7] ^= 1
    paths[2].write_bytes(damaged)
    assert [cache.get(part(number)) is not None for number in range(4)] == [False, False, False, True]
    cache.add(part(0), content(0))
    assert cache.get(part(0)) is not None


def test_a_crash_leaves_no_lock_and_no_wrong_count(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    cache = opened(tmp_path, 10 * BLOCK)

    def crash() -> None:
        with cache._lock_folder():
            os._exit(1)

    process = context.Process(target=crash)
    process.start()
    process.join()
    (tmp_path / "used").write_bytes(b"half a num")
    left = tmp_path / "unfinished" / "1-1"
    left.write_bytes(b"part")
    os.utime(left, (time.time() - 4000,) * 2)
    for number in range(12):
        cache.add(part(number), content(number))
    assert len(files(tmp_path)) == 10
    assert not left.exists()
    assert int((tmp_path / "used").read_bytes()) == 10 * BLOCK


def test_processes_share_the_folder_and_its_budget(tmp_path: Path) -> None:
    def fill(first: int) -> None:
        cache = opened(tmp_path, 50 * BLOCK)
        for number in range(first, first + 40):
            cache.add(part(number), content(number))
            assert (found := cache.get(part(number))) is None or np.array_equal(found, content(number))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(first,)) for first in (0, 20, 40)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(files(tmp_path)) == 50
    cache = opened(tmp_path, 50 * BLOCK)
    assert sum(cache.get(part(number)) is not None for number in range(80)) == len(files(tmp_path))


def test_a_full_disk_is_no_fault(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.add(part(0), content(0))
    cache._unfinished.rmdir()
    cache._unfinished.write_bytes(b"")  # no file can be made in it
    cache.add(part(1), content(1))
    assert cache.get(part(1)) is None
    assert cache.get(part(0)) is not None
    assert int((tmp_path / "used").read_bytes()) == BLOCK
    cache._unfinished.unlink()
    cache._unfinished.mkdir()
    cache.add(part(2), content(2))  # this run tries no more
    assert cache.get(part(2)) is None


def test_a_child_forked_while_the_folder_is_locked_does_not_keep_the_lock(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    context = multiprocessing.get_context("fork")
    end = context.Event()
    with cache._lock_folder():
        child = context.Process(target=end.wait)
        child.start()
    is_locked = False
    with (tmp_path / "used").open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = True
    end.set()
    child.join()
    assert child.exitcode == 0
    assert not is_locked


def test_a_file_is_counted_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while the folder is locked, so that no other process misses it."""
    counts: list[int] = []
    replace = Path.replace

    def record(file: Path, target: Path) -> Path:
        counts.append(int((tmp_path / "used").read_bytes()))
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", record)
    cache = opened(tmp_path)
    for number in range(2):
        cache.add(part(number), content(number))
    assert counts == [BLOCK, 2 * BLOCK]


def test_processes_of_one_number_write_files_of_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers that share a folder may each have a process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    context = multiprocessing.get_context("fork")
    names = context.SimpleQueue()

    def add() -> None:
        cache = opened(tmp_path)
        cache._finish = lambda unfinished, *_: names.put(unfinished.name)
        cache.add(part(0), content(0))

    processes = [context.Process(target=add) for _ in range(2)]
    for process in processes:
        process.start()
        process.join()
    assert names.get() != names.get()
