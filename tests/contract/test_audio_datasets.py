"""Sounds of torchaudio's and Hugging Face's datasets, read as they are."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torchaudio
from helpers import sounds
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchaudio.transforms import Vol

from torchdali import DALILoader, SampleError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

RATE = 16_000


@pytest.fixture(autouse=True)
def loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchaudio.load needs torchcodec. Without it, its samples are soundfile's."""
    if find_spec("torchcodec") is None:
        monkeypatch.setattr(torchaudio, "load", lambda path: (sounds.read(path), RATE))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    folder = root / "SpeechCommands" / "speech_commands_v0.02"
    for number, word in enumerate(("no", "yes")):
        for utterance in range(3):
            samples = sounds.chirp(400, 300 + 100 * number + utterance)
            sounds.write(folder / word / f"ab{number}_nohash_{utterance}.wav", samples, RATE)
    (folder / "validation_list.txt").write_text("yes/ab1_nohash_2.wav\n")
    (folder / "testing_list.txt").write_text("no/ab0_nohash_0.wav\n")
    return root


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("books")
    folder = root / "LibriSpeech" / "dev-clean" / "84" / "121"
    names = [f"84-121-000{number}" for number in range(3)]
    for number, name in enumerate(names):
        sounds.write(folder / f"{name}.flac", sounds.chirp(300, 200 + 50 * number), RATE)
    (folder / "84-121.trans.txt").write_text("".join(f"{name} SAID {name}\n" for name in names))
    return root


def open_all(commands: Path, books: Path) -> dict[str, Any]:
    spoken = torchaudio.datasets.SPEECHCOMMANDS(commands, subset="training")
    whole = torchaudio.datasets.SPEECHCOMMANDS(commands)
    return {
        "commands": spoken,
        "books": torchaudio.datasets.LIBRISPEECH(books, "dev-clean"),
        "parts": ConcatDataset([Subset(whole, [5, 0]), spoken]),
    }


def test_torchaudios_datasets_are_native(commands: Path, books: Path, device: str) -> None:
    for dataset in open_all(commands, books).values():
        loader = DALILoader(dataset, 2, shuffle=True, generator=torch.Generator().manual_seed(1), device=device)
        assert loader._session.source is not None
        theirs = list(DataLoader(dataset, 2, shuffle=True, generator=torch.Generator().manual_seed(1)))
        for (ours, *our_rest), (other, *rest) in zip(list(loader), theirs, strict=True):
            assert torch.equal(ours.cpu(), other)
            assert [x.tolist() if isinstance(x, torch.Tensor) else x for x in our_rest] == [
                x.tolist() if isinstance(x, torch.Tensor) else x for x in rest
            ]


def test_transforms_of_the_loader(commands: Path) -> None:
    dataset = torchaudio.datasets.SPEECHCOMMANDS(commands)
    loader = DALILoader(dataset, 6, transform=Vol(0.25), device="cpu")
    waveforms, rates, words, speakers, numbers = next(iter(loader))
    assert torch.equal(waveforms, torch.stack([dataset[i][0] * 0.25 for i in range(6)]))
    assert rates.tolist() == [RATE] * 6
    assert (words[3], speakers[3], numbers.tolist()) == ("yes", "ab1", [0, 1, 2, 0, 1, 2])
    text = io.StringIO()
    loader.explain(file=text)
    assert "SPEECHCOMMANDS of 6 sounds, 16000 Hz" in text.getvalue()
    dataset._walker.pop()
    assert sum(map(len, (batch[0] for batch in loader))) == 5


