"""Sound files as a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from torchdali.datasets.base import find_row
from torchdali.datasets.rows import list_rows
from torchdali.datasets.wav import read_wav
from torchdali.sources import InputKind, Source, Spec
from torchdali.sources.paths import to_int64
from torchdali.transforms.spec import IntArray

__all__ = [
    "AUDIO_SUFFIXES",
    "AudioError",
    "AudioFolder",
    "Samples",
    "SoundFormat",
    "SoundSource",
    "decode_sound",
    "read_header",
    "to_waveform",
]

AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"),
    *(".aif", ".aiff", ".aifc", ".au", ".caf", ".w64", ".rf64"),
)
"""Suffixes of the files that are taken from a folder, in lower case."""

Samples = npt.NDArray[np.float32]
"""``(T, C)`` samples of a sound, integers scaled to [-1, 1)."""


class AudioError(OSError):
    """A sound file cannot be decoded, or does not fit the others."""


class SoundFormat(NamedTuple):
    """What the sounds of a dataset have in common.

    Attributes:
        sample_rate: Their rate, in Hz.
        channels: Their number of channels.
        resamples: Whether sounds of another rate are resampled.
        mono: Whether channels are averaged.
        advice: What messages about another number of channels, and about another rate, end with.
    """

    sample_rate: int
    channels: int
    resamples: bool = False
    mono: bool = False
    advice: tuple[str, str] = ("", "")

    def convert(self, samples: Samples, rate: int) -> Samples:
        """Return a sound in this format.

        Raises:
            AudioError: It has another number of channels or another rate, which must not be changed.
        """
        if self.mono:
            samples = samples.mean(1, keepdims=True)
        elif samples.shape[1] != self.channels:
            raise AudioError(f"it has {samples.shape[1]} channels, and the others have {self.channels}{self.advice[0]}")
        if rate == self.sample_rate:
            return samples
        if not self.resamples:
            raise AudioError(f"it has {rate} Hz, and the others have {self.sample_rate}{self.advice[1]}")
        resample = _require_torchaudio().functional.resample
        resampled: torch.Tensor = resample(to_waveform(samples), rate, self.sample_rate)
        return np.ascontiguousarray(resampled.T.numpy())


class AudioFolder(Dataset[Any]):
    """Sound files with labels. ``DataLoader`` and ``DALILoader`` take it.

    A sample is ``(waveform, label)``. The waveform is a float32 tensor ``(channels, time)``, as torchaudio's transforms
    take it, with the samples that soundfile reads: integers are scaled to [-1, 1). Samples of a list without labels are
    the waveform alone. All sounds have the rate :attr:`sample_rate`, and equally many channels.

    Args:
        root: A folder of class folders, as for ``ImageFolder``. Or a ``.csv`` or ``.parquet`` file with the columns
            ``file`` and, if there are such, ``label``, ``start`` and ``end`` in seconds. Or a list of paths, of
            ``(path, label)``, or of ``(path, label, start, end)``.
        transform: Called with each waveform.
        target_transform: Called with each label.
        sample_rate: The rate of all sounds. ``torchaudio.functional.resample`` gives it to files with another one.
            None takes that of the first file; a file with another one is an error then.
        mono: Whether the channels of a file are averaged to one.

    Attributes:
        classes: The names of the classes by label, of a folder; else empty.
        paths: The path of each sample.
        sample_rate: The rate of all sounds, in Hz.
        channels: The number of channels of all sounds.

    Raises:
        ModuleNotFoundError: soundfile is not installed.
        ValueError: ``root`` is none of these, or has no sounds; or ``sample_rate`` is not positive.
        OSError: No file can be read.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Sequence[Any],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        sample_rate: int | None = None,
        mono: bool = False,
    ) -> None:
        if sample_rate is not None and not (type(sample_rate) is int and sample_rate > 0):
            raise ValueError(f"sample_rate must be None or an int above 0, got {sample_rate!r}")
        require_soundfile()
        self.classes, self._rows = list_rows(root, AUDIO_SUFFIXES, "root", "sound")
        self.transform, self.target_transform = transform, target_transform
        self.paths = [row.path for row in self._rows]
        rate, channels = _read_first_header(self.paths)
        self.sample_rate, self.channels = sample_rate or rate, 1 if mono else channels
        advice = "; give mono=True", "; give sample_rate="
        self._format = SoundFormat(self.sample_rate, self.channels, sample_rate is not None, mono, advice)
        labels = [row.label for row in self._rows]
        self.labels: IntArray | None = to_int64(labels)
        self.has_labels = any(label is not None for label in labels)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Samples:
        """Return ``(time, channels)`` the samples of a sound, without the transform.

        Raises:
            AudioError: The file cannot be decoded, or does not fit the others.
            OSError: It cannot be read.
        """
        row = self._rows[index]
        return self._format.convert(*decode_sound(row.path, row.start, row.end))

    def read_target(self, index: int) -> Any:
        """Return the label of a sample."""
        label = self._rows[index].label
        return self.target_transform(label) if self.target_transform and self.has_labels else label

    def __getitem__(self, index: int) -> Any:
        """Return a sample, decoded here."""
        index = find_row(self, index)
        try:
            samples = self.read(index)
        except AudioError as error:
            raise AudioError(f"{self.paths[index]}: {error}") from error
        waveform: Any = to_waveform(samples)
        waveform = self.transform(waveform) if self.transform else waveform
        return (waveform, self.read_target(index)) if self.has_labels else waveform

    def torchdali_source(self) -> Source:
        """Return the source that ``DALILoader`` reads."""
        return _FolderSource(self)

    def __repr__(self) -> str:
        channels = "1 channel" if self.channels == 1 else f"{self.channels} channels"
        return f"AudioFolder({len(self):,} sounds, {self.sample_rate} Hz, {channels})"


