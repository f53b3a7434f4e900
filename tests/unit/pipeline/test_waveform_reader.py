"""How many threads read sounds at a time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

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
        if self.meeting and index % 16 == 0:  # the first sound of each thread's share
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
    sounds = Sounds()
    found = read_all(WaveformReader(FakeSource(sounds, 1)))
    assert sounds.most == 2
    assert [sound[0, 0, 0] for sound in found] == list(range(64))


def test_all_threads_read_slow_sounds() -> None:
    sounds = Sounds(threading.Barrier(4))
    reader = WaveformReader(FakeSource(sounds, 1))
    reader.note_time(1.0)  # as slow as a file of minutes
    read_all(reader)  # each thread waits for the three others
    assert sounds.most == 4
    reader.begin_epoch()
    assert reader.limit_threads() is reader.limit_threads()  # again two at a time
