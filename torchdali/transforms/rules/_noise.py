"""Random numbers for every pixel, which the graph computes from two words for each sample.

A pixel's number depends only on these words and on the pixel's position. It is the same on CPU and GPU. Functions that
only do arithmetic take numpy arrays as well as DALI nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops
from torchdali.transforms.spec import IntArray, Params, Sample

INPUTS = {
    "noise_step": Input(np.uint32),
    "noise_start": Input(np.uint32),
    "noise_ramp": Input(np.uint32, 1),
}
"""Inputs of a rule that needs noise."""

_ROW = np.uint32(1 << 16)
_COLUMN = np.uint32(1 << 2)


def draw_noise(draws: Draws, size: IntArray) -> Params:
    """Draw the values of :data:`INPUTS` for images (or boxes) of at most ``size``."""
    both = draws.words(2).astype(np.uint32)
    return {"noise_step": both[:, 0] | np.uint32(1), "noise_start": both[:, 1], **make_ramp(size)}


def make_ramp(size: IntArray) -> Params:
    """Return the numbers by which graphs count the pixels of images of at most ``size``.

    DALI has no constants of the right batch size in conditional branches, so they are fed.
    """
    ramp = np.arange(max(int(size.max(initial=1)), 4), dtype=np.uint32)
    return {"noise_ramp": np.broadcast_to(ramp, (len(size), len(ramp)))}


def separate_frames(params: Params, frame: IntArray) -> Params:
    """Return the values of :data:`INPUTS` with which each frame of a video gets its own noise, and frame 0 the same.

    Args:
        params: What :func:`draw_noise` returned.
        frame: ``(N,)`` the number of each image in its video.
    """
    number = frame.astype(np.uint32)
    step, start = _mix_bits(number), _mix_bits(number * np.uint32(0x9E3779B9))
    return {
        **params,
        "noise_step": (params["noise_step"] ^ step) | np.uint32(1),
        "noise_start": params["noise_start"] ^ start,
    }


def _mix_bits(x: Any) -> Any:
    """Map uint32 one to one so that every bit depends on every bit: ``lowbias32`` of Chris Wellons, public domain.

    https://nullprogram.com/blog/2018/07/31/
    """
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def to_uniform(words: Any) -> Any:
    """Turn uniform words into numbers in [0, 1), multiples of 2**-24: float32 in the graph, float64 in numpy."""
    return (words >> np.uint32(8)) * np.float32(2.0**-24)


def random_words(ops: Ops, params: Nodes, height: Node | int, width: Node | int, channels: int) -> Node:
    """Return ``(height, width, channels)`` uniform uint32, on the device of the images.

    Values are numbered ``65536 * row + 4 * column + channel``. Each number is multiplied by the sample's odd step, the
    sample's start is added, and the result is mixed once.

    Args:
        ops: DALI's operators.
        params: The nodes of :data:`INPUTS`.
        height: One number for all samples, or a CPU node.
        width: One number for all samples, or a CPU node.
        channels: One number for all samples, at most 4.
    """
    step = params["noise_step"]
    ramp = params["noise_ramp"].gpu() if ops.device == "gpu" else params["noise_ramp"]

    def count_along(axis: int, length: Node | int, stride: Any) -> Node:
        part = ops.fn.slice(ramp, start=[0], shape=[length] if isinstance(length, int) else length, axes=[0])
        return ops.fn.expand_dims(part * (step * stride), axes=[i for i in range(3) if i != axis])

    column = count_along(1, width, _COLUMN) + count_along(2, channels, np.uint32(1))
    return _mix_bits(count_along(0, height, _ROW) + (column + params["noise_start"]))


def random_normal(ops: Ops, params: Nodes, height: Node, width: Node, channels: int) -> Node:
    """Return ``(height, width, channels)`` standard normal float32. The arguments are those of :func:`random_words`.

    The method is that of Box and Muller (https://en.wikipedia.org/wiki/Box-Muller_transform). The cosines fill the
    upper half of the image, and the sines of the same numbers the lower half.
    """
    upper = (height + 1) // 2
    first = random_words(ops, params, upper, width, channels)
    radius, angle = _polar_coordinates(ops.math, first, params["noise_step"])
    sines = ops.fn.slice(radius * ops.math.sin(angle), start=[0], shape=height - upper, axes=[0])
    return ops.fn.cat(radius * ops.math.cos(angle), sines, axis=0)


def _polar_coordinates(math: Any, first: Any, step: Any) -> tuple[Any, Any]:
    second = _mix_bits(first ^ step)
    radius = math.sqrt(math.log(np.float32(1) - to_uniform(first)) * np.float32(-2))
    return radius, to_uniform(second) * np.float32(2 * np.pi)


def reference_words(sample: Sample, height: int, width: int, channels: int) -> npt.NDArray[np.uint32]:
    """Compute :func:`random_words` for one sample, in numpy."""
    row, column, channel = np.ogrid[:height, :width, :channels]
    counter = row * int(_ROW) + column * int(_COLUMN) + channel
    place: npt.NDArray[np.uint32] = counter.astype(np.uint32) * sample["noise_step"] + sample["noise_start"]
    return _mix_bits(place)


def reference_normal(sample: Sample, height: int, width: int, channels: int) -> npt.NDArray[np.float32]:
    """Compute :func:`random_normal` for one sample, in numpy. Rounding may differ."""
    radius, angle = _polar_coordinates(
        np, reference_words(sample, (height + 1) // 2, width, channels), sample["noise_step"]
    )
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:height].astype(np.float32)
