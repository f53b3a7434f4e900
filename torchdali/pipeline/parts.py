"""Split a batch into several runs of DALI, so that large images do not take memory times the batch size.

DALI keeps all decoded images of a run at once, and reads all files of a run into memory. A run waits until the run
before it has used them. So memory follows the largest run, however many runs are scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchdali.pipeline.dlpack import Images
from torchdali.pipeline.engine import RunOutputs
from torchdali.transforms.spec import IntArray

__all__ = ["count_decoded_bytes", "join_outputs", "split"]


def count_decoded_bytes(size: IntArray) -> IntArray:
    """Return ``(N,)`` bytes of decoded RGB images of ``(N, 2)`` heights and widths."""
    return 3 * size[:, 0] * size[:, 1]


def split(image_bytes: IntArray, limit: int) -> list[slice]:
    """Return consecutive parts of a batch. Each takes at most ``limit`` bytes, or is a single image.

    Args:
        image_bytes: ``(N,)`` bytes of each image.
        limit: Maximum number of bytes.
    """
    if image_bytes.sum() <= limit:
        return [slice(0, len(image_bytes))]
    parts: list[slice] = []
    start, total = 0, 0
    for position, count in enumerate(image_bytes.tolist()):
        if position > start and total + count > limit:
            parts.append(slice(start, position))
            start, total = position, 0
        total += count
    return [*parts, slice(start, len(image_bytes))]


def join_outputs(parts: Sequence[RunOutputs]) -> RunOutputs:
    """Return the outputs of several runs as one run of the whole batch would have returned them."""
    if len(parts) == 1:
        return parts[0]
    views = [_join_images(view) for view in zip(*(part.views for part in parts), strict=True)]
    endings, lengths = (np.concatenate(arrays) for arrays in zip(*(part[1:] for part in parts), strict=True))
    return RunOutputs(views, endings, lengths)


def _join_images(parts: Sequence[Images]) -> Images:
    """Return one tensor if all shapes are equal, and else a list of tensors."""
    if all(isinstance(part, torch.Tensor) for part in parts) and len({part[0].shape for part in parts}) == 1:
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    return [image for part in parts for image in part]
