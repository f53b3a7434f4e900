"""Rules of torchaudio's spectrograms, and of its transforms of these. torchaudio need not be installed."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import (
    Chain,
    Input,
    Node,
    Nodes,
    Ops,
    Rule,
    SampleTransformError,
    Unsupported,
    find_faulty_row,
)
from torchdali.transforms.rules.sounds import NAMES, TorchaudioRule, apply_by_channel
from torchdali.transforms.spec import IntArray, Params, Sample, Spec

_CHANNELS_FIRST = [2, 0, 1]
_CHANNELS_LAST = [1, 2, 0]
_LEAST_FFT = 8
"""DALI refuses shorter transforms. No sound needs them."""


class Spectrogram(TorchaudioRule):
    """Rule of Spectrogram: the power or magnitude of the Fourier transforms of windows."""

    handles = (f"{NAMES}Spectrogram",)
    operator = "spectrogram"
    unsupported_when = (
        "a power that is neither 1 nor 2; `pad`; two sides; with `center` an odd `n_fft` or other borders"
    )

    def check(self) -> None:
        power, count, mode = self.transform.power, self.transform.n_fft, self.transform.pad_mode
        if power not in (1, 2):
            raise Unsupported(f"power={power}: DALI's spectrograms have power 1 or 2")
        if self.transform.pad:
            raise Unsupported(f"pad={self.transform.pad}")
        if not self.transform.onesided:
            raise Unsupported("DALI's spectrograms have one side")
        if count < _LEAST_FFT:
            raise Unsupported(f"n_fft={count} is below {_LEAST_FFT}")
        if self.transform.center and count % 2:
            raise Unsupported(f"DALI's windows of odd length, n_fft={count}, have another centre")
        if self.transform.center and mode not in ("reflect", "constant"):
            raise Unsupported(f"pad_mode={mode!r}")
        self.reflects = bool(self.transform.center) and mode == "reflect"
        self.window = self._scale_window()

    def _scale_window(self) -> list[float]:
        """Return the window, padded to the length of the transform as torch does, with the norm in it."""
        window: torch.Tensor = self.transform.window.double().cpu()
        count, normalized = self.transform.n_fft, self.transform.normalized
        if normalized == "frame_length":
            window = window / math.sqrt(count)
        elif normalized:
            window = window / window.square().sum().sqrt()
        left = (count - len(window)) // 2
        padded = torch.nn.functional.pad(window, (left, count - len(window) - left))
        return [float(x) for x in padded]

    def convert(self, spec: Spec) -> Spec:
        return replace(spec, kind="tensor", size=None, unit=False)

    def infer_batch(self, spec: Spec) -> Spec | None:
        return None if self.transform.power is None else super().infer_batch(spec)  # complex numbers

    def draw(self, draws: Draws, size: IntArray) -> Params:
        count = self.transform.n_fft
        least = count // 2 + 1 if self.reflects else 1 if self.transform.center else count
        if (row := find_faulty_row(size[:, 1] < least)) is not None:
            raise SampleTransformError(
                row, f"a sound of {size[row, 1]} samples is too short for n_fft={count}, which needs {least}"
            )
        return {}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        count, hop = self.transform.n_fft, self.transform.hop_length
        length = size[:, 1] if self.transform.center else size[:, 1] - count
        return np.stack((np.full(len(size), count // 2 + 1), length // hop + 1), axis=1)

    def lower_to_dali(self, ops: Ops, image: Node) -> Node:
        options = {
            "nfft": self.transform.n_fft,
            "window_length": self.transform.n_fft,
            "window_step": self.transform.hop_length,
            "window_fn": self.window,
            "power": int(self.transform.power),
            "center_windows": bool(self.transform.center),
            "reflect_padding": self.reflects,
        }
        return apply_by_channel(
            ops, image, self.channels, lambda signal: ops.fn.reshape(ops.fn.spectrogram(signal, **options), layout="")
        )


class MelScale(TorchaudioRule):
    """Rule of MelScale: frequencies are summed in triangles that are equally wide on the mel scale."""

    handles = (f"{NAMES}MelScale",)
    kinds = ("tensor",)
    operator = "mel_filter_bank"
    unsupported_when = "filters other than its arguments make"

    def check(self) -> None:
        mel = self.transform
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of empty filters: the user has it from the transform
            filters = import_module("torchaudio.functional").melscale_fbanks(
                mel.n_stft, mel.f_min, mel.f_max, mel.n_mels, mel.sample_rate, mel.norm, mel.mel_scale
            )
        if not torch.equal(filters, mel.fb.cpu()):
            raise Unsupported("its filters are not those that its arguments make")

    def convert(self, spec: Spec) -> Spec:
        return replace(spec, size=spec.size and (self.transform.n_mels, spec.size[1]))

    def draw(self, draws: Draws, size: IntArray) -> Params:
        count = self.transform.n_stft
        if (row := find_faulty_row(size[:, 0] != count)) is not None:
            raise SampleTransformError(row, f"n_stft={count}, and the spectrogram has {size[row, 0]} frequencies")
        return {}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return np.stack((np.full(len(size), self.transform.n_mels), size[:, 1]), axis=1)

    def lower_to_dali(self, ops: Ops, image: Node) -> Node:
        mel, fn = self.transform, ops.fn
        turn = fn.reshape if self.channels == 1 else fn.transpose
        name = "src_dims" if self.channels == 1 else "perm"
        made = fn.mel_filter_bank(
            fn.reshape(turn(image, **{name: _CHANNELS_FIRST}), layout=""),
            nfilter=mel.n_mels,
            sample_rate=float(2 * (mel.sample_rate // 2)),  # torchaudio's highest frequency is sample_rate // 2
            freq_low=float(mel.f_min),
            freq_high=float(mel.f_max),
            mel_formula=mel.mel_scale,
            normalize=mel.norm == "slaney",
        )
        return fn.reshape(turn(made, **{name: _CHANNELS_LAST}), layout="HWC")


class AmplitudeToDB(TorchaudioRule):
    """Rule of AmplitudeToDB: decibels, and none lower than ``top_db`` below the loudest of a sound."""

    handles = (f"{NAMES}AmplitudeToDB",)
    kinds = ("waveform", "tensor")
    unsupported_when = "a reference other than 1"

    def check(self) -> None:
        if self.transform.db_multiplier:
            raise Unsupported("its reference is not 1")
        self.operator = "to_decibels" if self.transform.top_db is None else "to_decibels, reductions.max, arithmetic"

    def infer_batch(self, spec: Spec) -> Spec | None:
        # torchaudio takes a batch of waveforms for the channels of one spectrogram.
        is_mixed = spec.kind == "waveform" and self.transform.top_db is not None
        return None if is_mixed else super().infer_batch(spec)

    def lower_to_dali(self, ops: Ops, image: Node) -> Node:
        multiplier, top = self.transform.multiplier, self.transform.top_db
        cutoff = multiplier * math.log10(self.transform.amin)
        decibels = ops.fn.to_decibels(image, multiplier=multiplier, reference=1.0, cutoff_db=cutoff)
        if top is None:
            return decibels
        return ops.fn.reshape(ops.math.max(decibels, ops.fn.reductions.max(decibels) - float(top)), layout="HWC")


class _Cosines(TorchaudioRule):
    """The last part of MFCC: the cosine transform of the decibels of each frame."""

    kinds = ("tensor",)
    operator = "mfcc"

    def check(self) -> None:
        mfcc = self.transform
        if mfcc.log_mels:
            raise Unsupported("log_mels=True")
        if mfcc.norm != "ortho":
            raise Unsupported(f"norm={mfcc.norm!r}: DALI's transform has another scale")
        count = mfcc.MelSpectrogram.n_mels
        matrix = import_module("torchaudio.functional").create_dct(mfcc.n_mfcc, count, mfcc.norm)
        if not torch.equal(matrix, mfcc.dct_mat.cpu()):
            raise Unsupported("its matrix is not the one that its arguments make")

    def convert(self, spec: Spec) -> Spec:
        return replace(spec, size=spec.size and (self.transform.n_mfcc, spec.size[1]))

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        return np.stack((np.full(len(size), self.transform.n_mfcc), size[:, 1]), axis=1)

    def lower_to_dali(self, ops: Ops, image: Node) -> Node:
        made = ops.fn.mfcc(image, n_mfcc=self.transform.n_mfcc, dct_type=2, normalize=True, axis=0)
        return ops.fn.reshape(made, layout="HWC")

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return torch.matmul(image.transpose(-1, -2), self.transform.dct_mat).transpose(-1, -2)


class _Stages(Chain):
    """Base of the rules of transforms that are a chain."""

    takes_sounds = True

    def infer_batch(self, spec: Spec) -> Spec | None:
        out: Spec | None = spec
        for part in self.parts:
            out = out and part.infer_batch(out)
        return None if self.missing else out


class MelSpectrogram(_Stages):
    """Rule of MelSpectrogram: Spectrogram, then MelScale."""

    handles = (f"{NAMES}MelSpectrogram",)
    unsupported_when = "where Spectrogram or MelScale does"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, [transform.spectrogram, transform.mel_scale])


class MFCC(_Stages):
    """Rule of MFCC: MelSpectrogram, then AmplitudeToDB, then a cosine transform."""

    handles = (f"{NAMES}MFCC",)
    unsupported_when = "where MelSpectrogram does; `log_mels`; another `norm`"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, [transform.MelSpectrogram, transform.amplitude_to_DB])
        self.parts = [*self.parts, _Cosines(transform)]


class Masking(Rule):
    """Rule of FrequencyMasking and TimeMasking: some neighbouring rows or columns become 0.

    torchaudio draws the length, uniform below ``mask_param``, and then the start. ``p`` bounds the length by that share
    of the spectrogram. It masks all channels alike.
    """

    handles = (f"{NAMES}FrequencyMasking", f"{NAMES}TimeMasking")
    takes_sounds = True
    operators = "erase"
    randomness = "length and start of the mask"
    unsupported_when = "`iid_masks` with several channels"
    names: ClassVar[tuple[str, ...]] = ("anchor", "shape")

    def infer(self, spec: Spec) -> Spec:
        if spec.kind != "tensor" or spec.dtype != torch.float32:
            raise Unsupported(f"it takes spectrograms of float32, not {spec}")
        if self.transform.iid_masks and spec.channels > 1:
            raise Unsupported("iid_masks=True masks each channel at another place")
        self.axis = int(self.transform.axis) - 1
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        return {name: Input(np.float32, 1) for name in self.names}  # integers, but erase takes floating point only

    def draw(self, draws: Draws, size: IntArray) -> Params:
        # The arithmetic of torchaudio, in float32.
        uniform = (draws.words(2) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
        count, share = size[:, self.axis], float(self.transform.p)
        most = np.full(len(size), int(self.transform.mask_param))
        if share != 1:
            most = np.minimum(most, (count * share).astype(np.int64))
        length = uniform[:, 0] * most.astype(np.float32)
        start = np.floor(uniform[:, 1] * (count.astype(np.float32) - length))
        return {"anchor": start[:, None], "shape": np.floor(length)[:, None], "uniform": uniform}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.fn.erase(image, anchor=params["anchor"], shape=params["shape"], axes=[self.axis], fill_value=0.0)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        image = image.clone()
        image.narrow(self.axis + 1, int(sample["anchor"][0]), int(sample["shape"][0])).zero_()
        return image
