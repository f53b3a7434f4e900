"""The interface of a source, which the pipelines read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchdali.sources.headers.table import HeaderTable
from torchdali.sources.places import Places
from torchdali.transforms.spec import InputKind, IntArray, Spec
from torchdali.transforms.targets.stored import StoredMasks

__all__ = ["BoxColumns", "ContentCache", "Labels", "ReadError", "Source", "Targets"]

Labels = IntArray | dict[str, IntArray]
"""``(N,)`` int64 targets of samples; if targets are dictionaries, such an array for each key."""


class BoxColumns(NamedTuple):
    """The targets of N samples, dictionaries with boxes and labels, which are taken together.

    Attributes:
        targets: The dictionaries. Those with boxes have None as ``"boxes"`` and ``"labels"``.
        boxes: ``(M, 4)`` corners of the boxes of all samples, one sample after another.
        labels: ``(M,)`` int64 labels of the boxes.
        counts: ``(L,)`` numbers of boxes of the samples that have any such keys.
        owners: ``(L,)`` which samples these are, ascending.
        masks: The masks of the objects of some samples, by the number of the sample. They have None as ``"masks"``.
    """

    targets: list[dict[str, Any]]
    boxes: npt.NDArray[Any]
    labels: IntArray
    counts: IntArray
    owners: IntArray
    masks: Mapping[int, StoredMasks] = {}


class ContentCache(Protocol):
    """Keeps what was fetched of object stores. Several threads call it."""

    def get(self, key: tuple[object, ...]) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of a part of an object, or None if they are not kept.

        Args:
            key: What tells the part from all others: its store and its :class:`torchdali.sources.remote.Range`.
        """

    def add(self, key: tuple[object, ...], content: npt.NDArray[np.uint8]) -> None:
        """Keep the bytes of a part of an object, if there is room."""


class ReadError(Exception):
    """One of several samples cannot be read. :meth:`Source.read` may raise it if it knows which.

    Without it, the samples are read again one by one, to find the bad one.

    Args:
        position: The position of the sample among the rows.
        error: The reason.
    """

    def __init__(self, position: int, error: Exception) -> None:
        super().__init__(position, error)
        self.position, self.error = position, error


