"""What a first crop shows of the frames of clips: no more of them is kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchdali.pipeline.plan import Plan, input_name
from torchdali.transforms import SampleTransformError
from torchdali.transforms.rng import Draws
from torchdali.transforms.rules.crop import CenterCrop, RandomCrop, Window
from torchdali.transforms.spec import Inputs, IntArray

__all__ = ["bound_pixels", "find_boxes", "find_window", "move_window"]


def find_window(plan: Plan) -> Window | None:
    """Return the plan's first rule, if it takes a window of the images and nothing beside it."""
    rule = plan.rules[0] if plan.rules else None
    return rule if isinstance(rule, Window) and not rule.repeats_border and not rule.needs else None


def find_boxes(plan: Plan, draws: Draws, size: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return ``(N, 4)`` top, left, bottom and right of what to keep of the frames of clips, and which are whole.

    A frame is whole if its window leaves it, or if the first rule takes no window. The sides of boxes are even, or the
    frame's, because four pixels share their chroma.

    Args:
        plan: The plan.
        draws: The random numbers of N clips.
        size: ``(N, 2)`` heights and widths of their frames; 0 if they cannot be decoded.
    """
    whole = np.concatenate((np.zeros_like(size), size), axis=1)
    if (rule := find_window(plan)) is None:
        return whole, np.ones(len(size), np.bool_)
    try:
        params = rule.draw(draws.select_position(rule.position), np.maximum(size, 1))
    except SampleTransformError:  # it is raised in the batch's turn
        return whole, np.ones(len(size), np.bool_)
    start, stop = params["start"].astype(np.int64), (params["start"] + params["shape"]).astype(np.int64)
    leaves = np.any((start < 0) | (stop > size), axis=1)
    boxes = np.concatenate((start // 2 * 2, np.minimum((stop + 1) // 2 * 2, size)), axis=1)
    return np.where(leaves[:, None], whole, boxes), leaves


def move_window(plan: Plan, inputs: Inputs, origin: IntArray | None) -> Inputs:
    """Return a batch's parameters for images of which DALI gets a box only.

    Args:
        plan: The plan.
        inputs: The parameters for whole images.
        origin: ``(N, 2)`` top and left of each box; None if DALI gets whole images.
    """
    if origin is None or not origin.any():
        return inputs
    name = input_name(0, "start")
    moved = inputs[name] - np.repeat(origin, plan.num_images, axis=0)
    return {**inputs, name: moved.astype(inputs[name].dtype)}


def bound_pixels(plan: Plan, pixels: int) -> int:
    """Return how many are kept of ``pixels`` of a frame: all, unless the first rule is a crop of fixed size."""
    rule = find_window(plan)
    if isinstance(rule, CenterCrop) or (isinstance(rule, RandomCrop) and not rule.border.exists):
        height, width = rule.size
        return min(pixels, (height + 2) * (width + 2))
    return pixels
