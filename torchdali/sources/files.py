"""The datasets whose samples are an RGB image file and a target, and where each of them keeps its samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchvision import datasets
from torchvision.datasets.folder import pil_loader
from torchvision.datasets.vision import StandardTransform

from torchdali.errors import UnsupportedDatasetError

__all__ = ["FILE_CLASSES", "check_joint_transform", "get_attributes", "get_loader", "get_pairs"]

_FILES_AND_LABELS = ("_image_files", "_labels")

FILE_CLASSES: dict[type[Any], tuple[str, ...]] = {
    datasets.DatasetFolder: ("samples",),  # also ImageFolder, ImageNet, EuroSAT and Country211
    datasets.CLEVRClassification: _FILES_AND_LABELS,
    datasets.DTD: _FILES_AND_LABELS,
    datasets.FGVCAircraft: _FILES_AND_LABELS,
    datasets.Flowers102: _FILES_AND_LABELS,
    datasets.Food101: _FILES_AND_LABELS,
    datasets.GTSRB: ("_samples",),
    datasets.INaturalist: ("index",),
    datasets.Imagenette: ("_samples",),
    datasets.LFWPeople: ("data", "targets"),
    datasets.OxfordIIITPet: ("_images", "_labels", "_bin_labels"),
    datasets.Places365: ("imgs",),
    datasets.RenderedSST2: ("_samples",),
    datasets.StanfordCars: ("_samples",),
    datasets.SUN397: _FILES_AND_LABELS,
}
"""The classes that define ``__getitem__``, and the attributes of paths and targets; one attribute holds pairs."""

_JOINT = (datasets.OxfordIIITPet, datasets.Places365)
"""The classes that call ``transforms`` and not ``transform``."""


def get_pairs(dataset: Any, base: type[Any]) -> list[tuple[Any, Any]]:
    """Return the path and the target of each sample of a dataset.

    Args:
        dataset: A dataset that fetches its samples as ``base`` does.
        base: One of :data:`FILE_CLASSES`.
    """
    if base is datasets.INaturalist:
        return _get_inaturalist_pairs(dataset)
    if base is datasets.OxfordIIITPet:
        return list(zip(dataset._images, _get_pet_targets(dataset), strict=True))  # noqa: SLF001 - torchvision's
    columns = [getattr(dataset, name) for name in FILE_CLASSES[base]]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def get_attributes(dataset: Any, base: type[Any]) -> list[Any]:
    """Return the objects, other than samples, that decide what a dataset's samples are."""
    parts = [dataset.transform, dataset.target_transform, get_loader(dataset, base)]
    if base in _JOINT:
        joint = dataset.transforms
        parts += [joint, getattr(joint, "transform", None), getattr(joint, "target_transform", None)]
    if base is datasets.INaturalist:
        parts += [dataset.root, dataset.all_categories, dataset.categories_map, *dataset.target_type]
    if base is datasets.OxfordIIITPet:
        parts += dataset._target_types  # noqa: SLF001 - torchvision's
    return parts


def get_loader(dataset: Any, base: type[Any]) -> Callable[[Any], Any] | None:
    """Return what opens the files of a dataset; None if their images are not converted to RGB."""
    if base in (datasets.GTSRB, datasets.OxfordIIITPet):
        return pil_loader  # in effect: they have no loader, and convert to RGB
    if base is datasets.LFWPeople:
        return dataset._loader  # noqa: SLF001 - torchvision's
    # Before torchvision 0.24 some classes have no loader. INaturalist then keeps the mode; the others convert to RGB.
    # Remove the default when 0.24 is required: https://github.com/pytorch/vision/issues/8762.
    return getattr(dataset, "loader", None if base is datasets.INaturalist else pil_loader)


def check_joint_transform(dataset: Any, base: type[Any]) -> None:
    """Raise where samples are transformed by something else than ``transform`` and ``target_transform``."""
    if base not in _JOINT:
        return
    joint: Any = dataset.transforms
    calls: tuple[Any, Any] = (
        (joint.transform, joint.target_transform) if joint.__class__ is StandardTransform else (joint, None)
    )
    if calls[0] is not dataset.transform or calls[1] is not dataset.target_transform:
        raise UnsupportedDatasetError(
            f"{type(dataset).__name__} must have its transforms as transform= and target_transform=, got "
            f"transforms={joint}; do not give transforms=, and assign no transform afterwards"
        )


def _get_inaturalist_pairs(dataset: Any) -> list[tuple[Any, Any]]:
    folders = [f"{Path(dataset.root, name)}/" for name in dataset.all_categories]
    kinds = dataset.target_type
    names: list[Any] = [
        [i if kind == "full" else dataset.categories_map[i][kind] for kind in kinds] for i in range(len(folders))
    ]
    targets = [tuple(name) if len(kinds) > 1 else name[0] for name in names]
    return [(folders[category] + file, targets[category]) for category, file in dataset.index]


def _get_pet_targets(dataset: Any) -> list[Any]:
    columns: list[list[Any]] = []
    for kind in dataset._target_types:  # noqa: SLF001 - torchvision's
        if kind not in ("category", "binary-category"):
            raise UnsupportedDatasetError(
                f"{type(dataset).__name__} must have the target_types category or binary-category to be read without "
                f"being asked for samples, got {kind!r}"
            )
        columns.append(dataset._labels if kind == "category" else dataset._bin_labels)  # noqa: SLF001 - torchvision's
    if not columns:
        return [None] * len(dataset)
    return list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))