class Source(ABC):
    """Samples that the pipelines read by their rows, instead of asking a dataset for them one by one.

    A source has four methods: ``__len__``, :meth:`read`, :meth:`target` and :meth:`name`. Everything else has a
    default. Threads call :meth:`read` at the same time. Headers, truncated files, files that only PIL reads, and
    retries are the pipeline's work.

    Attributes:
        kind: What :meth:`read` returns.
        spec: The images as the first transform gets them. ``InputKind.PIXELS`` needs its ``size``.
        transform: The dataset's own transform, or None. It comes before the loader's ``transform=``.
        resident: Whether :meth:`read` returns tensors on the GPU.
        is_mapped: Whether :meth:`read` returns views of mapped memory, and so takes no time.
        has_places: Whether :meth:`find` tells where the files lie that :meth:`read` returns.
        num_frames: Number of frames of each sample, if samples are videos; else 0.
        is_pair: Whether a sample is a pair of image and target. If not, :meth:`make_sample` makes it.
        annotations: Types of the ``tv_tensors`` in targets that move with the images: ``BoundingBoxes``, ``Mask`` and
            ``KeyPoints``. Then :meth:`annotated_targets` is called, and not :meth:`target`.
        is_joint: Whether ``transform`` takes whole samples, so that it moves annotations. Otherwise it takes images.
        draws_targets: Whether random numbers may be drawn while annotated targets are made.
        has_target_files: Whether :meth:`read_target_files` is called ahead, for targets with annotations.
        is_remote: Whether images lie in an object store, so that :meth:`with_cache` is of use.
        label_spec: The labels of each volume, if samples are volumes and have such; else None.
    """

    kind: InputKind = InputKind.ENCODED
    spec: Spec = Spec()
    transform: Any = None
    resident: bool = False
    is_mapped: bool = False
    has_places: bool = False
    num_frames: int = 0
    is_pair: bool = True
    annotations: frozenset[type] = frozenset()
    is_joint: bool = False
    draws_targets: bool = True
    has_target_files: bool = False
    is_remote: bool = False
    label_spec: Spec | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, rows: IntArray) -> Any:
        """Return the images of some samples, in this order. What it raises is reported as a fault of its sample.

        Args:
            rows: ``(N,)`` int64. A row may come several times.

        Returns:
            By :attr:`kind`: ``FILES`` a list of N paths, or an ``(N, L)`` uint8 array of paths, each padded with at
            least one NUL. ``ENCODED`` a list of the bytes of N image files. ``PIXELS`` an ``(N, H, W, C)`` array.
        """

    def find(self, rows: IntArray) -> Places:
        """Return where the files of some samples lie in memory, which stays. Only sources with places have it."""
        raise NotImplementedError

    @abstractmethod
    def target(self, row: int) -> Any:
        """Return the target of a sample, as ``__getitem__`` of the dataset returns it."""

    @abstractmethod
    def name(self, row: int) -> str:
        """Return the name of a sample for messages: mostly that of its file."""

    def locate(self, row: int) -> tuple[Source, int]:
        """Return the source that a sample is from, and its row there, if this source is several combined."""
        return self, row

    def describe(self) -> str:
        """Return a description, for ``explain()``."""
        return f"{len(self):,} samples of {type(self).__name__}"

    def labels(self, rows: IntArray) -> Labels | None:
        """Return targets of some samples at once; None if they are neither plain integers nor dictionaries of such.

        For dictionaries, :meth:`make_sample` is called once with these arrays, as tensors, and with all images.
        """
        return None

    def read_parts(self, rows: IntArray) -> list[Any] | None:
        """Read ahead, in a thread, what :meth:`make_target` makes targets of; None to have :meth:`target` called."""
        return None

    def make_target(self, parts: Any) -> Any:
        """Return the target of a sample, of what :meth:`read_parts` read."""
        return parts

    def annotated_targets(self, rows: IntArray, size: IntArray) -> list[Any]:
        """Return the targets of some samples, with boxes, masks or key points of their own.

        Args:
            rows: ``(N,)`` int64.
            size: ``(N, 2)`` heights and widths of the images.
        """
        return [self.target(row) for row in rows.tolist()]

    def read_target_files(self, row: int) -> Any:
        """Read ahead, in a thread, what takes time of a target with annotations, for :meth:`make_annotated_targets`.

        If it raises, :meth:`annotated_targets` is called for the batch instead, when it is due.
        """
        return None

    def make_annotated_targets(self, rows: IntArray, size: IntArray, files: Sequence[Any]) -> list[Any]:
        """Return what :meth:`annotated_targets` does.

        Args:
            rows: ``(N,)`` int64.
            size: ``(N, 2)`` heights and widths of the images.
            files: What :meth:`read_target_files` returned for each sample.
        """
        return self.annotated_targets(rows, size)

    def box_columns(self, rows: IntArray, size: IntArray, files: Sequence[Any]) -> BoxColumns | None:
        """Return the targets of :meth:`make_annotated_targets` as columns, which is faster; None if there are none."""
        return None

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        """Return the sample of a transformed image and its target, as ``__getitem__`` of the dataset returns it."""
        return image, target

    def headers(self) -> HeaderTable | None:
        """Return the known headers, or None. With ``ENCODED`` a table means that the bytes of a row never change."""
        return None

    def loses_bits(self, row: int) -> bool:
        """Return whether an image must not be read as RGB, which has 8 bits. Called for files with unusual headers."""
        return False

    def has_same_files(self, other: Source) -> bool:
        """Return whether each row is the same file in another source."""
        return self is other

    def with_cache(self, cache: ContentCache) -> Source:
        """Return a source of the same samples that keeps what it fetches of object stores in a cache."""
        return self

    def to_device(self, device: torch.device, budget: int) -> Source:
        """Return the source to use on a device: this one, or one with a copy of the images there.

        Args:
            device: The device of the pipelines. A CUDA device has an index.
            budget: Bytes of the device's memory that a copy may take.
        """
        return self


class Targets:
    """The targets of samples, and their transforms.

    Args:
        values: The target of each sample: an array of integers, or a list of anything.
        functions: The target transforms, each a function or None.
        which: ``(N,)`` for each sample the index of its target transform; None if all have the first.
    """

    def __init__(
        self,
        values: Sequence[Any] | npt.NDArray[np.integer[Any]],
        functions: Sequence[Callable[[Any], Any] | None] = (None,),
        which: npt.NDArray[Any] | None = None,
    ) -> None:
        if not isinstance(values, np.ndarray) and all(type(value) is int for value in values):
            values = np.array(values, np.int64)
        self._values, self._functions, self._which = values, functions, which

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> Any:
        """Return the target of one sample, transformed."""
        function = self._functions[0 if self._which is None else int(self._which[row])]
        value: Any = self._values[row]
        target = int(value) if isinstance(self._values, np.ndarray) else value
        return function(target) if function else target

    def labels(self, rows: IntArray) -> IntArray | None:
        """Return ``(N,)`` int64 targets; None if they are not integers, or a function transforms them."""
        if any(self._functions) or not isinstance(self._values, np.ndarray):
            return None
        return self._values[rows].astype(np.int64)
