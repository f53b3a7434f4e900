"""What the feed asks of samples, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchdali.errors import SampleError
from torchdali.sources.headers.scan import Scan
from torchdali.transforms.spec import NOTHING_SEEN, InputKind, InputStats, IntArray, Spec

__all__ = ["NativeSource", "Source"]

_NONE: IntArray = np.empty(0, np.int64)


class Source:
    """Images that a graph is fed with, by their row. What this class answers holds where nothing can go wrong.

    Attributes:
        bad: Rows of samples that cannot be read, as far as that is known and put up with.
    """

    bad: frozenset[int] = frozenset()

    def name(self, row: int) -> str:
        """A sample as messages name it."""
        raise NotImplementedError

    def error(self, row: int, reason: str) -> SampleError:
        """What is raised where a sample is at fault."""
        raise NotImplementedError

    def sizes(self, rows: IntArray) -> IntArray:
        """``(N, 2)`` heights and widths of a batch that was scanned."""
        raise NotImplementedError

    def images(self, rows: IntArray, by_pil: IntArray, held: ExitStack) -> Any:
        """What the graph is fed for the images of a batch, in the form that the plan's ``input_kind`` says.

        Args:
            rows: ``(N,)`` the batch.
            by_pil: ``(M,)`` places in it whose files PIL is to read.
            held: Takes what must be given back when the run is done.
        """
        raise NotImplementedError

    def scan(self, rows: IntArray, pool: Callable[[], Executor]) -> Scan:
        """Learns what must be known before parameters are drawn, in the threads of ``pool()``."""
        return Scan([], lambda _: None, pool)

    def leave(self) -> None:
        """Lets go of what waits for a file that has not answered in time, so that nobody else waits behind it."""

    def seen(self) -> InputStats:
        """What is known by now of the threads that its images need."""
        return NOTHING_SEEN

    def file_bytes(self, rows: IntArray) -> int:
        """Bytes of the files of a scanned batch; 0 where there are none."""
        return 0

    def foreign(self, rows: IntArray) -> IntArray:
        """``(M,)`` places in a scanned batch whose files DALI does not decode as PIL does."""
        return _NONE

    def changed(self, rows: IntArray, lengths: npt.NDArray[np.int32], sizes: IntArray) -> bool:
        """Whether what was fed is not what ``sizes`` were of; ``lengths`` are those of the files that were read."""
        return False

    def check_endings(self, rows: IntArray, endings: npt.NDArray[np.uint8]) -> None:
        """Raises SampleError where a file, whose last bytes are in ``endings``, is cut off."""

    def check(self, row: int) -> None:
        """Raises SampleError where a sample is damaged, after its batch failed."""

    def forget(self, rows: IntArray) -> None:
        """Makes the samples of a batch unknown again."""

    def mark_pil_only(self, row: int) -> None:
        """From now on DALI does not decode this sample as PIL does."""

    def size_of(self, row: int) -> tuple[int, int] | None:
        """Height and width of one image, scanned or not; None where it cannot be read."""
        height, width = self.sizes(np.array([row]))[0].tolist()
        return height, width

    def replace(self, row: int, size: tuple[int, int]) -> None:
        """From now on a black image of this height and width stands for a sample."""

    def instead(self, bad: npt.NDArray[np.bool_]) -> IntArray | None:
        """``(N,)`` for each place of a batch itself, or the next one that is not bad; None where all are.

        Args:
            bad: ``(N,)`` which are.
        """
        good = np.flatnonzero(~bad)
        return good[np.searchsorted(good, np.arange(len(bad))) % len(good)] if len(good) else None


class NativeSource(Source):
    """All samples of a dataset that is never asked for one: images by row, and their targets.

    Args:
        targets: One a sample: an array of integers, or a list of what ``default_collate`` takes.
        target_transforms: For each sample the index of its target transform in ``functions``; None where all of them
            have the first.
        functions: The target transforms; None where there is none.
        transform: The dataset's transform.
        description: What this is, for ``explain()``.

    Attributes:
        input_kind: What the graph is fed.
        spec: The images that come into the chain of transforms.
        resident: Whether what is fed lies on the GPU.
    """

    input_kind: InputKind = InputKind.FILES
    spec: Spec = Spec()
    resident: bool = False

    def __init__(
        self,
        targets: Sequence[Any] | npt.NDArray[np.integer[Any]],
        target_transforms: npt.NDArray[Any] | None,
        functions: Sequence[Callable[[Any], Any] | None],
        transform: Any,
        description: str,
    ) -> None:
        if not isinstance(targets, np.ndarray) and all(type(target) is int for target in targets):
            targets = np.array(targets, np.int64)
        self._labels = targets if isinstance(targets, np.ndarray) else None
        self._targets = targets
        self._target_transforms = target_transforms
        self._functions = functions
        self.transform = transform
        self.description = description

    def __len__(self) -> int:
        return len(self._targets)

    def on(self, device: torch.device, budget: int) -> NativeSource:
        """The source that is to be used on a device: itself, or one whose images were copied there.

        Args:
            device: Where DALI will run; a CUDA device has its index.
            budget: Bytes of the device's memory that a copy may take.
        """
        return self

    def validate_headers(self, device: torch.device) -> bool:
        """Whether DALI reads the header of each file before it decodes any, and leaves those that it refuses to PIL."""
        return False

    def close(self) -> None:
        """Frees the threads that it reads with, until it is used again."""

    @property
    def plain_labels(self) -> bool:
        """Whether targets are integers that nothing transforms."""
        return self._labels is not None and not any(self._functions)

    def labels(self, rows: IntArray) -> IntArray:
        """``(N,)`` labels, where :attr:`plain_labels` holds."""
        assert self._labels is not None
        return self._labels[rows].astype(np.int64)

    def target(self, row: int) -> Any:
        """The target of one sample, transformed."""
        function = self._functions[0 if self._target_transforms is None else int(self._target_transforms[row])]
        target: Any = self._targets[row] if self._labels is None else int(self._labels[row])
        return function(target) if function else target
