"""Paste objects of other samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2 as annotated_v2

v2 = cast("Any", annotated_v2)
_functional, _wrap = v2.functional, cast("Any", tv_tensors.wrap)

Target = dict[str, Any]


class CopyPaste(v2.Transform):
    """Paste objects of one sample into another, by their masks (Ghiasi et al., "Simple Copy-Paste", CVPR 2021).

    It takes a batch, as ``v2.MixUp`` does: give it as ``batch_transform=`` of ``DALILoader``, or call it in the loop or
    in a ``collate_fn``. Each sample may get objects of the sample some places after it in the batch. What they cover is
    taken away from the masks of the others. Boxes follow the masks, and objects that nothing is left of are dropped.

    Args:
        p: Probability that a sample gets objects.
        share: Probability of each object of the other sample to be pasted.
        min_pixels: Objects of which fewer pixels stay visible are dropped.
        per_object: Names of the other entries of targets that have a row for each object. ``"area"`` follows the masks.

    Raises:
        ValueError: A probability is not from 0 to 1, or ``min_pixels`` is below 1.
    """

    def __init__(
        self,
        p: float = 0.5,
        share: float = 0.5,
        min_pixels: int = 1,
        per_object: Sequence[str] = ("labels", "area", "iscrowd"),
    ) -> None:
        super().__init__()
        if not 0 <= p <= 1 or not 0 <= share <= 1:
            raise ValueError(f"p and share must be probabilities, got {p!r} and {share!r}")
        if min_pixels < 1:
            raise ValueError(f"min_pixels must be at least 1, got {min_pixels!r}")
        self.p, self.share, self.min_pixels, self.per_object = float(p), float(share), min_pixels, tuple(per_object)

    def forward(self, images: Any, targets: Sequence[Mapping[str, Any]]) -> tuple[Any, list[Target]]:
        """Return images and targets.

        Args:
            images: ``(N, C, H, W)``, or a list of N images ``(C, H, W)`` of any sizes.
            targets: For each image a dictionary with ``"boxes"``, ``tv_tensors.BoundingBoxes`` or XYXY; ``"masks"``,
                ``(objects, H, W)``; and others.

        Raises:
            ValueError: Images and targets differ in number.
            TypeError: A target has no masks or no boxes, or has rotated boxes.
        """
        if len(images) != len(targets):
            raise ValueError(
                f"CopyPaste takes a target for each image, got {len(images)} images, {len(targets)} targets"
            )
        for target in targets:
            _check(target)
        count = len(images)
        shift = int(torch.randint(1, max(count, 2), ()))
        pasted: list[Any] = []
        changed: list[Target] = []
        for i, (image, target) in enumerate(zip(images, targets, strict=True)):
            other, source = images[(i + shift) % count], targets[(i + shift) % count]
            is_chosen = torch.rand(len(source["masks"])) < self.share
            if torch.rand(()) < self.p and count > 1 and is_chosen.any():
                image, target = self._paste(image, target, other, source, is_chosen)
            pasted.append(image)
            changed.append(dict(target))
        return (torch.stack(pasted) if isinstance(images, torch.Tensor) else pasted), changed

    def _paste(
        self, image: Any, target: Mapping[str, Any], other: Any, source: Mapping[str, Any], is_chosen: torch.Tensor
    ) -> tuple[Any, Target]:
        """Return an image and its target with some objects of another image."""
        size = list(image.shape[-2:])
        chosen = is_chosen.to(source["masks"].device)
        added = source["masks"].as_subclass(torch.Tensor)[chosen]
        if list(other.shape[-2:]) != size:
            other = _functional.resize(other, size, antialias=True)
            added = _functional.resize(added, size, interpolation=v2.InterpolationMode.NEAREST)
        old = target["masks"].as_subclass(torch.Tensor)
        is_covered = (added != 0).any(0)
        masks = torch.cat([old.masked_fill(is_covered, 0), added.to(old.dtype)])
        visible = (masks != 0).flatten(1).sum(1)
        is_kept = visible >= self.min_pixels
        before = torch.cat([(old != 0).flatten(1).sum(1), (source["masks"] != 0).flatten(1).sum(1)[chosen]])
        plain, there = image.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor)
        made: Target = {**target, "masks": _like(masks[is_kept], target["masks"])}
        boxes = _join_boxes(target["boxes"], source["boxes"], chosen, masks, visible != before)
        made["boxes"] = _like(boxes[is_kept], target["boxes"])
        for name in self.per_object:
            if name in target and name in source:
                values = torch.cat([target[name], source[name][chosen].to(target[name].dtype)])
                if name == "area":
                    values = torch.where(visible != before, visible.to(values.dtype), values)
                made[name] = _like(values[is_kept], target[name])
        return _like(torch.where(is_covered, there.to(plain.dtype), plain), image), made

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"p={self.p:g}, share={self.share:g}, min_pixels={self.min_pixels}"


def _check(target: Mapping[str, Any]) -> None:
    """Raise TypeError unless a target has masks, and boxes that are not rotated."""
    missing = [name for name in ("masks", "boxes") if not isinstance(target.get(name), torch.Tensor)]
    if missing:
        raise TypeError(f"CopyPaste needs masks and boxes in each target, and one has no {missing[0]}")
    if target["boxes"].shape[-1] != 4:
        raise TypeError("CopyPaste does not take rotated boxes: masks do not tell their angle")


def _like(value: torch.Tensor, other: Any) -> Any:
    """Return a tensor as the ``tv_tensors`` type of another one, if that has such."""
    return _wrap(value, like=other) if isinstance(other, tv_tensors.TVTensor) else value


def _join_boxes(
    ours: Any, theirs: Any, chosen: torch.Tensor, masks: torch.Tensor, is_changed: torch.Tensor
) -> torch.Tensor:
    """Return the boxes of old and added objects, in the format of the old ones. Changed masks give new boxes."""
    old = ours.as_subclass(torch.Tensor)
    form = ours.format if isinstance(ours, tv_tensors.BoundingBoxes) else tv_tensors.BoundingBoxFormat.XYXY
    their_form = theirs.format if isinstance(theirs, tv_tensors.BoundingBoxes) else tv_tensors.BoundingBoxFormat.XYXY
    convert = _functional.convert_bounding_box_format
    added = convert(theirs.as_subclass(torch.Tensor), old_format=their_form, new_format=form)[chosen]
    boxes = torch.cat([old, added.to(old.dtype)])
    found = convert(_find_boxes(masks), old_format=tv_tensors.BoundingBoxFormat.XYXY, new_format=form)
    return torch.where(is_changed[:, None], found.to(boxes.dtype), boxes)


def _find_boxes(masks: torch.Tensor) -> torch.Tensor:
    """Return ``(objects, 4)`` the XYXY corners around the pixels of masks."""
    sides: list[torch.Tensor] = []
    for axis in (1, 2):
        is_there = (masks != 0).any(axis)
        length = is_there.shape[1]
        first = is_there.float().argmax(1)
        last = length - is_there.flip(1).float().argmax(1)
        sides += [first, last]
    x_low, x_high, y_low, y_high = sides
    return torch.stack([x_low, y_low, x_high, y_high], 1).float()
