"""Mask files of a batch: DALI decodes them in runs of their own, beside those of the images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchdali.pipeline.readers.base import Reader
from torchdali.sources.mask_files import decode_mask
from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets import Targets
from torchdali.transforms.targets.stored import EncodedMask

__all__ = ["MaskReader", "group_masks", "put_decoded"]


class MaskReader(Reader):
    """Gives the mask files of a batch, which are in memory.

    Args:
        masks: The files. They have one dtype.
    """

    def __init__(self, masks: Sequence[EncodedMask]) -> None:
        # Reader.__init__ needs a source, which masks have not.
        self.masks = masks

    def sizes(self, rows: IntArray) -> IntArray:
        return np.array([self.masks[row].canvas for row in rows.tolist()], np.int64).reshape(-1, 2)

    def read_inputs(
        self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack
    ) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of each file."""
        return [self.masks[row].data for row in rows.tolist()]


def group_masks(targets: Targets | None) -> list[MaskReader]:
    """Return readers of the mask files of a batch, one for each dtype."""
    masks = list(targets.find_encoded_masks().values()) if targets else []
    dtypes = dict.fromkeys(mask.dtype for mask in masks)
    return [MaskReader([mask for mask in masks if mask.dtype == dtype]) for dtype in dtypes]


def put_decoded(
    targets: Targets,
    decoded: Sequence[tuple[EncodedMask, torch.Tensor]],
    device: torch.device,
    blame: Callable[[int], AbstractContextManager[None]],
) -> None:
    """Give the targets of a batch their decoded masks. PIL decodes those that DALI did not.

    Args:
        targets: The targets.
        decoded: Mask files with their pixels on the device.
        device: The device of the images.
        blame: Function of a sample's number in the batch, which returns a context that blames the sample.
    """
    by_mask = {id(mask): pixels for mask, pixels in decoded}
    for place, mask in targets.find_encoded_masks().items():
        pixels = by_mask.get(id(mask))
        if pixels is None:
            with blame(place[0]):
                pixels = decode_mask(mask).to(device)
        targets.decoded[place] = pixels.reshape(mask.shape)
