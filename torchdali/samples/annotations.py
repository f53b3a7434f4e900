"""Find the boxes, masks and key points of a sample, which move with its images, and the labels of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali.errors import TransformError
from torchdali.samples.tree import Tree, describe_sample, tree_leaves
from torchdali.transforms import flatten
from torchdali.transforms.targets.stored import StoredMasks

__all__ = ["Annotations", "LabelsGetters", "check_has_image", "find_annotations", "find_labels_getters"]

_KEY_POINTS = cast("tuple[type, ...]", tuple(filter(None, [getattr(tv_tensors, "KeyPoints", None)])))  # since 0.24
KINDS: tuple[type, ...] = (tv_tensors.BoundingBoxes, tv_tensors.Mask, *_KEY_POINTS)
"""Types of annotations that move with an image."""

_DROPPED = {"SanitizeBoundingBoxes": tv_tensors.BoundingBoxes}
if _KEY_POINTS:
    _DROPPED["SanitizeKeyPoints"] = _KEY_POINTS[0]

Leaves = list[tuple[str, Any]]
LabelsGetters = Sequence[tuple[type, Any]]
"""The ``labels_getter`` of each transform that drops boxes or key points, with the type of what it drops."""


def find_labels_getters(chain: Iterable[Any]) -> LabelsGetters:
    """Return the ``labels_getter`` of each transform that drops boxes or key points. Look into other transforms too."""
    getters: list[tuple[type, Any]] = []
    for leaf in chain:
        kind = _DROPPED.get(type(leaf).__name__) if isinstance(leaf, v2.Transform) else None
        if kind:
            getters.append((kind, leaf.labels_getter))
        getters += find_labels_getters(flatten(getattr(leaf, "transforms", None)))
    return getters


class Annotations(NamedTuple):
    """The annotations of a sample, with their key paths.

    Attributes:
        moved: Boxes, masks and key points.
        labels: Tensors that lose the rows of dropped boxes or key points.
        owners: For each of the labels, the number in ``moved`` of the boxes or key points that it belongs to.
    """

    moved: Leaves
    labels: Leaves
    owners: list[int]

    @property
    def kinds(self) -> set[type]:
        """Types of boxes, masks and key points."""
        return {_get_kind(leaf) for _, leaf in self.moved}

    def describe(self) -> str:
        """Return in words what there is and where, such as ``BoundingBoxes XYXY float32 at [1]['boxes']``."""
        texts = [f"{_describe_leaf(leaf)} at {path or 'the top'}" for path, leaf in self.moved]
        if self.labels:
            texts.append(f"with the rows of {', '.join(path for path, _ in self.labels)}")
        return ", ".join(texts)

    @property
    def leaves(self) -> Leaves:
        """All of them."""
        return [*self.moved, *self.labels]


def is_annotation(leaf: Any) -> bool:
    """Return True if torchvision's transforms change a part of a sample along with the image."""
    is_tensor = isinstance(leaf, tv_tensors.TVTensor) and not isinstance(leaf, (tv_tensors.Image, tv_tensors.Video))
    return is_tensor or isinstance(leaf, StoredMasks)


def _get_kind(leaf: Any) -> type:
    return cast("type", tv_tensors.Mask) if isinstance(leaf, StoredMasks) else type(leaf)


def check_has_image(sample: Tree) -> None:
    """Raise TransformError if a sample in which no image was found has an annotation."""
    for path, leaf in tree_leaves(sample):
        if is_annotation(leaf):
            raise TransformError(
                f"a sample has a {type(leaf).__name__} at {path or 'its top'} and no image was found in it; name the "
                f"image in images=; the sample is {describe_sample(sample)}"
            )


def find_annotations(sample: Tree, labels_getters: LabelsGetters = ()) -> Annotations:
    """Return the annotations of a sample.

    Args:
        sample: The sample.
        labels_getters: Of the transforms that will be applied to it.

    Raises:
        TransformError: An annotation is of a type that cannot be moved.
        ValueError: A transform cannot find the labels, or their number is not that of the boxes. The message is
            torchvision's.
    """
    leaves = list(tree_leaves(sample))
    moved = [(path, leaf) for path, leaf in leaves if is_annotation(leaf)]
    for path, leaf in moved:
        _check_kind(path, leaf)
    labels: Leaves = []
    owners: list[int] = []
    for kind, argument in labels_getters if moved else ():
        number = next((i for i, (_, leaf) in enumerate(moved) if isinstance(leaf, kind)), None)
        if number is None:  # the transform itself will say so
            continue
        found = _get_labels(sample.node, argument)
        for label in found:
            if len(label) != len(moved[number][1]):
                raise ValueError(
                    f"Number of boxes (shape={moved[number][1].shape}) must match the number of labels. Found labels "
                    f"with shape={label.shape}"
                )
        known = {id(leaf) for _, leaf in labels}
        named = {id(label) for label in found} - known
        new = [(path, leaf) for path, leaf in leaves if id(leaf) in named and not is_annotation(leaf)]
        labels += new
        owners += [number] * len(new)
    return Annotations(moved, labels, owners)


def _describe_leaf(leaf: Any) -> str:
    form = f" {leaf.format.name}" if isinstance(leaf, tv_tensors.BoundingBoxes) else ""
    return f"{_get_kind(leaf).__name__}{form} {str(leaf.dtype).removeprefix('torch.')}"


def _check_kind(path: str, leaf: Any) -> None:
    place = path or "its top"
    if isinstance(leaf, StoredMasks):
        return
    if type(leaf) not in KINDS:
        raise TransformError(
            f"a sample has a {type(leaf).__name__} at {place}, which transform= does not move with the image: put the "
            "transform into the dataset"
        )
    if leaf.layout != torch.strided or leaf.dtype not in _DTYPES:
        raise TransformError(
            f"a sample has a {type(leaf).__name__} of {leaf.dtype}, {leaf.layout}, at {place}; make it a dense tensor "
            f"of {', '.join(map(str, _DTYPES))}"
        )


_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.bool),
)
"""The dtypes that numpy has too."""


def _get_labels(sample: Any, argument: Any) -> list[torch.Tensor]:
    """Return what torchvision would take for labels in a sample."""
    transform: Any = v2.SanitizeBoundingBoxes(labels_getter=argument)
    labels: Any = transform._labels_getter(sample)  # noqa: SLF001 - torchvision's way to find labels
    found: list[Any] = list(cast("Any", labels)) if isinstance(labels, (tuple, list)) else [labels]
    found = [label for label in found if label is not None or len(found) > 1]
    for label in found:
        if not isinstance(label, torch.Tensor):
            raise ValueError(  # noqa: TRY004 - as torchvision
                f"The labels in the input to forward() must be a tensor or None, got {type(label)} instead."
            )
    return found
