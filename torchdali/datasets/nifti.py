"""Regions of NIfTI files."""

from __future__ import annotations

import zlib
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NIFTI_SUFFIXES", "NiftiVolume"]

NIFTI_SUFFIXES = (".nii", ".nii.gz")


class NiftiVolume:
    """A NIfTI file, of which regions are read as of an array ``(C, D, H, W)``.

    The file's first three axes are depth, height and width, in this order, and a fourth one has the channels. Values
    are those that nibabel returns: scaled as the header says, then as float32.

    Args:
        path: The file. Of one that is not compressed only the region is read.

    Attributes:
        shape: See above.

    Raises:
        ModuleNotFoundError: nibabel is not installed.
        ValueError: It is no NIfTI file of three or four axes.
        OSError: It cannot be read.
    """

    def __init__(self, path: str) -> None:
        nibabel = _require_nibabel()
        try:
            image = nibabel.load(path)
        except nibabel.filebasedimages.ImageFileError as error:
            raise ValueError(f"{path} must be a NIfTI file: {error}") from error
        self._path, self._data = path, image.dataobj
        shape: tuple[int, ...] = tuple(self._data.shape)
        if len(shape) not in (3, 4):
            raise ValueError(f"{path} must have three axes, or four with the channels last, got {shape}")
        self._is_scaled = (self._data.slope, self._data.inter) != (1, 0)
        self.shape = (*shape[3:], *shape[:3]) if len(shape) == 4 else (1, *shape)

    def __getitem__(self, region: tuple[slice, ...]) -> npt.NDArray[Any]:
        """Return a region, ``(C, D, H, W)``."""
        channels, *window = region
        try:
            values = np.asanyarray(self._data[tuple(window)])
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise OSError(f"{self._path} cannot be read: {error}") from error
        values = np.moveaxis(values, 3, 0)[channels] if values.ndim == 4 else values[None]
        return values.astype(np.float32) if self._is_scaled else values


def _require_nibabel() -> Any:
    try:
        return import_module("nibabel")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "NIfTI files need nibabel: pip install 'torchdali[medical]', or pip install nibabel", name="nibabel"
        ) from error
