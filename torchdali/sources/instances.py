"""Files whose values are the numbers of objects: the instances of Cityscapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import PIL.Image
import torch

from torchdali.transforms.targets.stored import InstanceMasks

__all__ = ["Instances", "read_instances"]

_open: Callable[..., Any] = PIL.Image.open
_MAX_ID, _MAX_COUNT = 2**16 - 1, 2**15 - 1


@dataclass(frozen=True)
class Instances:
    """The objects of an image. It is no tuple, as a target of several parts is.

    Attributes:
        masks: Their masks, in the order of their numbers.
        numbers: An image of one row, with their numbers.
    """

    masks: InstanceMasks
    numbers: Any


def read_instances(path: str | os.PathLike[str]) -> Any:
    """Return the :class:`Instances` of a file; if it has colours or other numbers than objects have, its image."""
    with _open(path) as image:
        values: Any = np.asarray(image)
    if values.ndim != 2 or values.dtype.kind not in "iu" or not 0 <= values.min() <= values.max() <= _MAX_ID:
        return _open(path)
    is_used = np.zeros(int(values.max()) + 1, bool)
    is_used[values] = True
    numbers = np.flatnonzero(is_used)
    if len(numbers) > _MAX_COUNT:
        return _open(path)
    places = np.zeros(len(is_used), np.uint8 if len(numbers) < 256 else np.int16)
    places[numbers] = np.arange(1, len(numbers) + 1)
    # torchvision compares the numbers, which raises for uint16 in torch up to 2.14 at least. Pillow before version 11
    # opened such files as int32.
    dtype = np.int32 if values.dtype == np.uint16 and not _has_comparison(torch.uint16) else values.dtype
    row = PIL.Image.fromarray(numbers[None].astype(dtype))
    return Instances(InstanceMasks(places[values][None], len(numbers)), row)


@cache
def _has_comparison(dtype: torch.dtype) -> bool:
    try:
        return bool(torch.ones((), dtype=dtype) >= 1)
    except NotImplementedError:
        return False
