"""A wrapper of the user's dataset in a worker."""

from __future__ import annotations

from typing import Any

from torchdali.runtime.exceptions import add_note
from torchdali.workers.packing import Keyed, SampleFailure
from torchdali.workers.unread import leave_images_unread, take_transforms

__all__ = ["AnnotatedDataset"]


class AnnotatedDataset:
    """A map-style dataset whose exceptions have a note with the index. Notes need Python 3.11.

    Args:
        dataset: The dataset.
        returns_failures: Whether a :class:`SampleFailure` is returned for a sample that raises an exception.
        finds_images: Whether DALI decodes image files. Then those of torchvision's wrapped datasets are left to it.
        takes_transforms: Whether DALI runs the transforms of such a dataset, too.
    """

    def __init__(
        self, dataset: Any, returns_failures: bool, finds_images: bool = False, takes_transforms: bool = False
    ) -> None:
        dataset = take_transforms(dataset)[1] if takes_transforms else dataset
        self.dataset = leave_images_unread(dataset) if finds_images else dataset
        self._returns_failures, self._name = returns_failures, type(dataset).__name__

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

    def __getitems__(self, indices: Any) -> Any:
        """Return the samples of a batch, as torch's fetcher would. For :class:`Keyed` indices they are keyed, too."""
        if isinstance(indices, Keyed):
            return Keyed(self.__getitems__(indices.content), indices.draws)
        if not getattr(self.dataset, "__getitems__", None):
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
