"""torchvision's datasets of boxes, captions and attributes as they are, with transforms of images alone.

Targets are in memory. A sample gets copies of their tensors, as from a worker, because users change them. The loader
copies their lists and dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torchvision import datasets
from torchvision.datasets.vision import StandardTransform

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.file_modes import check_modes
from torchdali.sources.folder import FileSource
from torchdali.sources.paths import Paths, build_table
from torchdali.sources.wrapped_classes import WRAPPED_CLASSES, get_coco_target, join_targets

__all__ = ["BARE_CLASSES", "BareFiles", "get_bare_state", "get_bare_transforms"]


class BareClass(NamedTuple):
    """How the samples of a dataset are found.

    Attributes:
        get_path: Returns the path of an image, by the dataset and an index.
        get_target: Returns a target, with tensors of its own.
        is_converted: Whether images are converted to RGB.
        has_joint: Whether ``transforms`` is called, and not ``transform`` and ``target_transform``.
        attributes: Those that decide what the samples are.
    """

    get_path: Callable[[Any, int], Any]
    get_target: Callable[[Any, int], Any]
    is_converted: bool
    has_joint: bool
    attributes: tuple[str, ...]


def _copy_faces(dataset: Any, index: int) -> Any:
    if dataset.split == "test":
        return None
    annotations: dict[str, torch.Tensor] = dataset.img_info[index]["annotations"]
    return {name: values.clone() for name, values in annotations.items()}


def _get_celeba_target(dataset: Any, index: int) -> Any:
    columns: dict[str, Callable[[], torch.Tensor]] = {
        "attr": lambda: dataset.attr[index, :],
        "identity": lambda: dataset.identity[index, 0],
        "bbox": lambda: dataset.bbox[index, :],
        "landmarks": lambda: dataset.landmarks_align[index, :],
    }
    return join_targets([columns[kind]().clone() for kind in dataset.target_type])


_COCO, _FACES, _CELEBA = (WRAPPED_CLASSES[name] for name in ("CocoDetection", "WIDERFace", "CelebA"))
_CELEBA_COLUMNS = ("filename", "attr", "identity", "bbox", "landmarks_align", "target_type")

BARE_CLASSES: dict[type[Any], BareClass] = {
    datasets.CocoDetection: BareClass(_COCO.get_path, get_coco_target, True, True, _COCO.attributes),
    datasets.CocoCaptions: BareClass(_COCO.get_path, get_coco_target, True, True, _COCO.attributes),
    datasets.WIDERFace: BareClass(_FACES.get_path, _copy_faces, False, False, ("img_info", "split")),
    datasets.CelebA: BareClass(_CELEBA.get_path, _get_celeba_target, False, False, _CELEBA_COLUMNS),
}
"""The classes. Others read a file for each target."""


def get_bare_transforms(dataset: Any) -> tuple[Any, Any]:
    """Return the transforms of images and of targets."""
    calls: Any = dataset.transforms if BARE_CLASSES[type(dataset)].has_joint else dataset
    is_joint = calls is not dataset and type(calls) is not StandardTransform
    return (calls, None) if is_joint else (cast("Any", calls).transform, cast("Any", calls).target_transform)


def get_bare_state(dataset: Any) -> list[Any]:
    """Return the objects that decide what the samples of a dataset are; first its transforms."""
    attributes = BARE_CLASSES[type(dataset)].attributes
    return [*get_bare_transforms(dataset), dataset, *(getattr(dataset, name, None) for name in attributes)]


class BareFiles(FileSource):
    """The image files of a dataset, and its targets.

    Args:
        dataset: One of :data:`BARE_CLASSES`.
        is_checked: Whether the modes of its files are known to be right.

    Raises:
        UnsupportedDatasetError: Its images keep the mode of their files and one is not RGB, or its transforms take
            whole samples.
    """

    def __init__(self, dataset: Any, is_checked: bool = False) -> None:
        name, self._class = type(dataset).__name__, BARE_CLASSES[type(dataset)]
        if self._class.has_joint and dataset.transforms and type(dataset.transforms) is not StandardTransform:
            raise UnsupportedDatasetError(
                f"{name} has transforms= for whole samples, whose boxes are no tv_tensors; wrap it in "
                "torchvision.datasets.wrap_dataset_for_transforms_v2"
            )
        self._dataset = dataset
        transform, self._target_transform = get_bare_transforms(dataset)
        paths = [self._class.get_path(dataset, i) for i in range(len(dataset))]
        if not (self._class.is_converted or is_checked):
            check_modes(name, paths)
        super().__init__(Paths([build_table(paths)]), None, transform, f"{len(paths):,} files ({name})")

    def __reduce__(self) -> Any:
        return BareFiles, (self._dataset, True)

    def target(self, row: int) -> Any:
        """Return the target of a sample, transformed."""
        target, function = self._class.get_target(self._dataset, row), self._target_transform
        if function is None or (target is None and type(self._dataset) is datasets.CelebA):
            return target
        return function(target)
