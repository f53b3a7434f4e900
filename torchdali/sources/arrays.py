"""Images in memory as one array: torchvision's CIFAR, MNIST and its relatives, SVHN, STL10, USPS and SEMEION."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision.datasets import CIFAR10, MNIST, QMNIST, SEMEION, STL10, SVHN, USPS

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.source import Source, Targets
from torchdali.transforms.spec import InputKind, IntArray, Spec

__all__ = ["ArraySource", "Arrays", "find_base_class", "get_targets", "view_as_array"]

Pixels = npt.NDArray[np.uint8]

_FAMILIES: tuple[type[Any], ...] = (CIFAR10, SVHN, STL10, QMNIST, MNIST, SEMEION, USPS)
"""The classes that define ``__getitem__``. A subclass precedes its base class."""

_CHUNK_BYTES = 64 * 2**20  # gathered in host memory at a time, while images are copied to a GPU


def find_base_class(dataset: Any) -> type[Any] | None:
    """Return the torchvision class that defines the ``__getitem__`` of a dataset in memory, or None."""
    return next((base for base in _FAMILIES if isinstance(dataset, base)), None)


def get_targets(dataset: Any) -> Any:
    """Return the attribute that holds the targets of a dataset in memory."""
    return getattr(dataset, "labels" if _is_a(dataset, SVHN, STL10, SEMEION) else "targets")


def view_as_array(values: Any) -> npt.NDArray[Any] | None:
    """Return an array or tensor as an array that shares its memory; None for other types."""
    if _is_a(values, torch.Tensor):
        return values.numpy()
    return np.asarray(values) if _is_a(values, np.ndarray) else None


def _is_a(value: object, *kinds: type[Any]) -> bool:
    return isinstance(value, kinds)


class Arrays:
    """The images and targets of one dataset. The images stay in the dataset's array.

    Args:
        dataset: A dataset of one of the classes in ``_FAMILIES``.

    Attributes:
        name: The name of the dataset's class.
        shape: Height, width and channels of each image.
        targets: The target of each image, as ``__getitem__`` gives it before the target transform.

    Raises:
        UnsupportedDatasetError: The arrays have not the types or shapes that torchvision gives them.
    """

    def __init__(self, dataset: Any) -> None:
        self.name = type(dataset).__name__
        self._data: Any = dataset.data
        self._axes = (0, 2, 3, 1) if _is_a(dataset, SVHN, STL10) else (0, 1, 2, 3)
        grey = _is_a(dataset, MNIST, SEMEION, USPS)
        array = view_as_array(self._data)
        if array is None or _is_a(self._data, torch.Tensor) != _is_a(dataset, MNIST) or array.dtype != np.uint8:
            raise UnsupportedDatasetError(f"the data of {self.name} is not of the type that torchvision gives it")
        height, width, channels = self.pixels.shape[1:] if array.ndim == 3 + (not grey) else (0, 0, 0)
        if 0 in (height, width) or channels != (1 if grey else 3):
            raise UnsupportedDatasetError(f"the data of {self.name} is no images: it has the shape {array.shape}")
        self.shape = (height, width, channels)
        self.targets = _read_targets(dataset, len(self._data))

    @property
    def pixels(self) -> Pixels:
        """``(N, H, W, C)`` a view of the dataset's array.

        Each call makes a new view. torch moves a tensor to shared memory when it sends it to another process, and frees
        the memory that an older view refers to.
        """
        array: Any = view_as_array(self._data)
        return array[..., None] if array.ndim == 3 else array.transpose(self._axes)

    def gather(self, rows: IntArray) -> Pixels:
        """Return ``(M, H, W, C)`` some of the images, contiguous."""
        images = self.pixels[rows]  # has the memory layout of the dataset's array
        if images.flags.c_contiguous:
            return images
        out = np.empty(images.shape, np.uint8)
        for channel in range(images.shape[-1]):  # 0.35 ms for 256 images of CIFAR10; one assignment takes 1.4 ms
            out[..., channel] = images[..., channel]
        return out


def _read_targets(dataset: Any, count: int) -> list[Any]:
    targets: Any = get_targets(dataset)
    if _is_a(targets, type(None)) and _is_a(dataset, STL10):
        return [None] * count
    if len(targets) != count:
        raise UnsupportedDatasetError(f"{type(dataset).__name__} has {count} images and {len(targets)} targets")
    if _is_a(dataset, CIFAR10) or (_is_a(dataset, QMNIST) and not dataset.compat):
        return [targets[i] for i in range(count)]
    array = view_as_array(targets)
    if array is None:
        items: list[Any] = [targets[i] for i in range(count)]
        return [int(item[0] if _is_a(dataset, QMNIST) else item) for item in items]
    return list(map(int, (array[:, 0] if _is_a(dataset, QMNIST) else array).tolist()))


class ArraySource(Source):
    """Samples whose images lie in memory, in one array or several of the same shape.

    Images are read from the dataset's arrays for every batch, so changes in the arrays take effect. The copy on a GPU
    that :meth:`to_device` makes does not follow them. Assign another array to the dataset's ``data`` instead.

    Args:
        arrays: The datasets.
        which: ``(N,)`` for each sample the index of its dataset in ``arrays``.
        rows: ``(N,)`` for each sample its row in that dataset.
        functions: The target transform of each dataset, or None.
        transform: The transform of all datasets.
        outline: The nesting of the datasets by name, for ``explain()``.

    Raises:
        UnsupportedDatasetError: The images of the datasets differ in shape.
    """

    kind = InputKind.PIXELS

    def __init__(
        self,
        arrays: Sequence[Arrays],
        which: IntArray,
        rows: IntArray,
        functions: Sequence[Callable[[Any], Any] | None],
        transform: Any,
        outline: str,
    ) -> None:
        first = arrays[0]
        for other in arrays[1:]:
            if other.shape != first.shape:
                raise UnsupportedDatasetError(
                    f"the images under ConcatDataset differ in shape: {first.shape} in {first.name}, "
                    f"{other.shape} in {other.name}"
                )
        height, width, channels = first.shape
        values: list[Any] = [arrays[i].targets[j] for i, j in zip(which.tolist(), rows.tolist(), strict=True)]
        self._targets, self.transform = Targets(values, functions, which), transform
        self._description = f"{len(rows):,} images of {height} x {width} pixels in memory ({outline})"
        self.spec = Spec("pil", torch.uint8, channels, (height, width))
        self._arrays, self._which, self._rows, self._shape = arrays, which, rows, first.shape
        self._copy: tuple[torch.Tensor, IntArray] | None = None
        self._device_copy: tuple[tuple[torch.device, int], ArraySource] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: IntArray) -> Pixels | torch.Tensor:
        """Return ``(N, H, W, C)`` the images of some samples, contiguous; on the GPU if the copy is there."""
        if self._copy is None:
            return self._gather(rows)
        images, positions = self._copy
        chosen = torch.from_numpy(positions[rows]).pin_memory().to(images.device, non_blocking=True)
        return images.index_select(0, chosen)

    def target(self, row: int) -> Any:
        """Return the target of a sample, transformed."""
        return self._targets[row]

    def name(self, row: int) -> str:
        """Return the row of an image in its dataset, and the dataset's class."""
        return f"image {self._rows[row]} of {self._arrays[self._which[row]].name}, in memory"

    def describe(self) -> str:
        """Return the number of images, their size and their datasets."""
        return self._description

    def labels(self, rows: IntArray) -> IntArray | None:
        """Return ``(N,)`` int64 targets; None if they are not plain integers."""
        return self._targets.labels(rows)

    def to_device(self, device: torch.device, budget: int) -> Source:
        """Return itself, or a source with a copy of the images on a CUDA device, if they fit the budget.

        Only the images that samples use are copied, each once. If the device runs out of memory, nothing is copied.
        """
        if device.type != "cuda" or self.resident:
            return self
        if self._device_copy is None or self._device_copy[0] != (device, budget):
            self._device_copy = (device, budget), self._copy_to(device, budget)
        return self._device_copy[1]

    def _copy_to(self, device: torch.device, budget: int) -> ArraySource:
        ends = np.cumsum([0, *(len(arrays.targets) for arrays in self._arrays)])
        _, samples, positions = np.unique(ends[self._which] + self._rows, return_index=True, return_inverse=True)
        length = int(np.prod(self._shape))
        if len(samples) * length > budget:
            return self
        try:
            images = torch.empty((len(samples), *self._shape), dtype=torch.uint8, device=device)
            step = max(1, _CHUNK_BYTES // length)
            for start in range(0, len(samples), step):
                images[start : start + step] = torch.from_numpy(self._gather(samples[start : start + step]))
        except torch.cuda.OutOfMemoryError:
            return self
        torch.cuda.current_stream(device).synchronize()  # another stream may read the images
        clone = copy.copy(self)
        clone._copy, clone.resident = (images, positions.reshape(-1)), True  # noqa: SLF001 - this class
        clone._description += f", copied to {device} ({images.nbytes / 2**20:,.1f} MiB)"  # noqa: SLF001 - this class
        return clone

    def _gather(self, rows: IntArray) -> Pixels:
        which, rows = self._which[rows], self._rows[rows]
        if len(self._arrays) == 1:
            return self._arrays[0].gather(rows)
        out = np.empty((len(rows), *self._shape), np.uint8)
        for i in np.unique(which).tolist():
            positions = which == i
            out[positions] = self._arrays[i].gather(rows[positions])
        return out
