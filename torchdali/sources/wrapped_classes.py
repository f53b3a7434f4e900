"""torchvision's datasets that ``wrap_dataset_for_transforms_v2`` wraps: where their files and annotations are."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torchvision.datasets import voc

from torchdali.sources.instances import read_instances
from torchdali.sources.mask_files import read_mask

__all__ = ["WRAPPED_CLASSES", "WrappedClass", "get_coco_target", "join_targets"]


class WrappedClass(NamedTuple):
    """How the samples of a dataset are found.

    Attributes:
        get_path: Returns the path of an image, by the dataset inside and an index.
        get_target: Returns a target as it is without the wrapper.
        is_converted: Whether images are converted to RGB.
        attributes: Those that decide what the samples are.
        has_mask_files: Whether targets may have mask files.
    """

    get_path: Callable[[Any, int], Any]
    get_target: Callable[[Any, int], Any]
    is_converted: bool
    attributes: tuple[str, ...]
    has_mask_files: bool = False


def _get_coco_path(dataset: Any, index: int) -> str:
    name: str = dataset.coco.loadImgs(dataset.ids[index])[0]["file_name"]
    return os.path.join(dataset.root, name)  # noqa: PTH118 - as torchvision


def get_coco_target(dataset: Any, index: int) -> Any:
    """Return the objects of an image, as ``CocoDetection`` does."""
    return dataset._load_target(dataset.ids[index])  # noqa: SLF001 - torchvision's


def _get_path(dataset: Any, index: int) -> str:
    return dataset.images[index]


def _get_wider_face_path(dataset: Any, index: int) -> str:
    return dataset.img_info[index]["img_path"]


def _get_voc_target(dataset: Any, index: int) -> Any:
    tree: Any = cast("Any", voc).ET_parse(dataset.annotations[index])
    return dataset.parse_voc_xml(tree.getroot())


def _get_kitti_target(dataset: Any, index: int) -> Any:
    return dataset._parse_target(index) if dataset.train else None  # noqa: SLF001 - torchvision's


def _get_wider_face_target(dataset: Any, index: int) -> Any:
    return None if dataset.split == "test" else dataset.img_info[index]["annotations"]


def _get_celeba_path(dataset: Any, index: int) -> str:
    folder = os.path.join(dataset.root, dataset.base_folder, "img_align_celeba")  # noqa: PTH118 - as torchvision
    return os.path.join(folder, dataset.filename[index])  # noqa: PTH118


def _get_celeba_target(dataset: Any, index: int) -> Any:
    columns = {"identity": lambda: dataset.identity[index, 0], "bbox": lambda: dataset.bbox[index, :]}
    return join_targets([columns[kind]() for kind in dataset.target_type])


def _get_voc_mask(dataset: Any, index: int) -> Any:
    return read_mask(dataset.masks[index])


def _get_sbd_target(dataset: Any, index: int) -> Any:
    return dataset._get_target(dataset.masks[index])  # noqa: SLF001 - torchvision's


def _get_pet_path(dataset: Any, index: int) -> Any:
    return dataset._images[index]  # noqa: SLF001 - torchvision's


def _get_pet_target(dataset: Any, index: int) -> Any:
    columns: dict[str, Callable[[], Any]] = {
        "category": lambda: dataset._labels[index],  # noqa: SLF001 - torchvision's
        "binary-category": lambda: dataset._bin_labels[index],  # noqa: SLF001
        "segmentation": lambda: read_mask(dataset._segs[index]),  # noqa: SLF001
    }
    return join_targets([columns[kind]() for kind in dataset._target_types])  # noqa: SLF001


def _get_cityscapes_target(dataset: Any, index: int) -> Any:
    openers: dict[str, Callable[[Any], Any]] = {"semantic": read_mask, "instance": read_instances}
    pairs = zip(dataset.target_type, dataset.targets[index], strict=True)
    return join_targets([openers[kind](path) for kind, path in pairs])


def join_targets(targets: list[Any]) -> Any:
    """Return what a dataset with these targets of a sample returns as its target."""
    return tuple(targets) if len(targets) > 1 else targets[0] if targets else None


WRAPPED_CLASSES: dict[str, WrappedClass] = {
    "CocoDetection": WrappedClass(_get_coco_path, get_coco_target, True, ("ids", "coco")),
    "VOCDetection": WrappedClass(_get_path, _get_voc_target, True, ("images", "targets")),
    "Kitti": WrappedClass(_get_path, _get_kitti_target, False, ("images", "targets")),
    "WIDERFace": WrappedClass(_get_wider_face_path, _get_wider_face_target, False, ("img_info",)),
    "CelebA": WrappedClass(
        _get_celeba_path, _get_celeba_target, False, ("filename", "identity", "bbox", "target_type")
    ),
    "VOCSegmentation": WrappedClass(_get_path, _get_voc_mask, True, ("images", "targets"), True),
    "SBDataset": WrappedClass(_get_path, _get_sbd_target, True, ("images", "masks"), True),
    "OxfordIIITPet": WrappedClass(
        _get_pet_path,
        _get_pet_target,
        True,
        ("_images", "_labels", "_bin_labels", "_segs", "_target_types"),
        True,
    ),
    "Cityscapes": WrappedClass(_get_path, _get_cityscapes_target, True, ("images", "targets", "target_type"), True),
}
"""By the class of the dataset inside."""
