"""A wrapper of the user's dataset in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchdali.runtime.exceptions import add_note
from torchdali.transforms.rng import Draws
from torchdali.workers.packing import KeyedSamples, SampleFailure
from torchdali.workers.unread import leave_images_unread, take_transforms

__all__ = ["AnnotatedDataset", "KeyedIndices"]


class KeyedIndices(NamedTuple):
    """The indices of a batch for a worker that draws.

    Attributes:
        indices: The sampler's.
        draws: The random numbers of their samples.
    """

    indices: Any
    draws: Draws


class AnnotatedDataset:
    """A map-style dataset whose exceptions have a note with the index. Notes need Python 3.11.

    Args:
        dataset: The dataset.
        returns_failures: Whether a :class:`SampleFailure` is returned for a sample that raises an exception.
        finds_images: Whether DALI decodes image files. Then those of torchvision's wrapped datasets are left to it.
        takes_transforms: Whether DALI runs the transforms of such a dataset, too.
        draws: Whether batches are requested by :class:`KeyedIndices`.
    """

    def __init__(
        self,
        dataset: Any,
        returns_failures: bool,
        finds_images: bool = False,
        takes_transforms: bool = False,
        draws: bool = False,
    ) -> None:
        dataset = take_transforms(dataset)[1] if takes_transforms else dataset
        self.dataset = leave_images_unread(dataset) if finds_images else dataset
        self._returns_failures, self._name, self._draws = returns_failures, type(dataset).__name__, draws

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            if self._returns_failures and not isinstance(error, StopIteration):
                text = (
                    f"{type(error).__name__}({error})" if isinstance(error, OSError) else repr(error)
                )  # names the file
                return SampleFailure(self._name, f"the dataset raised {text}")
            add_note(error, f"while the dataset was asked for sample {index!r}")
            raise

    @property
    def __getitems__(self) -> Callable[[Any], Any] | None:
        """The method that returns the samples of a batch. None if each is asked for, as torch's fetcher expects."""
        return self._get_items if self._returns_batches or self._draws else None

    @property
    def _returns_batches(self) -> bool:
        return bool(getattr(self.dataset, "__getitems__", None))

    def _get_items(self, indices: Any) -> Any:
        if isinstance(indices, KeyedIndices):
            return KeyedSamples(self._get_items(indices.indices), indices.draws)
        if not self._returns_batches:
            return [self[index] for index in indices]
        try:
            return self.dataset.__getitems__(indices)
        except Exception as error:
            if self._returns_failures and callable(getattr(self.dataset, "__getitem__", None)):
                return [self[index] for index in indices]
            add_note(error, f"while the dataset was asked for samples {indices!r}")
            raise

    def __repr__(self) -> str:
        return repr(self.dataset)
