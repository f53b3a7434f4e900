"""Patches of volumes, read without workers, if DALI runs all transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from torchdali.datasets.volumes import Volumes
from torchdali.errors import TransformError
from torchdali.sources import InputKind, Source, Spec
from torchdali.transforms import Unsupported, find_rule, flatten, infer
from torchdali.transforms.rules.volumes import VolumeRule
from torchdali.transforms.spec import IntArray

__all__ = ["VolumeSource", "lift_volumes"]

_LABELS = (torch.uint8, torch.int16, torch.int32, torch.float32)
"""Types that all of DALI's operators take."""


def lift_volumes(dataset: Volumes, transform: Any) -> Any:
    """Return a dataset that is read without workers; None if there is nothing to run, or the dataset has transforms.

    Raises:
        TransformError: DALI cannot run all transforms. Workers would leave them out, because volumes are no images.
    """
    if transform is None or dataset.transform is not None:
        return None
    try:
        parts = dataset.read(0)
    except (OSError, ValueError, ModuleNotFoundError):  # the first sample tells
        return None
    spec, *labels = (Spec("volume", part.dtype, len(part), unit=False) for part in parts)
    if reason := _find_obstacle(dataset, flatten(transform), spec, labels):
        raise TransformError(
            f"DALI cannot run transform= on these volumes: {reason}; give the transforms to the dataset, as "
            "Volumes(transform=...)"
        )
    return _Patches(dataset, spec, labels[0] if labels else None)


def _find_obstacle(dataset: Volumes, chain: Sequence[Any], spec: Spec, labels: Sequence[Spec]) -> str:
    """Return why DALI cannot run a chain, or an empty string."""
    if dataset.patch is None:
        return "patch=None, so that they differ in size"
    for label in labels:
        if label.dtype not in _LABELS:
            return f"labels must be uint8, int16, int32 or float32, got {label.dtype_name}"
    for leaf in chain:
        rule = find_rule(leaf)
        if not isinstance(rule, VolumeRule):
            return f"{type(leaf).__name__} is none of torchdali's six transforms of volumes"
        try:
            spec = infer(rule, spec)
        except Unsupported as unsupported:
            return f"{type(leaf).__name__}: {unsupported}"
    return ""


class _Patches(Dataset[Any]):
    """The patches of a dataset, as a source has them."""

    def __init__(self, volumes: Volumes, spec: Spec, label_spec: Spec | None) -> None:
        self.volumes, self.spec, self.label_spec = volumes, spec, label_spec

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: int) -> Any:
        return self.volumes[index]

    def torchdali_source(self) -> Source:
        return VolumeSource(self.volumes, self.spec, self.label_spec)


class VolumeSource(Source):
    """The patches of :class:`Volumes`. The pipeline calls :meth:`cut` in threads of its own.

    Args:
        dataset: The patches.
        spec: Their type.
        label_spec: The type of their labels; None if they have none.
    """

    kind = InputKind.PIXELS
    is_pair = False

    def __init__(self, dataset: Volumes, spec: Spec, label_spec: Spec | None) -> None:
        self.dataset, self.spec, self.label_spec = dataset, spec, label_spec

    def __len__(self) -> int:
        return len(self.dataset)

    def cut(self, row: int, uniform: Sequence[float]) -> list[npt.NDArray[Any]]:
        """Return a patch, ``(D, H, W, C)``, and its labels if there are any.

        Args:
            row: The sample.
            uniform: Numbers in [0, 1) that tell its place, if the dataset has no seed.

        Raises:
            ValueError: It is of another type than the first one.
            OSError: It cannot be read.
        """
        parts = self.dataset.read(row, uniform)
        for part, spec in zip(parts, filter(None, (self.spec, self.label_spec)), strict=True):
            if (part.dtype, len(part)) != (spec.dtype, spec.channels):
                raise ValueError(f"it is {part.dtype} of {len(part)} channels, and the first one is {spec}")
        return [np.ascontiguousarray(np.moveaxis(part.numpy(), 0, 3)) for part in parts]

    def read(self, rows: IntArray) -> list[Any]:
        """Return patches, ``(D, H, W, C)``. If the dataset has no seed, they begin at the first voxel."""
        return [self.cut(row, (0.0, 0.0, 0.0))[0] for row in rows.tolist()]

    def target(self, row: int) -> None:
        return None

    def name(self, row: int) -> str:
        return self.dataset.name(row)

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        if not isinstance(image, tuple):
            return image
        volume, labels = cast("tuple[torch.Tensor, torch.Tensor]", image)
        return volume, tv_tensors.Mask(labels)

    def describe(self) -> str:
        files = len(self.dataset.files)
        return f"{len(self):,} patches {self.dataset.patch} of {files:,} {'volume' if files == 1 else 'volumes'}"
