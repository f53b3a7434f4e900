"""Patches of three-dimensional arrays in ``.npy`` and NIfTI files, such as CT and MR volumes."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from torchdali.datasets.base import find_row
from torchdali.datasets.nifti import NIFTI_SUFFIXES, NiftiVolume
from torchdali.transforms.rng import Draws, epoch_key

__all__ = ["Volumes"]

_OPEN = 64
"""Number of files that stay mapped. Each takes address space and no memory of its own."""

_Place = tuple[int, int, int]


class Volumes(Dataset[Any]):
    """Patches of volumes in ``.npy`` and NIfTI files. ``DataLoader`` and ``DALILoader`` take it.

    ``.npy`` files are mapped, so only the pages of a patch are read. Of ``.nii`` files nibabel reads the patch, and
    ``.nii.gz`` files it decompresses up to there. A volume is ``(D, H, W)`` or ``(C, D, H, W)``, in NIfTI files
    ``(D, H, W, C)``. A sample is a tensor ``(C, d, h, w)`` of the file's element type, or of float32 if a NIfTI file
    scales its values. With ``label_files`` it is a pair: the second part is a
    ``tv_tensors.Mask`` of the same shape, cut from the same place.

    With ``seed``, the place of a patch and the random numbers of ``transform`` depend on the seed, the epoch and the
    sample alone. They are the same for any batch size and number of workers. Without it they follow from torch's
    generator, as for any dataset. Call :meth:`set_epoch` before each epoch then; persistent workers do not see it.

    Args:
        files: Paths of the volumes, or a folder, whose ``.npy``, ``.nii`` and ``.nii.gz`` files are taken in the order
            of their names.
        patch: Depth, height and width of a patch. None: whole volumes.
        label_files: For each volume the path of its labels, or a folder; None if there are none.
        places: ``"random"``, or ``"grid"``: all patches of a grid, for evaluation. The last patches of an axis end
            where the volume ends.
        per_volume: Number of random patches of a volume in an epoch.
        stride: Distance of the patches of a grid along each axis; None for that of ``patch``.
        transform: Called with the patch, or with patch and labels. It returns what it is called with.
        seed: See above.

    Raises:
        ValueError: There are no files, or as many labels as volumes are missing; or a volume is smaller than a patch.
        OSError: A file cannot be read.
        ModuleNotFoundError: A file is of NIfTI, and nibabel is not installed.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        patch: Sequence[int] | None = (96, 96, 96),
        label_files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        *,
        places: Literal["random", "grid"] = "random",
        per_volume: int = 1,
        stride: Sequence[int] | None = None,
        transform: Callable[..., Any] | None = None,
        seed: int | None = None,
    ) -> None:
        self.files = _list_files(files)
        self.label_files = None if label_files is None else _list_files(label_files)
        if self.label_files is not None and len(self.label_files) != len(self.files):
            raise ValueError(
                f"label_files must be one for each of the {len(self.files)} volumes, got {len(self.label_files)}"
            )
        if places not in ("random", "grid"):
            raise ValueError(f"places must be 'random' or 'grid', got {places!r}")
        self.patch = None if patch is None else _check_sides("patch", patch)
        self.stride = self.patch if stride is None else _check_sides("stride", stride)
        self.places, self.per_volume, self.transform, self.seed = places, per_volume, transform, seed
        self.epoch = 0
        self._maps: dict[str, npt.NDArray[Any] | NiftiVolume] = {}
        self._lock = threading.Lock()  # of the maps: the loader's threads share them
        self._grid = self._list_grid() if places == "grid" and self.patch else None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which is a part of the key of random numbers if there is a seed."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self._grid is not None:
            return len(self._grid)
        return len(self.files) * (self.per_volume if self.patch else 1)

    def __getitem__(self, index: int) -> Any:
        """Return a patch, or a pair of patch and labels."""
        index = find_row(self, index)
        draws = self._make_draws(index)
        if draws is None:
            parts = self.read(index, cast("list[float]", torch.rand(3).tolist()))
            return self._transform(parts)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(draws.select_position(1).seeds()[0]))
            return self._transform(self.read(index))

    def _make_draws(self, index: int) -> Draws | None:
        """Return the random numbers of a sample, if there is a seed."""
        if self.seed is None:
            return None
        return Draws(epoch_key(self.seed, self.epoch), np.array([index]), np.zeros(1, np.int64))

    def _transform(self, parts: list[torch.Tensor]) -> Any:
        if self.transform:
            done = self.transform(*parts)
            return done if len(parts) == 1 else tuple(done)
        return parts[0] if len(parts) == 1 else tuple(parts)

    def read(self, index: int, uniform: Sequence[float] = (0.0, 0.0, 0.0)) -> list[torch.Tensor]:
        """Return a patch, and its labels if there are any, without the transform.

        Args:
            index: The sample.
            uniform: Numbers in [0, 1) that tell the place of a random patch, if there is no seed.
        """
        if draws := self._make_draws(index):
            uniform = draws.uniform(3)[0].tolist()
        number, place = self._find(index, uniform)
        file = self.files[number]
        parts = [self._cut(file, place)]
        if self.label_files is not None:
            label_file = self.label_files[number]
            sides, label_sides = self._sides(file), self._sides(label_file)
            if label_sides != sides:
                raise ValueError(f"{label_file} must have the size of {file}, {sides}, got {label_sides}")
            parts.append(tv_tensors.Mask(self._cut(label_file, place)))
        return parts

    def name(self, index: int) -> str:
        """Return the file of a sample."""
        if self._grid is not None:
            return self.files[self._grid[index][0]]
        return self.files[index // self.per_volume if self.patch else index]

    def _find(self, index: int, uniform: Sequence[float]) -> tuple[int, _Place]:
        """Return the number of the sample's volume, and the first voxel of its patch."""
        if self._grid is not None:
            return self._grid[index]
        if self.patch is None:
            return index, (0, 0, 0)
        number = index // self.per_volume
        room = self._room(number)
        depth, height, width = (int(u * (most + 1)) for u, most in zip(uniform, room, strict=True))
        return number, (depth, height, width)

    def _room(self, number: int) -> list[int]:
        """Return how far a patch can move along each axis of a volume."""
        assert self.patch is not None
        sides = self._sides(self.files[number])
        room = [side - length for side, length in zip(sides, self.patch, strict=True)]
        if min(room) < 0:
            raise ValueError(f"{self.files[number]} must be at least as large as a patch, {self.patch}, got {sides}")
        return room

    def _list_grid(self) -> list[tuple[int, _Place]]:
        assert self.stride is not None
        grid: list[tuple[int, _Place]] = []
        for number in range(len(self.files)):
            starts = [
                [min(i * step, most) for i in range(math.ceil(most / step) + 1)]
                for most, step in zip(self._room(number), self.stride, strict=True)
            ]
            grid += [(number, (depth, height, width)) for depth, height, width in product(*starts)]
        return grid

    def _map(self, path: str) -> npt.NDArray[Any] | NiftiVolume:
        """Return a volume as an array ``(C, D, H, W)``, of which regions are read."""
        with self._lock:
            volume = self._maps.pop(path, None)
            if volume is None:
                volume = NiftiVolume(path) if path.endswith(NIFTI_SUFFIXES) else _map_array(path)
            self._maps[path] = volume  # the latest is last, and the oldest is closed
            if len(self._maps) > _OPEN:
                del self._maps[next(iter(self._maps))]
            return volume

    def _sides(self, path: str) -> _Place:
        depth, height, width = self._map(path).shape[1:]
        return depth, height, width

    def _cut(self, path: str, place: _Place) -> torch.Tensor:
        """Return a copy of the patch at a place."""
        window = [slice(None)] * 3
        if self.patch is not None:
            window = [slice(a, a + n) for a, n in zip(place, self.patch, strict=True)]
        patch = self._map(path)[(slice(None), *window)]
        native = cast("np.dtype[Any]", patch.dtype.newbyteorder("="))
        return torch.from_numpy(np.array(patch, native, order="C"))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the memory maps. A copy opens them again."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_maps", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps, self._lock = {}, threading.Lock()


def _map_array(path: str) -> npt.NDArray[Any]:
    try:
        volume: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} must be a .npy file of numbers: {error}") from error
    if volume.ndim not in (3, 4):
        raise ValueError(f"{path} must be (D, H, W) or (C, D, H, W), got {volume.shape}")
    return volume if volume.ndim == 4 else volume[None]


def _list_files(files: Any) -> list[str]:
    if isinstance(files, (str, os.PathLike)):
        folder = Path(cast("str", files)).expanduser()
        suffixes = (".npy", *NIFTI_SUFFIXES)
        paths = sorted(str(path) for path in folder.glob("*") if path.name.endswith(suffixes))
    else:
        paths = [str(Path(path).expanduser()) for path in cast("Sequence[str]", files)]
    if not paths:
        raise ValueError(f"there are no .npy, .nii or .nii.gz files in {files!r}")
    return paths


def _check_sides(name: str, sides: Sequence[Any]) -> _Place:
    if len(sides) != 3 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{name} must be three numbers of voxels (depth, height, width), got {sides!r}")
    return sides[0], sides[1], sides[2]
