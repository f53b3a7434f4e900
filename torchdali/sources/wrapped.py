"""torchvision's wrapped datasets of boxes and masks: their files and annotations, without a call of ``__getitem__``.

``wrap_dataset_for_transforms_v2`` needs the size of an image, and not its pixels. Here it gets an image without pixels,
whose size comes from the file's header. So its own code makes each target. Of a mask file it gets no pixels either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from torchvision import datasets, tv_tensors
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2
from torchvision.tv_tensors._dataset_wrapper import (  # pyright: ignore[reportMissingTypeStubs]
    VisionDatasetTVTensorWrapper,
)

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.file_modes import check_modes
from torchdali.sources.folder import FileSource
from torchdali.sources.image_size import image_size
from torchdali.sources.paths import Paths, build_table
from torchdali.sources.source import BoxColumns
from torchdali.sources.wrapped_classes import WRAPPED_CLASSES, get_coco_target
from torchdali.sources.wrapped_targets import decode_masks, find_coco_keys, read_objects, wrap_sample
from torchdali.transforms import find_rule, flatten
from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets.stored import RunMasks

__all__ = [
    "WrappedFiles",
    "find_inner",
    "find_joint_chain",
    "get_wrapped_state",
    "get_wrapped_transforms",
]


def find_inner(dataset: Any) -> Any:
    """Return the dataset of torchvision's own class that ``wrap_dataset_for_transforms_v2`` wrapped; None without."""
    inner = cast("Any", getattr(dataset, "__dict__", {}).get("_dataset"))
    wrapper: Any = VisionDatasetTVTensorWrapper
    is_wrapped = getattr(cast("Any", type(dataset)), "__getitem__", None) is wrapper.__getitem__
    return inner if is_wrapped and type(inner) is getattr(datasets, type(inner).__name__, None) else None


def find_joint_chain(dataset: Any) -> list[Any] | None:
    """Return the transforms of a wrapped dataset that take a whole sample; None if torchdali cannot take them over.

    It can for transforms of ``torchvision.transforms.v2``, and without any.
    """
    joint: Any = dataset.transforms
    chain = flatten(joint)
    return chain if all(isinstance(leaf, v2.Transform) for leaf in chain) else None


def get_wrapped_state(dataset: Any) -> list[Any]:
    """Return the objects that decide what the samples of a wrapped dataset are; first its transforms."""
    inner = find_inner(dataset)
    attributes = WRAPPED_CLASSES[type(inner).__name__].attributes
    return [*get_wrapped_transforms(dataset), inner, *(getattr(inner, name) for name in attributes)]


def get_wrapped_transforms(dataset: Any) -> tuple[Any, Any]:
    """Return the transform of images, or of whole samples, of a wrapped dataset; and that of targets, or None."""
    joint: Any = dataset.transforms
    is_standard = type(joint) is StandardTransform
    return (cast("Any", joint.transform), cast("Any", joint.target_transform)) if is_standard else (joint, None)


