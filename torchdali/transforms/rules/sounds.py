"""Rules of torchaudio's transforms of waveforms. torchaudio need not be installed.

A sound (C, T) is an image of height 1 in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Rule, SampleTransformError, Unsupported, find_faulty_row
from torchdali.transforms.rules._host import call_torch
from torchdali.transforms.spec import IntArray, Kind, Params, Sample, Spec

__all__ = ["NAMES", "SoundRule", "TorchaudioRule", "apply_by_channel"]

NAMES = "torchaudio.transforms._transforms."


class SoundRule(Rule):
    """Base of the rules of torchaudio's transforms. Without random numbers, a batch is treated as each sound is.

    Attributes:
        kinds: Kinds of images that it takes: waveforms, spectrograms, or both.
    """

    takes_sounds = True
    kinds: ClassVar[tuple[Kind, ...]] = ("waveform",)
    channels: int

    def infer(self, spec: Spec) -> Spec:
        if not self._takes(spec):
            names = {"waveform": "waveforms", "tensor": "spectrograms"}
            raise Unsupported(f"it takes {' and '.join(names[kind] for kind in self.kinds)} of float32, not {spec}")
        self.channels, self.kind = spec.channels, spec.kind
        self.check()
        return self.convert(spec)

    def _takes(self, spec: Spec) -> bool:
        return spec.kind in self.kinds and spec.dtype == torch.float32

    def check(self) -> None:
        """Raise Unsupported if DALI cannot do it with these arguments."""

    def convert(self, spec: Spec) -> Spec:
        """Return what comes out when ``spec`` goes in."""
        return spec

    def infer_batch(self, spec: Spec) -> Spec | None:
        return self.convert(spec) if self._takes(spec) and not self.randomness else None

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        if self.kind != "waveform":
            return self.transform(image)
        result: torch.Tensor = self.transform(image.squeeze(-2))
        return result.unsqueeze(-2) if result.ndim == 2 else result


def apply_by_channel(ops: Ops, sound: Node, channels: int, body: Callable[[Node], Node]) -> Node:
    """Apply operators to each channel of a sound (1, T, C).

    Args:
        ops: The operators.
        sound: The sound.
        channels: Number of its channels.
        body: Makes an image (H, W) of a signal (T,).

    Returns:
        The images, (H, W, C).
    """
    if channels == 1:
        image = ops.fn.expand_dims(body(ops.fn.reshape(sound, shape=[-1], layout="")), axes=2)
    else:
        image = ops.fn.stack(*(body(sound[0, :, channel]) for channel in range(channels)), axis=2)
    return ops.fn.reshape(image, layout="HWC")


class TorchaudioRule(SoundRule):
    """Base of rules that call torchaudio itself on a CPU, where it is faster than DALI. On a GPU DALI does it.

    Attributes:
        operator: What does it on a GPU.
    """

    operator: str

    def infer(self, spec: Spec) -> Spec:
        out = super().infer(spec)
        self.is_on_host = spec.device == "cpu"
        self.operators = f"{type(self.transform).__name__} by torchaudio" if self.is_on_host else self.operator
        return out

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return call_torch(ops, self.reference, image, params) if self.is_on_host else self.lower_to_dali(ops, image)

    def lower_to_dali(self, ops: Ops, image: Node) -> Node:
        """Emit the operators for a GPU."""
        raise NotImplementedError


class Vol(SoundRule):
    """Rule of Vol: a sound is multiplied by a number, and clamped to [-1, 1]."""

    handles = (f"{NAMES}Vol",)
    operators = "arithmetic"
    unsupported_when = "a gain of power that is 0, which torchaudio refuses"

    def check(self) -> None:
        gain, unit = float(self.transform.gain), self.transform.gain_type
        if unit == "power" and gain <= 0:
            raise Unsupported("torchaudio refuses a gain of power that is 0")
        decibels = 10 * math.log10(gain) if unit == "power" else gain
        self.factor = gain if unit == "amplitude" else 10 ** (decibels / 20)

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return ops.math.clamp(image * self.factor, -1.0, 1.0)


class Preemphasis(SoundRule):
    """Rule of Preemphasis: a part of the sample before it is subtracted from each sample."""

    handles = (f"{NAMES}Preemphasis",)
    operators = "preemphasis_filter"

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        def emphasize(signal: Node) -> Node:
            coefficient = float(self.transform.coeff)
            signal = ops.fn.preemphasis_filter(signal, preemph_coeff=coefficient, border="zero")
            return ops.fn.expand_dims(signal, axes=0)

        return apply_by_channel(ops, image, self.channels, emphasize)


class Fade(SoundRule):
    """Rule of Fade: the ends of a sound are multiplied by curves that torchaudio computes."""

    handles = (f"{NAMES}Fade",)
    operators = "slice, arithmetic"
    feeds: ClassVar = {name: Input(np.int32, 1) for name in ("shape", "start", "stop")}

    def check(self) -> None:
        self.fade_in, self.fade_out = int(self.transform.fade_in_len), int(self.transform.fade_out_len)
        curves: torch.Tensor = self.transform(torch.ones(self.fade_in + self.fade_out))
        # An operand must have an element.
        self.curves = np.concatenate((curves.numpy(), np.ones(1, np.float32)))

    def draw(self, draws: Draws, size: IntArray) -> Params:
        length = size[:, 1:]
        longest = max(self.fade_in, self.fade_out)
        if (row := find_faulty_row(length < longest)) is not None:
            raise SampleTransformError(row, f"a sound of {length[row, 0]} samples is shorter than the fade, {longest}")
        return {"shape": length, "start": np.zeros_like(length), "stop": self.fade_out - length}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        rise, fall = self.curves[: self.fade_in], self.curves[self.fade_in : -1]
        begin = self._extend(ops, rise, params["start"], params["shape"])
        end = self._extend(ops, fall, params["stop"], params["shape"])
        return ops.fn.reshape(ops.fn.reshape(begin * end, shape=[1, -1, 1]) * image, layout="HWC")

    @staticmethod
    def _extend(ops: Ops, curve: np.ndarray, start: Node, shape: Node) -> Node:
        """Return a curve, extended by ones: ``shape`` numbers from ``start`` on, which may be negative."""
        constant = ops.types.Constant(curve if len(curve) else np.ones(1, np.float32), device=ops.device)
        return ops.fn.slice(constant, start=start, shape=shape, axes=[0], out_of_bounds_policy="pad", fill_values=[1.0])


class Resample(SoundRule):
    """Rule of Resample: torch resamples whole batches."""

    handles = (f"{NAMES}Resample",)
    unsupported_when = "always, if the rate changes: DALI's resampling has no low-pass filter"

    def check(self) -> None:
        if self.transform.orig_freq > self.transform.new_freq:
            raise Unsupported("DALI's resampling has no low-pass filter: a high tone comes out as another one")
        if self.transform.orig_freq < self.transform.new_freq:
            raise Unsupported("DALI's resampling differs from torchaudio's by up to 0.5 %")


class Vad(SoundRule):
    """Rule of Vad: torch runs it on each sound."""

    handles = (f"{NAMES}Vad",)
    unsupported_when = "always: DALI's nonsilent_region is another algorithm"

    def check(self) -> None:
        raise Unsupported("DALI's nonsilent_region finds the end of silence by another algorithm")

    def infer_batch(self, spec: Spec) -> Spec | None:
        return None  # the longest silence of all sounds would be cut
