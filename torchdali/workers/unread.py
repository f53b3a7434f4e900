"""torchvision's wrapped datasets: their samples with paths in place of images, so that DALI decodes the files.

``wrap_dataset_for_transforms_v2`` needs the size of an image, and not its pixels. So a worker opens the file, lets the
wrapper build the target, and passes on the path. Of a mask file it passes on the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import PIL.Image
from torch.utils.data import ConcatDataset, Subset
from torchvision import datasets, tv_tensors

from torchdali.samples.tree import tree_map
from torchdali.sources.mask_files import read_mask
from torchdali.sources.run_lengths import read_runs
from torchdali.sources.wrapped import WRAPPED_CLASSES, find_inner, find_joint_chain, join_targets
from torchdali.transforms.targets.stored import EncodedMask

__all__ = ["leave_images_unread", "take_transforms"]

_open: Callable[..., Any] = PIL.Image.open


def take_transforms(dataset: Any) -> tuple[Any, Any]:
    """Return the joint transforms of wrapped datasets, and a copy of the dataset without them.

    They are None if there are none, if they are not of ``torchvision.transforms.v2``, or if datasets under a
    ``ConcatDataset`` have others.
    """
    if type(dataset) is Subset:
        part = cast("Any", dataset)
        transforms, bare = take_transforms(part.dataset)
        return transforms, _replace(part, dataset=bare)
    if type(dataset) is ConcatDataset:
        whole = cast("Any", dataset)
        taken = [take_transforms(part) for part in whole.datasets]
        if any(transforms is not taken[0][0] for transforms, _ in taken):
            return None, whole
        return taken[0][0], _replace(whole, datasets=[bare for _, bare in taken])
    name = type(find_inner(dataset)).__name__
    if name not in WRAPPED_CLASSES and name not in _READERS:
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
    if type(dataset) is Subset:
        part = cast("Any", dataset)
        return _replace(part, dataset=leave_images_unread(part.dataset))
    if type(dataset) is ConcatDataset:
        whole = cast("Any", dataset)
        return _replace(whole, datasets=[leave_images_unread(part) for part in whole.datasets])
    read = _find_reader(dataset)
    return UnreadImages(dataset, *read) if read else dataset


def _replace(whole: Any, **attributes: Any) -> Any:
    """Return a shallow copy of a dataset with other attributes; the dataset itself if they are the same."""
    if all(getattr(whole, name) == new for name, new in attributes.items()):
        return whole
    whole = copy.copy(whole)
    vars(whole).update(attributes)
    return whole


class UnreadImages:
    """A wrapped dataset whose images are paths.

    Args:
        dataset: What ``wrap_dataset_for_transforms_v2`` returned.
        read: Function of the dataset inside and an index: returns the path of the image, and the target as it is
            without the wrapper.
        is_converted: Whether the dataset converts images to RGB. Otherwise only RGB images become paths.
    """

    def __init__(self, dataset: Any, read: Callable[[Any, int], tuple[Any, Any]], is_converted: bool) -> None:
        self._dataset, self._read, self._is_converted = dataset, read, is_converted

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample."""
        dataset = self._dataset
        if not isinstance(index, int):
            return dataset[index]
        path, target = self._read(dataset._dataset, index)  # noqa: SLF001 - torchvision's
        masks: list[EncodedMask] = []
        with _open(path) as image:
            if not self._is_converted and image.mode != "RGB":
                return dataset[index]
            replace = partial(_replace_mask, masks)
            if isinstance(target, tuple):  # each may be a mask
                target = tuple(map(replace, cast("tuple[Any, ...]", target)))
            else:
                target = replace(target)
            unread, target = _wrap(dataset, index, image, target)
        if unread is not image:
            return dataset[index]
        return Path(path), tree_map(target, partial(_restore_mask, masks)) if masks else target

    def __repr__(self) -> str:
        return repr(self._dataset)


