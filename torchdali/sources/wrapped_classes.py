"""torchvision's datasets that ``wrap_dataset_for_transforms_v2`` wraps: where their files and annotations are."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import PIL.Image
from torchvision import tv_tensors
from torchvision.datasets import voc

from torchdali.sources.mask_files import read_mask
from torchdali.transforms.targets.stored import EncodedMask

__all__ = ["WRAPPED_CLASSES", "WrappedClass", "get_coco_target", "join_targets", "map_parts", "wrap_mask_files"]

_open: Callable[..., Any] = PIL.Image.open


class WrappedClass(NamedTuple):
    """How the samples of a dataset are found.

    Attributes:
        get_path: Returns the path of an image, by the dataset inside and an index.
        get_target: Returns a target as it is without the wrapper.
        is_converted: Whether images are converted to RGB.
        attributes: Those that decide what the samples are.
        has_mask_files: Whether targets may have mask files, which :func:`wrap_mask_files` takes.
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
    return _read_mask(dataset.masks[index])


def _get_sbd_target(dataset: Any, index: int) -> Any:
    return dataset._get_target(dataset.masks[index])  # noqa: SLF001 - torchvision's


def _get_pet_path(dataset: Any, index: int) -> Any:
    return dataset._images[index]  # noqa: SLF001 - torchvision's


def _get_pet_target(dataset: Any, index: int) -> Any:
    columns: dict[str, Callable[[], Any]] = {
        "category": lambda: dataset._labels[index],  # noqa: SLF001 - torchvision's
        "binary-category": lambda: dataset._bin_labels[index],  # noqa: SLF001
        "segmentation": lambda: _read_mask(dataset._segs[index]),  # noqa: SLF001
    }
    return join_targets([columns[kind]() for kind in dataset._target_types])  # noqa: SLF001


def _get_cityscapes_target(dataset: Any, index: int) -> Any:
    openers = {"semantic": _read_mask, "instance": _open}  # the wrapper makes several masks of the instances
    pairs = zip(dataset.target_type, dataset.targets[index], strict=True)
    return join_targets([openers[kind](path) for kind, path in pairs])


def _read_mask(path: Any) -> Any:
    """Return a mask file that DALI decodes, or else the mask. :func:`wrap_mask_files` needs more than one pixel."""
    mask = read_mask(path)
    return _open(path) if isinstance(mask, EncodedMask) and mask.canvas == (1, 1) else mask


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
    "SBDataset": WrappedClass(_get_path, _get_sbd_target, True, ("images", "masks")),
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


def wrap_mask_files(wrap: Callable[[tuple[Any, Any]], tuple[Any, Any]], image: Any, target: Any) -> tuple[Any, Any]:
    """Return what torchvision's wrapper makes of an image and a target, whose mask files stay as they are.

    Args:
        wrap: The wrapper. It gets an image of one pixel for each mask file, with the file's number.
        image: The image.
        target: The target as it is without the wrapper: a mask file, something else, or a tuple of such.
    """
    masks: list[EncodedMask] = []

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, EncodedMask):
            return leaf
        masks.append(leaf)
        return PIL.Image.new("L", (1, 1), len(masks) - 1)

    def restore(leaf: Any) -> Any:
        return masks[int(leaf)] if isinstance(leaf, tv_tensors.Mask) and leaf.numel() == 1 else leaf

    image, target = wrap((image, map_parts(replace, target)))
    return image, map_parts(restore, target) if masks else target


def map_parts(change: Callable[[Any], Any], target: Any) -> Any:
    """Return a target with a changed value, or with changed parts if it is a tuple."""
    return tuple(map(change, cast("tuple[Any, ...]", target))) if isinstance(target, tuple) else change(target)