class _Unread(PIL.Image.Image):
    """An image without pixels, of which torchvision's wrapper asks the size.

    Args:
        height: Height in pixels.
        width: Width in pixels.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self._size = (width, height)


class WrappedFiles(FileSource):
    """The image files of a wrapped dataset, and its targets with boxes or masks.

    Args:
        dataset: What ``wrap_dataset_for_transforms_v2`` returned for one of :data:`WRAPPED_CLASSES`.
        is_checked: Whether the modes of its files are known to be right.

    Raises:
        UnsupportedDatasetError: Its images keep the mode of their files and one is not RGB, or its transforms are not
            torchvision's.
    """

    def __init__(self, dataset: Any, is_checked: bool = False) -> None:
        self._dataset, self._inner = dataset, find_inner(dataset)
        name = type(self._inner).__name__
        self._class = WRAPPED_CLASSES[name]
        self._keys = _find_keys(dataset, name)
        transform, self.is_joint, self._target_transform = _split_transforms(dataset, name)
        paths = [self._class.get_path(self._inner, i) for i in range(len(self._inner))]
        if not (self._class.is_converted or is_checked):
            check_modes(name, paths)
        super().__init__(Paths([build_table(paths)]), None, transform, f"{len(paths):,} files ({name})")
        self._cache: dict[int, tuple[Any, Any]] = {}
        is_test = (name == "Kitti" and not self._inner.train) or (name == "WIDERFace" and self._inner.split == "test")
        kinds: list[type] = []
        if self._class.has_mask_files:
            types: Any = getattr(self._inner, "_target_types", ["segmentation"])
            kinds = [tv_tensors.Mask] if "segmentation" in types else []
        elif not is_test:
            has_boxes = ("bbox" if name in ("WIDERFace", "CelebA") else "boxes") in self._keys
            has_masks = name == "CocoDetection" and "masks" in self._keys
            kinds = [cast("type", tv_tensors.BoundingBoxes)] * has_boxes + [tv_tensors.Mask] * has_masks
        self.annotations = frozenset(kinds)
        self.has_target_files = tv_tensors.Mask in kinds
        self.draws_targets = self._target_transform is not None

    def __reduce__(self) -> Any:
        return WrappedFiles, (self._dataset, True)

    def target(self, row: int) -> Any:
        """Return the target of a sample."""
        size = np.array([image_size(self.name(row))]) if self.annotations else np.ones((1, 2), np.int64)
        return decode_masks(self.annotated_targets(np.array([row]), size)[0])

    def annotated_targets(self, rows: IntArray, size: IntArray) -> list[Any]:
        """Return the targets of some samples, as torchvision's wrapper makes them. Mask files are read, not decoded."""
        return self.make_annotated_targets(rows, size, [None] * len(rows))

    def read_target_files(self, row: int) -> Any:
        """Return the target of a sample if it has mask files; the masks of its objects if it is one of COCO."""
        if self._class.has_mask_files:
            return self._wrap(row, (1, 1))
        about = self._inner.coco.loadImgs(self._inner.ids[row])[0]
        size = (about["height"], about["width"]) if {"height", "width"} <= {*about} else image_size(self.name(row))
        return size, read_objects(get_coco_target(self._inner, row), size)

    def make_annotated_targets(self, rows: IntArray, size: IntArray, files: Sequence[Any]) -> list[Any]:
        """Return the targets of some samples, of what :meth:`read_target_files` returned, or None."""
        targets: list[Any] = []
        for row, sides, known in zip(rows.tolist(), size.tolist(), files, strict=True):
            if known is None or not self._class.has_mask_files:
                known = self._wrap(row, tuple(sides), self._take_objects(row, tuple(sides), known))
            targets.append(self._target_transform(decode_masks(known)) if self._target_transform else known)
        return targets

    def _take_objects(self, row: int, size: tuple[int, int], known: Any) -> RunMasks | None:
        """Return the masks of COCO's objects. Read them again if the file says another size than the annotations."""
        if "masks" not in self._keys:
            return None
        return known[1] if known and known[0] == size else read_objects(get_coco_target(self._inner, row), size)

    def _wrap(self, row: int, size: tuple[int, int], runs: RunMasks | None = None) -> Any:
        target = self._class.get_target(self._inner, row)
        return wrap_sample(self._dataset, row, _Unread(*size), target, runs)[1]

    def box_columns(self, rows: IntArray, size: IntArray, files: Sequence[Any]) -> BoxColumns | None:
        """Return the targets of some samples with their boxes in one array, or None if only the wrapper makes them."""
        if self._target_transform or self._class.has_mask_files or not {"boxes", "labels"} <= self._keys:
            return None
        if type(self._inner) is datasets.CocoDetection:
            return self._coco_columns(rows, size, files)
        if self._keys != {"boxes", "labels"}:  # others may be lists, which the user may change
            return None
        parts = [self._read_arrays(row) for row in rows.tolist()]
        counts = np.array([len(boxes) for boxes, _ in parts], np.int64)
        targets: list[dict[str, Any]] = [dict.fromkeys(("boxes", "labels")) for _ in parts]
        boxes, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        return BoxColumns(targets, boxes, labels, counts, np.arange(len(parts)))

    def _read_arrays(self, row: int) -> tuple[Any, Any]:
        """Return the boxes and labels of a sample. Read the file of its annotations once."""
        if row not in self._cache:
            target = self._wrap(row, (1, 1))
            self._cache[row] = target["boxes"].as_subclass(torch.Tensor).numpy(), target["labels"].numpy()
        return self._cache[row]

    def _coco_columns(self, rows: IntArray, size: IntArray, files: Sequence[Any]) -> BoxColumns | None:
        inner, others = self._inner, self._keys - {"image_id", "boxes", "masks", "labels"}
        annotations: list[list[Any]] = [get_coco_target(inner, row) for row in rows.tolist()]
        targets: list[dict[str, Any]] = []
        try:
            for row, objects in zip(rows.tolist(), annotations, strict=True):
                target = {"image_id": inner.ids[row]} if "image_id" in self._keys or not objects else {}
                if objects:
                    target |= {key: None for key in ("boxes", "masks", "labels") if key in self._keys}
                    target |= {key: [each[key] for each in objects] for key in others}
                targets.append(target)
            flat = [each for objects in annotations for each in objects]
            boxes = np.array([each["bbox"] for each in flat])
            labels = np.array([each["category_id"] for each in flat])
        except (KeyError, ValueError):  # the wrapper says what is wrong
            return None
        counts = np.array([len(objects) for objects in annotations], np.int64)
        if boxes.shape[1:] != (4,) or boxes.dtype.kind not in "if" or labels.dtype.kind != "i" or labels.ndim != 1:
            return None
        if boxes.dtype.kind == "f":
            if _has_integers(boxes, counts, annotations):
                return None
            boxes = torch.from_numpy(boxes).to(torch.get_default_dtype()).numpy()
        boxes = np.concatenate((boxes[:, :2], boxes[:, :2] + boxes[:, 2:]), axis=1)
        owners = np.flatnonzero(counts)
        masks: dict[int, RunMasks] = {}
        for i in owners.tolist() if "masks" in self._keys else ():
            runs = self._take_objects(int(rows[i]), tuple(size[i].tolist()), files[i])
            if runs is None or runs.canvas != tuple(size[i].tolist()):
                return None
            masks[i] = runs
        return BoxColumns(targets, boxes, labels, counts[owners], owners, masks)


