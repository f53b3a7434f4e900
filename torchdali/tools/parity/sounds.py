"""Sounds in the certificate: how far torchdali's waveforms and spectrograms are from torchaudio's."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Dataset

from torchdali import DALILoader
from torchdali.pipeline.compile import compile_plan
from torchdali.sources import InputKind, Source, Spec
from torchdali.tools.parity.case import GroupCase, GroupDifferences
from torchdali.tools.parity.compare import describe_mismatch, subtract
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules.spectrograms import Masking
from torchdali.transforms.spec import IntArray

__all__ = ["SOUNDS", "measure_sounds"]

_RATE = 16_000
_SEED = 7
_BATCH = 3
_LENGTHS = (9000, 16_000, 4801, 12_345, 700)


class Part(NamedTuple):
    """A transform of torchaudio, which may be missing.

    Attributes:
        name: Name of its class.
        options: Its arguments.
    """

    name: str
    options: dict[str, Any]

    def __repr__(self) -> str:
        options = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in self.options.items())
        return f"{self.name}({', '.join(options)})"


def _part(name: str, **options: Any) -> Part:
    return Part(name, options)


_FUSED = ((2e-7,), "a GPU rounds a product and a difference at once")
_FFT = ((1e-6,), "Fourier transforms of float32, summed in another order")
_MEL = ((2e-5,), "filters of float32, computed by other formulas")
_LOUD = ((2e-7,), "logarithms of float32")
_QUIET = (
    (6e-5,),
    "Fourier transforms of what is 80 decibels below the loudest: torchaudio's differ as much from float64's",
)
_LESS_QUIET = ((3e-5,), "Fourier transforms of what is 60 decibels below the loudest")

SOUNDS: dict[str, GroupCase] = {
    "sounds Vol": GroupCase((_part("Vol", gain=1.7),)),
    "sounds Vol in decibels": GroupCase((_part("Vol", gain=-7.0, gain_type="db"),)),
    "sounds Vol of power": GroupCase((_part("Vol", gain=0.5, gain_type="power"),)),
    "sounds Fade": GroupCase((_part("Fade", fade_in_len=300, fade_out_len=500, fade_shape="half_sine"),)),
    "sounds Preemphasis": GroupCase((_part("Preemphasis", coeff=0.9),), *_FUSED),
    "sounds Spectrogram": GroupCase((_part("Spectrogram"),), *_FFT),
    "sounds Spectrogram, magnitude": GroupCase(
        (
            _part(
                "Spectrogram",
                n_fft=401,
                win_length=300,
                hop_length=100,
                power=1.0,
                center=False,
                normalized="frame_length",
                window_fn=torch.hamming_window,
            ),
        ),
        *_FFT,
    ),
    "sounds Spectrogram, constant": GroupCase(
        (_part("Spectrogram", n_fft=512, win_length=400, hop_length=160, normalized=True, pad_mode="constant"),),
        *_FFT,
    ),
    "sounds MelScale": GroupCase((_part("Spectrogram"), _part("MelScale", n_mels=40, sample_rate=11_025)), *_MEL),
    "sounds MelSpectrogram": GroupCase((_part("MelSpectrogram", n_mels=64),), *_MEL),
    "sounds MelSpectrogram, slaney": GroupCase(
        (_part("MelSpectrogram", n_fft=512, f_min=50.0, f_max=7600.0, norm="slaney", mel_scale="slaney"),), *_MEL
    ),
    "sounds AmplitudeToDB": GroupCase((_part("AmplitudeToDB", stype="magnitude"),), *_LOUD),
    "sounds AmplitudeToDB of a sound": GroupCase((_part("AmplitudeToDB", top_db=80.0),), *_LOUD),
    "sounds AmplitudeToDB, 60 decibels": GroupCase(
        (_part("Spectrogram"), _part("AmplitudeToDB", top_db=60.0)), *_LESS_QUIET
    ),
    "sounds AmplitudeToDB, top_db": GroupCase((_part("Spectrogram"), _part("AmplitudeToDB", top_db=80.0)), *_QUIET),
    "sounds MFCC": GroupCase((_part("MFCC", n_mfcc=20, melkwargs={"n_mels": 40, "hop_length": 160}),), *_MEL),
    "sounds FrequencyMasking": GroupCase((_part("Spectrogram"), _part("FrequencyMasking", freq_mask_param=80)), *_FFT),
    "sounds TimeMasking": GroupCase((_part("Spectrogram"), _part("TimeMasking", time_mask_param=60, p=0.4)), *_FFT),
    "sounds of a training": GroupCase(
        (
            _part("Vol", gain=0.8),
            _part("Fade", fade_in_len=100, fade_out_len=100),
            _part("Preemphasis"),
            _part("MelSpectrogram", win_length=400, hop_length=160, n_mels=40),
            _part("AmplitudeToDB", top_db=80.0),
            _part("FrequencyMasking", freq_mask_param=20),
            _part("TimeMasking", time_mask_param=30),
            _part("TimeMasking", time_mask_param=30),
        ),
        *_QUIET,
    ),
}
"""Cases of the certificate. Each rule of torchaudio's transforms is in one of them."""