def test_what_torchaudio_refuses(commands: Path, tmp_path: Path) -> None:
    class Changed(torchaudio.datasets.SPEECHCOMMANDS):
        pass

    assert DALILoader(Changed(commands), 2, device="cpu")._session.source is None
    empty = torchaudio.datasets.LIBRISPEECH.__new__(torchaudio.datasets.LIBRISPEECH)
    empty._walker = []
    assert DALILoader(empty, 2, device="cpu")._session.source is None
    folder = tmp_path / "SpeechCommands" / "speech_commands_v0.02" / "up"
    sounds.write(folder / "a_nohash_0.wav", sounds.chirp(100), RATE // 2)
    dataset = torchaudio.datasets.SPEECHCOMMANDS(tmp_path)
    with pytest.raises(SampleError, match=r"a_nohash_0.wav\): .*it has 8000 Hz, and the others have 16000"):
        next(iter(DALILoader(dataset, 1, device="cpu")))


def encode(samples: Any, suffix: str, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    sounds.soundfile.write(file, samples, rate, format=suffix)
    return file.getvalue()


@pytest.fixture(scope="module")
def column(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A table of sounds: two in it, two under their paths."""
    root = tmp_path_factory.mktemp("column")
    values = [{"bytes": encode(sounds.chirp(500), suffix), "path": f"x.{suffix}"} for suffix in ("flac", "mp3")]
    paths = [sounds.write(root / f"{i}.wav", sounds.chirp(500, 300 + i), RATE) for i in range(2)]
    values += [{"bytes": None, "path": str(path)} for path in paths]
    table = datasets.Dataset.from_dict({"text": list("abcd"), "sound": values, "label": [3, 1, 4, 1]})
    return table.cast_column("sound", datasets.Audio(decode=False))


def read_value(value: dict[str, Any]) -> torch.Tensor:
    return sounds.read(value["path"] if value["bytes"] is None else io.BytesIO(value["bytes"]))


def test_columns_of_sounds(column: Any, device: str) -> None:
    loader = DALILoader(column, 2, transform=Vol(0.5), device=device, num_workers=1)
    assert loader._session.source is not None
    batches = list(loader)
    assert [list(batch) for batch in batches] == [["text", "sound", "label"]] * 2
    waveforms = [x for batch in batches for x in batch["sound"].cpu()]
    assert all(torch.equal(x, read_value(row["sound"]) * 0.5) for x, row in zip(waveforms, column, strict=True))
    assert [batch["text"] for batch in batches] == [["a", "b"], ["c", "d"]]
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [3, 1, 4, 1]
    alone = column.select([3, 0]).select_columns(["sound"])
    (batch,) = DALILoader(alone, 2, transform=Vol(0.5), device="cpu")
    assert torch.equal(batch["sound"][1], read_value(column[0]["sound"]) * 0.5)


def test_rates_and_channels_of_columns() -> None:
    values = [encode(sounds.chirp(400, channels=2), "wav"), encode(sounds.chirp(200), "wav", RATE // 2)]
    rows = datasets.Dataset.from_dict({"sound": [{"bytes": value, "path": None} for value in values]})
    plain = rows.cast_column("sound", datasets.Audio(decode=False))
    with pytest.raises(
        SampleError,
        match=r"sample 1 \(\['sound'\]\): it cannot be decoded \(it has 1 channels, and the others have 2; cast",
    ):
        next(iter(DALILoader(plain, 2, transform=Vol(1.0), device="cpu")))
    mono = rows.cast_column("sound", datasets.Audio(decode=False, num_channels=1))
    with pytest.raises(SampleError, match="it has 8000 Hz, and the others have 16000; cast the column"):
        next(iter(DALILoader(mono, 2, transform=Vol(1.0), device="cpu")))
    fitting = rows.cast_column("sound", datasets.Audio(RATE, decode=False, num_channels=1))
    loader = DALILoader(fitting, 2, transform=Vol(1.0), device="cpu")
    assert loader._session.source.spec.channels == 1
    batch = next(iter(loader))["sound"]
    expected = torchaudio.functional.resample(sounds.read(io.BytesIO(values[1])), RATE // 2, RATE)
    assert torch.equal(batch[1], expected)
    assert torch.equal(batch[0], sounds.read(io.BytesIO(values[0])).mean(0, keepdim=True))


def test_what_stays_with_the_workers(column: Any) -> None:
    two = column.add_column("other", column["sound"][:]).cast_column("other", datasets.Audio(decode=False))
    decoded = column.cast_column("sound", datasets.Audio())
    stereo = column.cast_column("sound", datasets.Audio(decode=False, num_channels=2))
    for rows in (two, decoded, stereo, column.with_format("torch"), column.select([])):
        assert DALILoader(rows, 2, transform=Vol(0.5), device="cpu")._session.source is None
    assert DALILoader(column, 2, device="cpu")._session.source is None
    nothing = datasets.Dataset.from_dict({"sound": [column[0]["sound"], {"bytes": None, "path": None}]})
    rows = nothing.cast_column("sound", datasets.Audio(decode=False))
    with pytest.raises(SampleError, match="the row has no sound: neither bytes nor a path"):
        list(DALILoader(rows, 1, transform=Vol(0.5), device="cpu"))
