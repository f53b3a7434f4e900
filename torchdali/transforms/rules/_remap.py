"""Take each pixel from any place of the image, on a GPU."""

from __future__ import annotations

import numpy as np

from torchdali.transforms.rule import Node, Nodes, Ops


def count_pixels(ops: Ops, params: Nodes, sides: Node) -> tuple[Node, Node]:
    """Return the numbers of the columns, ``(1, W)``, and of the rows, ``(H, 1)``, as float32.

    Args:
        ops: The operators.
        params: The nodes of :func:`_noise.make_ramp`.
        sides: Height and width of the image, on the CPU.
    """
    fn = ops.fn
    ramp = params["noise_ramp"].gpu() if ops.device == "gpu" else params["noise_ramp"]

    def count(axis: int) -> Node:
        part = fn.slice(ramp, start=[0], shape=sides[1 - axis], axes=[0])
        return fn.cast(fn.expand_dims(part, axes=[axis]), dtype=ops.types.FLOAT)

    return count(0), count(1)


def take_pixels(ops: Ops, image: Node, x: Node, y: Node, nearest: bool) -> tuple[Node, Node]:
    """Return the values at places of the image, HWC, and how much of each place is inside, ``(H, W, 1)`` in [0, 1].

    DALI's remap has no fill outside of the image. So the places are moved inside, and the weight is computed here.

    Args:
        ops: The operators.
        image: HWC float32 of 1 or 3 channels.
        x: ``(H, W)`` columns. A pixel's centre is its number.
        y: ``(H, W)`` rows.
        nearest: Whether to take the nearest pixel, and else to interpolate between four.
    """
    fn, math = ops.fn, ops.math
    sides = image.shape(dtype=ops.types.INT32)
    maps: list[Node] = []
    inside: Node = None
    for at, side in ((x, sides[1]), (y, sides[0])):
        last = fn.cast(side, dtype=ops.types.FLOAT) - np.float32(1)
        if nearest:
            at = math.floor(at + np.float32(0.5))
            weight = fn.cast((at >= np.float32(0)) & (at <= last), dtype=ops.types.FLOAT)
            at = math.max(math.min(at, last), np.float32(0))
        else:
            weight = math.clamp(math.min(at, last - at) + np.float32(1), 0.0, 1.0)
            at = math.max(math.min(at, last - np.float32(1e-3)), np.float32(0))
        maps.append(at)
        inside = weight if inside is None else inside * weight
    interp = ops.types.INTERP_NN if nearest else ops.types.INTERP_LINEAR
    values = fn.experimental.remap(image, *maps, interp=interp, pixel_origin="center")
    return values, fn.reinterpret(fn.expand_dims(inside, axes=[2]), layout="HWC")