class _Sounds(Dataset[Any]):
    """Sounds that are made up: a rising tone that is quiet at first, another one that starts late, and noise.

    Args:
        channels: The number of channels.
        transform: Called with each waveform ``(channels, time)``.
    """

    def __init__(self, channels: int = 1, transform: Any = None) -> None:
        self.channels, self.transform = channels, transform

    def __len__(self) -> int:
        return len(_LENGTHS)

    def make(self, index: int) -> npt.NDArray[np.float32]:
        """Return ``(channels, time)`` a sound."""
        rng, count = np.random.default_rng(index), _LENGTHS[index]
        time = np.arange(count) / _RATE
        pitch = 200 + 300 * np.arange(self.channels)[:, None] + 100 * index
        tone = 0.4 * np.sin(2 * np.pi * (pitch + 900 * time) * time) * np.minimum(1, 1e-4 + time / 0.2)
        late = 0.2 * np.sin(2 * np.pi * 3000 * time) * (time > count / _RATE / 2)
        return (tone + late + 0.02 * rng.standard_normal((self.channels, count))).astype(np.float32)

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.from_numpy(self.make(index)))

    def torchdali_source(self) -> Source:
        return _SoundSource(self)


class _SoundSource(Source):
    kind = InputKind.PIXELS

    def __init__(self, dataset: _Sounds) -> None:
        self.dataset, self.transform = dataset, dataset.transform
        self.spec = Spec("waveform", torch.float32, dataset.channels, unit=False)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: IntArray) -> list[Any]:
        return [np.ascontiguousarray(np.moveaxis(self.dataset.make(row), 0, 1)[None]) for row in rows.tolist()]

    def target(self, row: int) -> int:
        return row

    def name(self, row: int) -> str:
        return f"sound {row}"

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        del row, target
        return image


def measure_sounds(case: GroupCase, _: object, device: str | torch.device, channels: int = 1) -> GroupDifferences:
    """Measure how far made-up sounds are from torchaudio's, after a chain with the same random numbers.

    Args:
        case: The chain.
        device: Where the loader transforms.
        channels: The number of channels of the sounds.

    Raises:
        ModuleNotFoundError: torchaudio is not installed.
        ValueError: A part of the chain runs in torch.
    """
    names = import_module("torchaudio.transforms")
    chain: list[Any] = [getattr(names, part.name)(**part.options) for part in case.chain]
    dataset = _Sounds(channels, nn.Sequential(*chain))
    source = dataset.torchdali_source()
    plan = compile_plan(chain, torch.device("cpu"), "exact", source.spec, InputKind.PIXELS)
    if plan.needs_torch:
        raise ValueError(f"a part of the chain runs in torch:\n{plan}")
    with DALILoader[Any](dataset, _BATCH, seed=_SEED, device=device, collate_fn=list) as loader:
        ours: list[torch.Tensor] = [sample.cpu() for batch in loader for sample in batch]
    largest = 0.0
    for index, actual in enumerate(ours):
        waveform = torch.from_numpy(dataset.make(index))
        draws = Draws(epoch_key(_SEED, 0), np.array([index]), np.zeros(1, np.int64))
        expected = _replay(plan.rules, draws, waveform)
        if mismatch := describe_mismatch(actual, expected):
            return GroupDifferences(error=mismatch)
        largest = max(largest, float(subtract(actual, expected).max() / expected.abs().max()))
    return GroupDifferences({"largest": largest})


def _replay(rules: Sequence[Any], draws: Draws, sound: torch.Tensor) -> torch.Tensor:
    """Return what torchaudio's transforms make of a waveform with the numbers that rules draw for it."""
    size = np.array([[1, sound.shape[-1]]], np.int64)
    for rule in rules:
        params = rule.draw(draws.select_position(rule.position), size)
        size = rule.output_size(size, params)
        if isinstance(rule, Masking):
            numbers = torch.from_numpy(params["uniform"][0])[:, None]
            with mock.patch.object(torch, "rand", side_effect=list(numbers)):
                sound = rule.transform(sound)
        else:
            sound = rule.transform(sound)
    return sound
