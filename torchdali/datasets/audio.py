"""Sound files as a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from torchdali.datasets.rows import list_rows
from torchdali.sources import InputKind, Source, Spec
from torchdali.sources.paths import to_int64
from torchdali.transforms.spec import IntArray

__all__ = ["AUDIO_SUFFIXES", "AudioError", "AudioFolder", "AudioSource"]

AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"),
    *(".aif", ".aiff", ".aifc", ".au", ".caf", ".w64", ".rf64"),
)
"""Suffixes of the files that are taken from a folder, in lower case."""

Samples = npt.NDArray[np.float32]
"""``(T, C)`` samples of a sound, integers scaled to [-1, 1)."""


class AudioError(OSError):
    """A sound file cannot be decoded, or does not fit the others."""


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
        _require_soundfile()
        self.classes, self._rows = list_rows(root, AUDIO_SUFFIXES, "root", "sound")
        self.transform, self.target_transform = transform, target_transform
        self.paths = [row.path for row in self._rows]
        self.mono, self._resamples = mono, sample_rate is not None
        rate, channels = _read_first_header(self.paths)
        self.sample_rate, self.channels = sample_rate or rate, 1 if mono else channels
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
        samples, rate = _decode(row.path, row.start, row.end)
        if self.mono:
            samples = samples.mean(1, keepdims=True)
        elif samples.shape[1] != self.channels:
            raise AudioError(f"it has {samples.shape[1]} channels, and the others have {self.channels}; give mono=True")
        if rate == self.sample_rate:
            return samples
        if not self._resamples:
            raise AudioError(f"it has {rate} Hz, and the others have {self.sample_rate}; give sample_rate=")
        waveform = torch.from_numpy(_transpose(samples))
        resampled: torch.Tensor = _require_torchaudio().functional.resample(waveform, rate, self.sample_rate)
        return np.ascontiguousarray(resampled.T.numpy())

    def read_target(self, index: int) -> Any:
        """Return the label of a sample."""
        label = self._rows[index].label
        return self.target_transform(label) if self.target_transform and self.has_labels else label

    def __getitem__(self, index: int) -> Any:
        """Return a sample, decoded here."""
        index = range(len(self))[index]
        try:
            samples = self.read(index)
        except AudioError as error:
            raise AudioError(f"{self.paths[index]}: {error}") from error
        waveform: Any = torch.from_numpy(_transpose(samples))
        waveform = self.transform(waveform) if self.transform else waveform
        return (waveform, self.read_target(index)) if self.has_labels else waveform

    def torchdali_source(self) -> Source:
        """Return the source that ``DALILoader`` reads."""
        return AudioSource(self)

    def __repr__(self) -> str:
        channels = "1 channel" if self.channels == 1 else f"{self.channels} channels"
        return f"AudioFolder({len(self):,} sounds, {self.sample_rate} Hz, {channels})"


class AudioSource(Source):
    """The sounds of an :class:`AudioFolder`. The pipeline calls :meth:`read` in threads of its own."""

    kind = InputKind.PIXELS

    def __init__(self, dataset: AudioFolder) -> None:
        self.dataset, self.transform = dataset, dataset.transform
        self.spec = Spec("waveform", torch.float32, dataset.channels, unit=False)
        self.is_pair = dataset.has_labels

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: IntArray) -> list[Any]:
        """Return ``(1, time, channels)`` arrays: sounds are images of height 1."""
        return [self.dataset.read(row)[None] for row in rows.tolist()]

    def target(self, row: int) -> Any:
        return self.dataset.read_target(row)

    def labels(self, rows: IntArray) -> IntArray | None:
        labels = self.dataset.labels
        return None if labels is None or self.dataset.target_transform else labels[rows]

    def name(self, row: int) -> str:
        return self.dataset.paths[row]

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        return (image, target) if self.is_pair else image

    def describe(self) -> str:
        return repr(self.dataset)


def _transpose(samples: Samples) -> Samples:
    return np.ascontiguousarray(cast("Any", samples).T)


def _require_soundfile() -> Any:
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


def _read_first_header(paths: Sequence[str]) -> tuple[int, int]:
    """Return rate and number of channels of the first file that can be read."""
    failure: OSError | None = None
    for path in paths:
        try:
            with _open(path) as file:
                return file.samplerate, file.channels
        except OSError as error:
            failure = failure or error
    raise OSError(f"no file of {len(paths)} can be read; {paths[0]}: {failure}") from failure


def _open(path: str) -> Any:
    soundfile = _require_soundfile()
    try:
        return soundfile.SoundFile(path)
    except (soundfile.SoundFileError, TypeError) as error:  # the latter for raw samples without a header
        with Path(path).open("rb") as file:  # soundfile does not tell if a file is missing or empty
            if not file.read(1):
                raise AudioError("it is empty") from error
        raise AudioError(_reason(error)) from error


def _decode(path: str, start: float | None, end: float | None) -> tuple[Samples, int]:
    """Return ``(T, C)`` the samples of a file between two times in seconds, and its rate."""
    with _open(path) as file:
        rate, count = file.samplerate, file.frames
        first = round((start or 0.0) * rate)
        last = count if end is None else min(round(end * rate), count)
        if first >= last:
            raise AudioError("it has no samples" if start is None and end is None else "it has none from start to end")
        try:
            file.seek(first)  # also to 0, as soundfile.read does: the samples of an MP3 depend on it
            samples = file.read(last - first, dtype="float32", always_2d=True)
        except _require_soundfile().SoundFileError as error:
            raise AudioError(_reason(error)) from error
    if not len(samples):
        raise AudioError("it has no samples")
    return samples, rate


def _reason(error: Exception) -> str:
    """Return soundfile's reason without the path, which is named elsewhere."""
    return str(getattr(error, "error_string", error)).removeprefix("Error : ")
