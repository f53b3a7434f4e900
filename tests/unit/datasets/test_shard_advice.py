"""Mapped shards: the kernel is advised to read what is not in memory."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from torchdali.datasets.shards import Shards, stat_shards

_DISK = {"ru_majflt": 7, "ru_inblock": 900}


@pytest.mark.parametrize("counter", list(_DISK))
def test_advice_ends_when_nothing_is_read_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counter: str
) -> None:
    usage, advised = SimpleNamespace(**_DISK), list[int]()
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    monkeypatch.setattr(Shards, "_read_ahead", lambda *_: advised.append(number))
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(8)))
    shards = Shards([str(path)], np.array(stat_shards([str(path)])), "index")
    place = np.zeros(1, np.int64), np.full(1, 3), np.full(1, 2)
    for number in range(300):
        if number == 200:
            setattr(usage, counter, getattr(usage, counter) + 1)
        (content,) = shards.read(*place)
        assert content.tolist() == [3, 4]
    assert advised == [*range(67), *range(203, 267)], "every fourth read looks"


def test_advice_never_ends_where_linux_counts_no_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised = list[int]()
    monkeypatch.setattr(Shards, "_read_ahead", lambda *_: advised.append(1))
    monkeypatch.setattr("torchdali.runtime.machine.is_on_network", lambda _: True)
    path = tmp_path / "shard"
    path.write_bytes(bytes(8))
    shards = Shards([str(path)], np.array(stat_shards([str(path)])), "index")
    for _ in range(100):
        shards.read(np.zeros(1, np.int64), np.full(1, 3), np.full(1, 2))
    assert len(advised) == 100
