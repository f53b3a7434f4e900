"""Plain WAV files are read as soundfile reads them, and all others are left to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from helpers import sounds

from torchdali.datasets import audio
from torchdali.datasets.audio import AudioError, decode_sound
from torchdali.datasets.wav import parse_wav

EXTREMES = np.array([-32768, -1, 0, 1, 32767], np.int16)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_samples_are_those_of_soundfile(tmp_path: Path, channels: int) -> None:
    path = tmp_path / "sound.WAV"
    soundfile.write(path, np.repeat(EXTREMES[:, None], channels, 1), 16_000, subtype="PCM_16", format="WAV")
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    found = parse_wav(path.read_bytes())
    assert found
    assert found[1] == rate == 16_000
    assert found[0].dtype == samples.dtype
    assert np.array_equal(found[0], samples)


def test_chunks_before_the_samples_are_passed(tmp_path: Path) -> None:
    path = Path(sounds.write(tmp_path / "sound.wav", sounds.chirp(300)))
    data = path.read_bytes()
    longer = data[:12] + b"LIST" + (5).to_bytes(4, "little") + b"abcde\0" + data[12:]
    found, known = parse_wav(longer), parse_wav(data)
    assert found
    assert known
    assert np.array_equal(found[0], known[0])


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "ULAW", "MS_ADPCM"])
def test_other_kinds_are_left_to_soundfile(tmp_path: Path, subtype: str) -> None:
    path = tmp_path / "sound.wav"
    soundfile.write(path, sounds.chirp(400), 8000, subtype=subtype)
    assert parse_wav(path.read_bytes()) is None
    samples, _ = soundfile.read(path, dtype="float32", always_2d=True)
    assert np.array_equal(decode_sound(str(path))[0], samples)


def test_damaged_files_give_what_soundfile_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each file that is cut off or has a wrong byte in its header."""
    data = Path(sounds.write(tmp_path / "whole.wav", sounds.chirp(200))).read_bytes()
    changed = [data[:length] for length in (0, 3, 11, 20, 40, 44, 45, 46, 200, len(data) - 1)]
    changed += [data[:i] + bytes([value]) + data[i + 1 :] for i in range(44) for value in (0, 1, 7, 255)]
    path = tmp_path / "changed.wav"

    def decode() -> object:
        try:
            samples, rate = decode_sound(str(path))
        except AudioError as error:
            return str(error)
        return samples.tobytes(), samples.shape, rate

    for number, content in enumerate(changed):
        path.write_bytes(content)
        ours = decode()
        with monkeypatch.context() as patch:
            patch.setattr(audio, "read_wav", lambda _: None)
            assert ours == decode(), number