def _wrap(dataset: Any, index: int, image: Any, target: Any) -> tuple[Any, Any]:
    """Return what torchvision's wrapper makes of an image and its target. COCO's masks are left as run lengths."""
    inner, keys = dataset._dataset, dataset._target_keys  # noqa: SLF001 - torchvision's
    names = _COCO_KEYS if keys == "all" else {*(keys or ())}
    objects: list[Any] = target if "masks" in names and type(inner) is datasets.CocoDetection else []
    segmentations = [part.get("segmentation") for part in objects]
    masks = read_runs(segmentations, (image.height, image.width)) if segmentations else None
    if masks is None:
        return dataset._wrapper(index, (image, target))  # noqa: SLF001 - torchvision's
    from torchvision.tv_tensors import _dataset_wrapper as wrappers

    wrapper: Any = cast("Any", wrappers).WRAPPER_FACTORIES[type(inner)](inner, names - {"masks"})
    image, target = wrapper(index, (image, target))
    first = {name: target.pop(name) for name in ("image_id", "boxes") if name in target}
    return image, {**first, "masks": masks, **target}


def _replace_mask(masks: list[EncodedMask], leaf: Any) -> Any:
    """Return an image of one pixel for a mask file, which torchvision's wrapper takes: its number in ``masks``."""
    if not isinstance(leaf, EncodedMask):
        return leaf
    masks.append(leaf)
    return PIL.Image.new("L", (1, 1), len(masks) - 1)


def _restore_mask(masks: list[EncodedMask], leaf: Any) -> Any:
    """Return the mask file for which torchvision's wrapper got an image of one pixel."""
    is_number = isinstance(leaf, tv_tensors.Mask) and leaf.numel() == 1
    return masks[int(leaf)] if is_number else leaf


def _read_mask(path: Any) -> Any:
    """Return a mask file that DALI decodes, or else the mask. :func:`_restore_mask` needs more than one pixel."""
    mask = read_mask(path)
    return _open(path) if isinstance(mask, EncodedMask) and mask.canvas == (1, 1) else mask


def _find_reader(dataset: Any) -> tuple[Callable[[Any, int], tuple[Any, Any]], bool] | None:
    """Return how the image and the target of a wrapped dataset are found; None if it is something else."""
    name = type(find_inner(dataset)).__name__
    if name in WRAPPED_CLASSES and dataset.transforms is None:
        return partial(_read_wrapped, name), WRAPPED_CLASSES[name].is_converted
    return _READERS[name] if name in _READERS and dataset.transforms is None else None


def _read_wrapped(name: str, dataset: Any, index: int) -> tuple[Any, Any]:
    kind = WRAPPED_CLASSES[name]
    return kind.get_path(dataset, index), kind.get_target(dataset, index)


def _read_voc_mask(dataset: Any, index: int) -> tuple[Any, Any]:
    return dataset.images[index], _read_mask(dataset.masks[index])


def _read_sbd(dataset: Any, index: int) -> tuple[Any, Any]:
    return dataset.images[index], dataset._get_target(dataset.masks[index])  # noqa: SLF001 - torchvision's


def _read_pet(dataset: Any, index: int) -> tuple[Any, Any]:
    columns: dict[str, Callable[[], Any]] = {
        "category": lambda: dataset._labels[index],  # noqa: SLF001 - torchvision's
        "binary-category": lambda: dataset._bin_labels[index],  # noqa: SLF001
        "segmentation": lambda: _read_mask(dataset._segs[index]),  # noqa: SLF001
    }
    targets = [columns[kind]() for kind in dataset._target_types]  # noqa: SLF001
    return dataset._images[index], join_targets(targets)  # noqa: SLF001


def _read_cityscapes(dataset: Any, index: int) -> tuple[Any, Any]:
    openers = {"semantic": _read_mask, "instance": _open}  # the wrapper makes several masks of the instances
    pairs = zip(dataset.target_type, dataset.targets[index], strict=True)
    return dataset.images[index], join_targets([openers[kind](path) for kind, path in pairs])


_COCO_KEYS = {"segmentation", "area", "iscrowd", "image_id", "bbox", "category_id", "boxes", "masks", "labels"}
"""All that the wrapper of ``CocoDetection`` gives."""

_READERS: dict[str, tuple[Callable[[Any, int], tuple[Any, Any]], bool]] = {
    "VOCSegmentation": (_read_voc_mask, True),
    "SBDataset": (_read_sbd, True),
    "OxfordIIITPet": (_read_pet, True),
    "Cityscapes": (_read_cityscapes, True),
}
"""By the class of the dataset inside, if it has masks: how a sample is found, and whether images are converted to RGB.
"""
