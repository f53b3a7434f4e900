"""torchaudio's datasets and Hugging Face's columns of sounds as they are, read without workers."""

from __future__ import annotations

import io
from abc import abstractmethod
from pathlib import Path
from typing import IO, Any

from torch.utils.data import Dataset

from torchdali.datasets.audio import (
    AudioError,
    Samples,
    SoundFormat,
    SoundSource,
    decode_sound,
    read_header,
    require_soundfile,
    to_waveform,
)
from torchdali.datasets.base import find_row
from torchdali.sources import Source

__all__ = ["SoundColumn", "Utterances", "has_utterances"]

_UTTERANCES = ("torchaudio.datasets.speechcommands.SPEECHCOMMANDS", "torchaudio.datasets.librispeech.LIBRISPEECH")
_TRIES = 8
"""Number of sounds whose headers are read, to find one that can be."""


class _Sounds(Dataset[Any]):
    """Base of datasets whose sounds soundfile decodes.

    Attributes:
        format: The rate and the number of channels.
    """

    format: SoundFormat

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def open(self, row: int) -> str | IO[bytes]:
        """Return the path of a sound, or its file in memory."""

    @abstractmethod
    def read_parts(self, row: int) -> Any:
        """Return the other parts of a sample."""

    @abstractmethod
    def make_sample(self, waveform: Any, parts: Any) -> Any:
        """Return a sample."""

    @abstractmethod
    def name(self, row: int) -> str:
        """Return the name of a sound, for messages."""

    def read(self, row: int) -> Samples:
        """Return ``(time, channels)`` the samples of a sound."""
        return self.format.convert(*decode_sound(self.open(row)))

    def find_header(self) -> tuple[int, int]:
        """Return rate and number of channels of one of the first sounds.

        Raises:
            OSError: None of them can be read.
        """
        require_soundfile()
        failure = OSError()
        for row in range(min(len(self), _TRIES)):
            try:
                return read_header(self.open(row))
            except OSError as error:
                failure = error
        raise failure

    def __getitem__(self, index: int) -> Any:
        """Return a sample, decoded here."""
        row = find_row(self, index)
        return self.make_sample(to_waveform(self.read(row)), self.read_parts(row))

    def torchdali_source(self) -> Source:
        """Return the source that ``DALILoader`` reads."""
        return _Source(self, self.format.channels)


class _Source(SoundSource):
    is_pair = False
    dataset: _Sounds

    def target(self, row: int) -> Any:
        return self.dataset.read_parts(row)

    def name(self, row: int) -> str:
        return self.dataset.name(row)

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        return self.dataset.make_sample(image, target)


def has_utterances(dataset: Any) -> bool:
    """Return whether it is torchaudio's SPEECHCOMMANDS or LIBRISPEECH, and no subclass."""
    kind: Any = dataset.__class__
    return f"{kind.__module__}.{kind.__qualname__}" in _UTTERANCES


class Utterances(_Sounds):
    """The samples of torchaudio's SPEECHCOMMANDS or LIBRISPEECH: the waveform, its rate, and what is said by whom.

    Raises:
        OSError: None of the first sounds can be read.
        ModuleNotFoundError: soundfile is not installed.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        _, channels = self.find_header()
        self.format = SoundFormat(dataset.get_metadata(0)[1], channels)  # torchaudio refuses other rates, too

    def __len__(self) -> int:
        return len(self._dataset)

    def open(self, row: int) -> str:
        return self.name(row)

    def name(self, row: int) -> str:
        return str(Path(self._dataset._archive) / self._dataset.get_metadata(row)[0])  # noqa: SLF001 - no public name

    def read_parts(self, row: int) -> Any:
        return self._dataset.get_metadata(row)[1:]

    def make_sample(self, waveform: Any, parts: Any) -> Any:
        return waveform, *parts

    def __repr__(self) -> str:
        return f"{type(self._dataset).__name__} of {len(self):,} sounds, {self.format.sample_rate} Hz"


class SoundColumn(_Sounds):
    """The rows of a ``datasets.Dataset``, with the waveform in the place of its column ``Audio(decode=False)``.

    Args:
        dataset: The dataset, without a format.
        audio: The name of the column.

    Raises:
        OSError: None of the first sounds can be read.
        ModuleNotFoundError: soundfile is not installed.
    """

    def __init__(self, dataset: Any, audio: str) -> None:
        self._names: list[str] = dataset.column_names
        self._audio, feature = audio, dataset.features[audio]
        self._sounds = dataset.select_columns([audio])
        self._others = dataset.select_columns([name for name in self._names if name != audio])
        rate, channels = self.find_header()
        is_mono = getattr(feature, "num_channels", None) == 1  # datasets has it since 4.4
        advice = "; cast the column to Audio(num_channels=1)", "; cast the column to Audio(sampling_rate=)"
        self.format = SoundFormat(
            feature.sampling_rate or rate,
            1 if is_mono else channels,
            feature.sampling_rate is not None,
            is_mono,
            advice,
        )

    def __len__(self) -> int:
        return len(self._sounds)

    def open(self, row: int) -> str | IO[bytes]:
        value: dict[str, Any] = self._sounds[row][self._audio] or {}
        content, path = value.get("bytes"), value.get("path")
        if content is not None:
            return io.BytesIO(content)
        if not path:
            raise AudioError("the row has no sound: neither bytes nor a path")
        return str(path)

    def read_parts(self, row: int) -> Any:
        return self._others[row] if self._others.column_names else {}

    def make_sample(self, waveform: Any, parts: Any) -> Any:
        values = {**parts, self._audio: waveform}
        return {name: values[name] for name in self._names}

    def name(self, row: int) -> str:
        return f"[{self._audio!r}]"

    def __repr__(self) -> str:
        return f"datasets.Dataset of {len(self):,} rows, column {self._audio!r}, {self.format.sample_rate} Hz"
