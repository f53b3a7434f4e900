"""The targets of torchvision's wrapper, whose masks stay as they are stored: files, run lengths, or numbers of objects.

The device makes tensors of them, after all moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import PIL.Image
from torchvision import datasets, tv_tensors
from torchvision.tv_tensors import _dataset_wrapper as wrappers

from torchdali.sources.instances import Instances
from torchdali.sources.mask_files import decode_mask
from torchdali.sources.run_lengths import read_runs
from torchdali.transforms.targets.stored import EncodedMask, RunMasks, StoredMasks

__all__ = ["COCO_KEYS", "decode_masks", "find_coco_keys", "read_objects", "wrap_sample"]

COCO_KEYS = {"segmentation", "area", "iscrowd", "image_id", "bbox", "category_id", "boxes", "masks", "labels"}
"""All that the wrapper of ``CocoDetection`` gives."""


def find_coco_keys(keys: Collection[str] | None) -> set[str]:
    """Return the keys of targets of ``CocoDetection`` for the argument ``target_keys`` of the wrapper."""
    return COCO_KEYS if keys == "all" else {"image_id", "boxes", "labels"} if keys is None else set(keys)


def read_objects(objects: list[dict[str, Any]], size: tuple[int, int]) -> RunMasks | None:
    """Return the masks of the objects of an image; None if there are none, or only the wrapper makes them.

    Args:
        objects: Annotations in COCO's format.
        size: Height and width of the image.
    """
    return read_runs([part.get("segmentation") for part in objects], size) if objects else None


def wrap_sample(dataset: Any, index: int, image: Any, target: Any, runs: RunMasks | None = None) -> tuple[Any, Any]:
    """Return what torchvision's wrapper makes of an image and a target.

    Args:
        dataset: What ``wrap_dataset_for_transforms_v2`` returned.
        index: Index of the sample.
        image: The image.
        target: The target as it is without the wrapper, with mask files as they are read.
        runs: The masks of the target, if they are known already.
    """
    inner, wrapper = dataset._dataset, dataset._wrapper  # noqa: SLF001 - torchvision's
    if type(inner) is datasets.CocoDetection:
        keys = find_coco_keys(dataset._target_keys)  # noqa: SLF001
        if runs is None and "masks" in keys:
            runs = read_objects(target, (image.height, image.width))
        if runs is None:
            return wrapper(index, (image, target))
        return _wrap_objects(inner, keys, index, image, target, runs)
    image, wrapped = wrapper(index, (image, _map_parts(_make_stand_in, target)))
    if isinstance(target, tuple):
        pairs = zip(cast("tuple[Any, ...]", target), wrapped, strict=True)
        return image, tuple(_restore(part, other) for part, other in pairs)
    return image, _restore(target, wrapped)


def _wrap_objects(inner: Any, keys: set[str], index: int, image: Any, target: Any, runs: RunMasks) -> tuple[Any, Any]:
    factory: Any = cast("Any", wrappers).WRAPPER_FACTORIES[type(inner)]
    image, target = factory(inner, keys - {"masks"})(index, (image, target))
    first = {name: target.pop(name) for name in ("image_id", "boxes") if name in target}
    return image, {**first, "masks": runs, **target}


def _make_stand_in(part: Any) -> Any:
    """Return a small image for the wrapper, in place of a part of a target that is not decoded."""
    if isinstance(part, Instances):
        return part.numbers
    return PIL.Image.new("L", (1, 1)) if isinstance(part, EncodedMask) else part


def _restore(part: Any, wrapped: Any) -> Any:
    """Return what the wrapper made of a part of a target, with its masks."""
    if isinstance(part, Instances):
        return {**wrapped, "masks": part.masks}
    return part if isinstance(part, EncodedMask) else wrapped


def _map_parts(change: Callable[[Any], Any], target: Any) -> Any:
    """Return a target with a changed value, or with changed parts if it is a tuple."""
    return tuple(map(change, cast("tuple[Any, ...]", target))) if isinstance(target, tuple) else change(target)


def decode_masks(target: Any) -> Any:
    """Return a target with a tensor in place of each stored mask."""
    if isinstance(target, dict):
        return {name: decode_masks(part) for name, part in cast("dict[str, Any]", target).items()}
    if isinstance(target, StoredMasks):
        tensor = decode_mask(target) if isinstance(target, EncodedMask) else target.to_tensor()
        return tv_tensors.Mask(target.finish(target.prepare(tensor, has_fill=False), has_fill=False))
    return _map_parts(decode_masks, target) if isinstance(target, tuple) else target