class SoundSource(Source):
    """Base of sources of sounds. The pipeline calls :meth:`read` in threads of its own.

    Args:
        dataset: Its ``read(index)`` returns ``(time, channels)`` the samples of a sound.
        channels: Number of channels of all sounds.
    """

    kind = InputKind.PIXELS

    def __init__(self, dataset: Any, channels: int) -> None:
        self.dataset = dataset
        self.spec = Spec("waveform", torch.float32, channels, unit=False)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: IntArray) -> list[Any]:
        """Return ``(1, time, channels)`` arrays: sounds are images of height 1."""
        return [self.dataset.read(row)[None] for row in rows.tolist()]

    def describe(self) -> str:
        return repr(self.dataset)


class _FolderSource(SoundSource):
    """The sounds of an :class:`AudioFolder`."""

    def __init__(self, dataset: AudioFolder) -> None:
        super().__init__(dataset, dataset.channels)
        self.transform, self.is_pair = dataset.transform, dataset.has_labels

    def target(self, row: int) -> Any:
        return self.dataset.read_target(row)

    def labels(self, rows: IntArray) -> IntArray | None:
        labels = self.dataset.labels
        return None if labels is None or self.dataset.target_transform else labels[rows]

    def name(self, row: int) -> str:
        return self.dataset.paths[row]

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        return (image, target) if self.is_pair else image


def to_waveform(samples: Samples) -> torch.Tensor:
    """Return ``(channels, time)`` the samples of a sound."""
    return torch.from_numpy(np.ascontiguousarray(cast("Any", samples).T))


def require_soundfile() -> Any:
    """Return the module, which may be missing."""
    try:
        return import_module("soundfile")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "torchdali.datasets.AudioFolder needs soundfile: pip install 'torchdali[audio]', or pip install soundfile",
            name="soundfile",
        ) from error


def _require_torchaudio() -> Any:
    try:
        return import_module("torchaudio")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "AudioFolder resamples with torchaudio, which is not installed: pip install torchaudio", name="torchaudio"
        ) from error


def read_header(source: str | IO[bytes]) -> tuple[int, int]:
    """Return rate and number of channels of a file.

    Raises:
        OSError: It cannot be read.
    """
    with _open(source) as file:
        return file.samplerate, file.channels


def _read_first_header(paths: Sequence[str]) -> tuple[int, int]:
    """Return rate and number of channels of the first file that can be read."""
    failure: OSError | None = None
    for path in paths:
        try:
            return read_header(path)
        except OSError as error:
            failure = failure or error
    raise OSError(f"no file of {len(paths)} can be read; {paths[0]}: {failure}") from failure


def _open(source: str | IO[bytes]) -> Any:
    soundfile = require_soundfile()
    try:
        return soundfile.SoundFile(source)
    except (soundfile.SoundFileError, TypeError) as error:  # the latter for raw samples without a header
        with Path(source).open("rb") if isinstance(source, str) else source as file:
            file.seek(0)  # soundfile does not tell if a file is missing or empty
            if not file.read(1):
                raise AudioError("it is empty") from error
        raise AudioError(_reason(error)) from error


def decode_sound(source: str | IO[bytes], start: float | None = None, end: float | None = None) -> tuple[Samples, int]:
    """Return ``(T, C)`` the samples of a file between two times in seconds, and its rate.

    Args:
        source: The path of the file, or the file in memory.
        start: The time of the first sample; None for the beginning.
        end: The time behind the last sample; None for the end.

    Raises:
        AudioError: It cannot be decoded.
        OSError: It cannot be read.
    """
    is_whole = start is None and end is None
    if is_whole and isinstance(source, str) and source.lower().endswith(".wav") and (found := read_wav(source)):
        return found
    with _open(source) as file:
        rate, count = file.samplerate, file.frames
        first = round((start or 0.0) * rate)
        last = count if end is None else min(round(end * rate), count)
        if first >= last:
            raise AudioError("it has no samples" if is_whole else "it has none from start to end")
        try:
            file.seek(first)  # also to 0, as soundfile.read does: the samples of an MP3 depend on it
            samples = file.read(last - first, dtype="float32", always_2d=True)
        except require_soundfile().SoundFileError as error:
            raise AudioError(_reason(error)) from error
    if not len(samples):
        raise AudioError("it has no samples")
    return samples, rate


def _reason(error: Exception) -> str:
    """Return soundfile's reason without the path, which is named elsewhere."""
    return str(getattr(error, "error_string", error)).removeprefix("Error : ")
