"""torchvision's wrapped datasets: their samples with paths in place of images, so that DALI decodes the files.

``wrap_dataset_for_transforms_v2`` needs the size of an image, and not its pixels. So a worker opens the file, lets the
wrapper build the target, and passes on the path. Of a mask file it passes on the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import PIL.Image

from torchdali.sources.combined import change_parts
from torchdali.sources.wrapped import find_inner, find_joint_chain
from torchdali.sources.wrapped_classes import WRAPPED_CLASSES, WrappedClass
from torchdali.sources.wrapped_targets import wrap_sample

__all__ = ["leave_images_unread", "take_transforms"]

_open: Callable[..., Any] = PIL.Image.open


def take_transforms(dataset: Any) -> tuple[Any, Any]:
    """Return the joint transforms of wrapped datasets, and a copy of the dataset without them.

    They are None if there are none, if they are not of ``torchvision.transforms.v2``, or if datasets under a
    ``ConcatDataset`` have others.
    """
    taken: list[Any] = []

    def take(part: Any) -> Any:
        transforms, bare = _take_own(part)
        taken.append(transforms)
        return bare

    bare = change_parts(dataset, take)
    return (None, dataset) if any(transforms is not taken[0] for transforms in taken) else (taken[0], bare)


def _take_own(dataset: Any) -> tuple[Any, Any]:
    if type(find_inner(dataset)).__name__ not in WRAPPED_CLASSES:
        return None, dataset
    if dataset.transforms is None or find_joint_chain(dataset) is None:
        return None, dataset
    bare = object.__new__(cast("type[Any]", type(dataset)))  # copy.copy() would wrap the dataset again
    vars(bare).update(vars(dataset), transforms=None)
    return dataset.transforms, bare


def leave_images_unread(dataset: Any) -> Any:
    """Return a copy of a dataset that leaves its image files unread, or the dataset itself if torchdali cannot tell.

    It can for wrapped datasets of torchvision without ``transforms``, also in a ``Subset`` or ``ConcatDataset``.
    """

    def leave(part: Any) -> Any:
        kind = WRAPPED_CLASSES.get(type(find_inner(part)).__name__)
        return UnreadImages(part, kind) if kind and part.transforms is None else part

    return change_parts(dataset, leave)


class UnreadImages:
    """A wrapped dataset whose images are paths.

    Args:
        dataset: What ``wrap_dataset_for_transforms_v2`` returned.
        kind: How its samples are found. If it keeps the mode of its files, only RGB images become paths.
    """

    def __init__(self, dataset: Any, kind: WrappedClass) -> None:
        self._dataset, self._kind = dataset, kind

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample."""
        dataset, kind = self._dataset, self._kind
        if not isinstance(index, int):
            return dataset[index]
        inner = dataset._dataset  # noqa: SLF001 - torchvision's
        path, target = kind.get_path(inner, index), kind.get_target(inner, index)
        with _open(path) as image:
            if not kind.is_converted and image.mode != "RGB":
                return dataset[index]
            unread, target = wrap_sample(dataset, index, image, target)
        return (Path(path), target) if unread is image else dataset[index]

    def __repr__(self) -> str:
        return repr(self._dataset)
