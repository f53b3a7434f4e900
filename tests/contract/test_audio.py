"""AudioFolder: the samples are soundfile's, in DataLoader and in DALILoader."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchaudio
from helpers import sounds
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.transforms import v2

from torchdali import Batched, BatchShapeError, DALILoader, SampleError, pad_collate
from torchdali.datasets import AudioFolder
from torchdali.pipeline import batched
from torchdali.transforms import flatten

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

LENGTHS = {"a/one.wav": 900, "a/two.flac": 700, "b/three.ogg": 800, "b/four.mp3": 1200, "b/five.aiff": 650}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of sounds of several formats."""
    root = tmp_path_factory.mktemp("sounds")
    for number, (name, count) in enumerate(LENGTHS.items()):
        sounds.write(root / name, sounds.chirp(count, 150 + 70 * number))
    return root


def first_500(waveform: torch.Tensor) -> torch.Tensor:
    return waveform[..., :500]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs) > 0
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        for one, other in zip(our_batch, their_batch, strict=True):
            assert type(one) is type(other)
            assert one.dtype == other.dtype
            assert torch.equal(one.cpu(), other)


def test_samples_are_those_of_soundfile(folder: Path) -> None:
    dataset = AudioFolder(folder)
    assert dataset.classes == ["a", "b"]
    assert (dataset.sample_rate, dataset.channels) == (sounds.RATE, 1)
    assert repr(dataset) == "AudioFolder(5 sounds, 8000 Hz, 1 channel)"
    assert sorted(dataset.paths) == sorted(str(folder / name) for name in LENGTHS)
    for i, path in enumerate(dataset.paths):
        waveform, label = dataset[i]
        assert torch.equal(waveform, sounds.read(path))
        assert label == "ab".index(path.split("/")[-2])
    assert torch.equal(dataset[-1][0], sounds.read(dataset.paths[-1]))
    with pytest.raises(IndexError):
        dataset[5]
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[2][0], dataset[2][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_both_loaders_give_the_same(folder: Path, workers: int, device: str) -> None:
    for options in ({}, {"target_transform": str}):
        dataset = AudioFolder(folder, transform=first_500, **options)
        loader = DALILoader(dataset, 2, num_workers=workers, device=device)
        ours, theirs = list(loader), list(DataLoader(dataset, 2, num_workers=workers))
        if options:
            assert [labels for _, labels in ours] == [labels for _, labels in theirs]
            ours, theirs = ([[batch[0]] for batch in batches] for batches in (ours, theirs))
        assert_equal(ours, theirs)


def test_padding(folder: Path, device: str) -> None:
    dataset = AudioFolder(folder)
    options: Any = {"batch_size": 3, "collate_fn": functools.partial(pad_collate, lengths=True)}
    ours, theirs = list(DALILoader(dataset, device=device, **options)), list(DataLoader(dataset, **options))
    assert_equal(ours, theirs)
    waveforms, _, lengths = ours[0]
    assert lengths.tolist() == [sounds.read(path).shape[1] for path in dataset.paths[:3]]
    assert waveforms.shape == (3, 1, max(lengths))
    assert not waveforms[1, :, lengths[1] :].any()
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iter(DataLoader(dataset, 3)))
    with pytest.raises(
        BatchShapeError,
        match=rf"^the sounds of a batch differ in shape: \(1, 900\) \(sample 0, {dataset.paths[0]}\) and \(1, 700\) "
        r".*; give collate_fn=torchdali\.pad_collate",
    ):
        next(iter(DALILoader(dataset, 3, device="cpu")))