def _find_keys(dataset: Any, name: str) -> set[str]:
    """Return the keys of targets that the user asked for, or the types of targets of ``CelebA``."""
    if name == "CelebA":
        return set(dataset.target_type)
    keys: Any = dataset._target_keys  # noqa: SLF001 - torchvision's
    if name == "CocoDetection":
        return find_coco_keys(keys)
    if keys is None:
        return {"bbox"} if name == "WIDERFace" else {"boxes", "labels"}
    return {"boxes", "bbox", "labels", "annotation"} if keys == "all" else set(keys)


def _split_transforms(dataset: Any, name: str) -> tuple[Any, bool, Callable[[Any], Any] | None]:
    """Return the transforms of a dataset, whether they take whole samples, and the transform of targets."""
    joint: Any = dataset.transforms
    if type(joint) is not StandardTransform:
        if find_joint_chain(dataset) is None:
            raise UnsupportedDatasetError(
                f"{name} has transforms= that are not all of torchvision.transforms.v2; give them to the loader as "
                "transform="
            )
        return joint, True, None
    transform, target_transform = get_wrapped_transforms(dataset)
    rules = [find_rule(leaf) for leaf in flatten(transform)]
    if any(rule is None or rule.moves for rule in rules):
        left = "masks" if WRAPPED_CLASSES[name].has_mask_files else "boxes"
        raise UnsupportedDatasetError(
            f"{name} has a transform= that changes its images, and leaves {left} where they are; give it to the "
            "loader, or as transforms= to the dataset, to move both"
        )
    return transform, False, target_transform


def _has_integers(boxes: Any, counts: IntArray, annotations: list[list[Any]]) -> bool:
    """Return whether some samples have boxes of integers alone, which become another dtype, among boxes of floats."""
    whole = (boxes == np.trunc(boxes)).all(axis=1)
    ends = np.cumsum(counts).tolist()
    for end, count, objects in zip(ends, counts.tolist(), annotations, strict=True):
        if count and whole[end - count : end].all() and all(type(x) is int for each in objects for x in each["bbox"]):
            return True
    return False
