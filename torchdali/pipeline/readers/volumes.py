"""Patches of volumes, which threads read before their batch's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from torchdali.datasets.lifted_volumes import VolumeSource
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.readers.base import Reader
from torchdali.pipeline.readers.decoded import DecodedBatch, DecodingReader
from torchdali.transforms.rng import Draws
from torchdali.transforms.rules.volumes import LoadLabels
from torchdali.transforms.spec import IntArray

__all__ = ["VolumeReader"]

_PLACE = LoadLabels.position - 1
"""The position of the random numbers for the places of patches. No chain of transforms is that long."""


class VolumeReader(DecodingReader):
    """Reads a source of patches.

    Args:
        source: A :class:`VolumeSource`, or several combined.
    """

    def describe_decoding(self, plan: Plan) -> str:
        return "patches are cut from the files in threads of this process"

    def bind_draws(self, draws: Draws, plan: Plan) -> Reader:
        return _VolumeBatch(self, draws.select_position(_PLACE).uniform(3).tolist())

    def cut(self, row: int, uniform: Sequence[float]) -> list[npt.NDArray[Any]]:
        """Return a patch ``(D, H, W, C)``, and its labels if there are any.

        Raises:
            SampleError: It cannot be read.
        """
        source, place = self.source.locate(row)
        volumes = cast("VolumeSource", source)
        if row in self._replaced:
            specs = filter(None, (volumes.spec, volumes.label_spec))
            return [np.zeros((*self._sides(row), spec.channels), spec.dtype_name) for spec in specs]
        with self.blame(row, "read"):
            return volumes.cut(place, uniform)

    def _sides(self, row: int) -> tuple[int, int, int]:
        sides = cast("VolumeSource", self.source.locate(row)[0]).dataset.patch
        assert sides is not None
        return sides

    def read_size(self, row: int) -> tuple[int, int] | None:
        return self._sides(row)[1:]  # all patches have one size, so only that there is one matters


class _VolumeBatch(DecodedBatch):
    """The patches of one batch.

    Args:
        owner: The reader of the whole source.
        numbers: Three random numbers for the place of each patch.
    """

    def __init__(self, owner: VolumeReader, numbers: Sequence[Sequence[float]]) -> None:
        super().__init__(owner.source, lambda row, place: owner.cut(row, numbers[place]))

    def sizes(self, rows: IntArray) -> IntArray:
        return np.array([patch.shape[:3] for patch, *_ in self.take(rows)], np.int64).reshape(-1, 3)

    def read_inputs(self, rows: IntArray, pixels: Mapping[int, Any], resources: ExitStack) -> Any:
        """Return an array for each patch."""
        return [patch for patch, *_ in self.take(rows)]

    def add_params(self, draws: Draws) -> Draws:
        """Return the same, with the labels of the patches."""
        labels = [part for _, *others in self._decoded.values() for part in others]
        if not labels:
            return draws
        draws = draws.keep_params().select_position(LoadLabels.position)
        places = [self._decoded[place][1] for place in range(len(draws))]
        draws.store({"labels": np.stack(places)})
        return draws.select_position(0)