def test_pad_collate() -> None:
    samples = [{"x": torch.ones(2, n), "y": [n, "name"], "z": torch.tensor(n)} for n in (3, 1)]
    batch = pad_collate(samples, value=-1)
    assert batch["x"].tolist() == [[[1, 1, 1], [1, 1, 1]], [[1, -1, -1], [1, -1, -1]]]
    assert batch["y"][0].tolist() == [3, 1]
    assert batch["y"][1] == ("name", "name")
    assert batch["z"].tolist() == [3, 1]
    alone = pad_collate([torch.ones(2), torch.ones(4)], lengths=True)
    assert alone[0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert alone[1].tolist() == [2, 4]
    with pytest.raises(RuntimeError, match="stack expects each tensor"):
        pad_collate([torch.ones(2, 3), torch.ones(1, 3)])
    with pytest.raises(TypeError, match=r"pad_collate\(lengths=True\) needs a tensor in each sample, got int"):
        pad_collate([1, 2], lengths=True)


def test_tables_lists_and_parts(folder: Path, tmp_path: Path, device: str) -> None:
    path = folder / "a" / "one.wav"
    whole = sounds.read(path)
    table = tmp_path / "list.csv"
    table.write_text(f"file,label,start,end\n{path},3,0.0125,0.05\n{path},4,0.1,\n")
    for root in (table, [(path, 3, 0.0125, 0.05), (str(path), 4, 0.1, None)]):
        dataset = AudioFolder(root)
        assert torch.equal(dataset[0][0], whole[:, 100:400])
        assert torch.equal(dataset[1][0], whole[:, 800:])
        assert [dataset[i][1] for i in (0, 1)] == [3, 4]
    alone = AudioFolder([path, path])
    both = next(iter(DALILoader(alone, 2, device=device))), next(iter(DataLoader(alone, 2)))
    assert torch.equal(both[0].cpu(), both[1])
    assert both[1].shape == (2, 1, 900)
    joined = ConcatDataset([Subset(AudioFolder(folder, first_500), [4, 0]), AudioFolder([(path, 7)], first_500)])
    assert_equal(list(DALILoader(joined, 3, device=device)), list(DataLoader(joined, 3)))


def test_rates_and_channels(tmp_path: Path, device: str) -> None:
    first = sounds.write(tmp_path / "first.wav", sounds.chirp(400, channels=2))
    other = sounds.write(tmp_path / "other.wav", sounds.chirp(800), rate=2 * sounds.RATE)
    with pytest.raises(OSError, match=rf"^{other}: it has 1 channels, and the others have 2; give mono=True$"):
        AudioFolder([first, other])[1]
    with pytest.raises(OSError, match=r"it has 16000 Hz, and the others have 8000; give sample_rate=$"):
        AudioFolder([first, other], mono=True)[1]
    stereo = next(iter(DALILoader(AudioFolder([first]), 1, device=device)))[0].cpu()
    assert torch.equal(stereo, sounds.read(first))
    dataset = AudioFolder([first, other], mono=True, sample_rate=sounds.RATE)
    assert torch.equal(dataset[0], sounds.read(first).mean(0, keepdim=True))
    resampled = torchaudio.functional.resample(sounds.read(other), 2 * sounds.RATE, sounds.RATE)
    assert torch.equal(dataset[1], resampled)
    assert torch.equal(next(iter(DALILoader(dataset, 2, device=device))).cpu(), next(iter(DataLoader(dataset, 2))))


MEL = nn.Sequential(
    torchaudio.transforms.MelSpectrogram(sounds.RATE, n_fft=128, n_mels=20),
    torchaudio.transforms.AmplitudeToDB(top_db=60),
)


def run_mel(waveform: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(MEL).to(waveform.device)(waveform)


TRANSFORMS = {
    "sample": run_mel,
    "batch": [Batched(torchaudio.transforms.Vol(0.5)), Batched(MEL), v2.Normalize([-20.0], [10.0])],
    "image": v2.RandomHorizontalFlip(1.0),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_in_torch(folder: Path, name: str, device: str) -> None:
    rows = [(path, number, 0, 0.05) for number, path in enumerate(AudioFolder(folder).paths)]
    dataset = AudioFolder(rows, v2.Compose(flatten(TRANSFORMS[name])))
    ours, theirs = list(DALILoader(dataset, 2, device=device)), list(DataLoader(dataset, 2))
    assert len(ours) == len(theirs)
    for (waveforms, _), (their_waveforms, _) in zip(ours, theirs, strict=True):
        assert waveforms.shape == their_waveforms.shape
        assert (waveforms.cpu() - their_waveforms).abs().max() <= (1e-6 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("name", ["DALI", "batches in torch", "samples in torch"])
def test_torchaudios_transforms(folder: Path, name: str, device: str) -> None:
    before = {
        "DALI": [torchaudio.transforms.Vol(0.5)],
        "batches in torch": [torchaudio.transforms.Resample(sounds.RATE, 6000)],
        "samples in torch": [torchaudio.transforms.Deemphasis()],
    }
    dataset = AudioFolder(folder, v2.Compose([*before[name], MEL]))
    loader = DALILoader(dataset, 3, collate_fn=pad_collate, device=device)
    ours, theirs = list(loader), list(DataLoader(dataset, 3, collate_fn=pad_collate))
    assert len(ours) == len(theirs)
    for (spectrograms, _), (their_spectrograms, _) in zip(ours, theirs, strict=True):
        assert spectrograms.shape == their_spectrograms.shape
        bound = 0 if (name, device) == ("DALI", "cpu") else 1e-4 * their_spectrograms.abs().max()
        assert (spectrograms.cpu() - their_spectrograms).abs().max() <= bound
    text = io.StringIO()
    loader.explain(file=text)
    assert ("spectrograms float32 (1, H, W)" in text.getvalue()) == (name != "samples in torch")
    operators = "Spectrogram by torchaudio" if device == "cpu" else "spectrogram, mel_filter_bank; to_decibels"
    assert (operators in text.getvalue()) == (name == "DALI")


def test_dali_goes_on_after_a_spectrogram(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    run = batched._run_in_dali

    def spy(pool: Any, *arguments: Any) -> Any:
        kinds.append(pool.plan.steps[-1].library)
        return run(pool, *arguments)

    monkeypatch.setattr(batched, "_run_in_dali", spy)
    rows = [(path, number, 0, 0.05) for number, path in enumerate(AudioFolder(folder).paths)]
    chain = v2.Compose([Batched(MEL), v2.Normalize([-20.0], [10.0])])
    assert len(list(DALILoader(AudioFolder(rows, chain), 2, device="cpu"))) == 3
    assert kinds == ["DALI"] * 3


def test_random_numbers_and_resuming(folder: Path) -> None:
    def shift(waveform: torch.Tensor) -> torch.Tensor:
        return waveform[..., :500] + torch.rand(())

    def open_loader(size: int) -> DALILoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DALILoader(AudioFolder(folder, shift), size, shuffle=True, generator=generator, seed=3, device="cpu")

    whole = [waveform for waveforms, _ in open_loader(2) for waveform in waveforms]
    loader = open_loader(1)
    epoch = iter(loader)
    first = next(epoch)[0][0]
    assert torch.equal(first, whole[0])
    again = open_loader(1)
    again.load_state_dict(loader.state_dict())
    assert all(torch.equal(one[0], other) for (one, _), other in zip(again, whole[1:], strict=True))


def test_bad_files(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    good, flac = folder / "a" / "one.wav", (folder / "a" / "two.flac").read_bytes()
    contents = {"cut.flac": flac[: len(flac) // 2], "text.wav": b"no sound", "empty.mp3": b"", "raw.raw": b"0" * 99}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    sounds.write(tmp_path / "short.wav", sounds.chirp(0))
    bad = [*sorted(tmp_path.iterdir()), tmp_path / "missing.wav"]
    rows = [*((path, number) for number, path in enumerate(bad)), (good, 9)]
    dataset = AudioFolder(rows)
    assert (dataset.sample_rate, dataset.channels) == (sounds.RATE, 1)
    for number, path in enumerate(bad):
        with pytest.raises(SampleError, match=rf"^sample 0 \({path}\): .*it|there is no such file"):
            next(iter(DALILoader(Subset(dataset, [number]), 1, device="cpu")))
        with pytest.raises(OSError, match=str(path)):
            dataset[number]
    for policy in ("skip", "replace"):
        loader = DALILoader(dataset, len(rows), on_error=policy, device="cpu")
        waveforms, labels = next(iter(loader))
        assert len(loader.errors) == len(bad)
        assert torch.equal(waveforms[-1], sounds.read(good))
        if policy == "skip":
            assert labels.tolist() == [9] * len(rows)
        else:
            assert not waveforms[:-1].any()
            assert caplog.text.count("; silence takes its place") == len(bad)
            loader.explain()
            assert "on error   silence takes the place of" in capsys.readouterr().out
            assert labels.tolist() == [*range(len(bad)), 9]
    with pytest.raises(OSError, match=rf"^no file of 2 can be read; {bad[1]}: it is empty$"):
        AudioFolder(bad[1:3])
    with pytest.raises(OSError, match="it has none from start to end"):
        AudioFolder([(good, 0, 9, 10)])[0]


def test_arguments(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"root must be a folder, a \.csv or \.parquet file, or a list of paths"):
        AudioFolder(tmp_path / "list.txt")
    with pytest.raises(ValueError, match=r"a sound must be a path, \(path, label\)"):
        AudioFolder([(folder, 0, 9)])
    with pytest.raises(ValueError, match="root must have at least one sound, got an empty list"):
        AudioFolder([])
    (tmp_path / "empty.csv").write_text("file,label\n")
    with pytest.raises(ValueError, match=rf"got '{tmp_path}/empty.csv', which has no rows"):
        AudioFolder(tmp_path / "empty.csv")
    for rate in (0, 8000.0):
        with pytest.raises(ValueError, match="sample_rate must be None or an int above 0"):
            AudioFolder(folder, sample_rate=rate)  # type: ignore[arg-type]
    dataset = AudioFolder(folder, sample_rate=sounds.RATE // 2)
    monkeypatch.setitem(sys.modules, "torchaudio", None)
    with pytest.raises(ModuleNotFoundError, match="AudioFolder resamples with torchaudio"):
        dataset[0]
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ModuleNotFoundError, match=r"AudioFolder needs soundfile: pip install 'torchdali\[audio\]'"):
        AudioFolder(folder)


def test_explain_and_stats(folder: Path) -> None:
    text = io.StringIO()
    loader = DALILoader(AudioFolder(folder), 2, collate_fn=pad_collate, device="cpu")
    loader.explain(file=text)
    assert "Sounds are copied on cpu: there are no transforms" in text.getvalue()
    assert "source     AudioFolder(5 sounds, 8000 Hz, 1 channel)" in text.getvalue()
    assert "decode     soundfile, in threads of this process" in text.getvalue()
    assert "waveforms float32 (1, T)" in text.getvalue()
    transform = v2.Compose([v2.RandomHorizontalFlip(), *MEL])
    loader = DALILoader(AudioFolder(folder, transform), 2, collate_fn=pad_collate, device="cpu")
    loader.explain(file=text)
    assert "it is for images, and this is a sound" in " ".join(text.getvalue().split())
    assert loader.stats(probe=True).probe is not None
