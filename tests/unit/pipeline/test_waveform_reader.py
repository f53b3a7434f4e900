"""How many threads read sounds at a time."""

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from torchdali import DALILoader
from torchdali.datasets import AudioFolder
from torchdali.datasets.audio import SoundSource
from torchdali.pipeline.readers import decoded
from torchdali.pipeline.readers.decoded import WaveformReader


class Sounds:
    """Sounds that are counted while they are read."""

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        self.meeting, self.lock = meeting, threading.Lock()
        self.reading = self.most = 0

    def __len__(self) -> int:
        return 64

    def read(self, index: int) -> np.ndarray:
        with self.lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        time.sleep(0.001)
        if self.meeting and index % 4 == 0:  # the first sound of each thread's share
            self.meeting.wait(30)
        with self.lock:
            self.reading -= 1
        return np.full((10, 1), index, np.float32)


class FakeSource(SoundSource):
    """A source without labels."""

    def target(self, row: int) -> None:
        return None

    def name(self, row: int) -> str:
        return f"sound {row}"


def read_all(reader: WaveformReader) -> list[np.ndarray]:
    """Read a batch of all sounds with eight threads."""
    rows = np.arange(64)
    batch = reader.open_batch()
    with ThreadPoolExecutor(8) as pool:
        batch.scan(rows, lambda: pool).wait()
    return batch.read_inputs(rows, {}, None)  # type: ignore[arg-type]


def test_two_threads_read_quick_sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "perf_counter", lambda: 0.0)  # each sound takes no time
    monkeypatch.setattr(decoded, "_PATIENCE", 30)
    sounds = Sounds()
    found = read_all(WaveformReader(FakeSource(sounds, 1)))
    assert sounds.most == 2
    assert [sound[0, 0, 0] for sound in found] == list(range(64))


def test_all_threads_read_slow_sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "_PATIENCE", 60)
    sounds = Sounds(threading.Barrier(8))
    reader = WaveformReader(FakeSource(sounds, 1))
    for _ in range(9):
        reader.note_time(1.0)  # as slow as a file of minutes
    read_all(reader)  # each thread waits for the seven others
    assert sounds.most == 8
    reader.begin_epoch()
    sounds.meeting, sounds.most = None, 0
    monkeypatch.setattr(decoded, "perf_counter", lambda: 0.0)
    read_all(reader)
    assert sounds.most == 2  # again two at a time


def test_no_thread_waits_long_for_its_turn() -> None:
    """Nobody knows that sounds are slow before the first of them is read, and one may never be."""
    sounds = Sounds(threading.Barrier(8))
    reader = WaveformReader(FakeSource(sounds, 1))
    begin = time.monotonic()
    read_all(reader)  # each thread waits for the seven others
    assert sounds.most == 8
    assert time.monotonic() - begin < 5


def test_one_slow_sound_makes_no_others_slow() -> None:
    reader = WaveformReader(FakeSource(Sounds(), 1))
    assert reader.chunk == 4  # nothing is known
    reader.note_time(60.0)
    assert reader.chunk == 16
    for _ in range(9):
        reader.note_time(60.0)
    assert reader.chunk == 4


def test_a_loader_of_sounds_is_copied_and_pickled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i in range(4):
        soundfile.write(tmp_path / "a" / f"{i}.wav", np.full(100, i / 8), 8000)
    loader = DALILoader(AudioFolder(tmp_path), 2, device="cpu")
    expected = [batch[0] for batch in loader]
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert all(torch.equal(x[0], y) for x, y in zip(other, expected, strict=True))
