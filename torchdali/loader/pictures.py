"""Draw a batch as a grid of pictures, with the boxes, masks and key points of its targets."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.loader.twin import list_datasets
from torchdali.transforms import flatten

__all__ = ["draw_batch", "draw_part", "find_classes", "line_up", "make_title"]

_COLORS = ("#2ca02c", "#d62728", "#1f77b4", "#ff7f0e", "#9467bd", "#17becf", "#e377c2", "#bcbd22")
_MAX_CHANNELS = 4
_MAX_FRAMES = 4
_MAX_TITLE = 26
_WIDTH, _TITLE = 2.4, 0.2
"""Inches: the width of an image, and the height of its title."""
_MAX_SLOPE = 2.0
"""Height of the highest image by its width. A higher one is drawn smaller."""
_UNIT_RANGE_BOUND = 2.0
"""Floats below this are taken for values in [0, 1], others for grey levels of 255."""
_KEY_POINTS: Any = getattr(tv_tensors, "KeyPoints", ())
"""The class, which torchvision has from 0.23 on."""


@dataclass(frozen=True)
class Sample:
    """One picture of the grid.

    Attributes:
        image: The image: a tensor (C, H, W), or a PIL image. Of a video, some frames side by side.
        parts: The leaves of the sample's targets: tensors, numbers and strings.
        num_frames: The number of these frames; 1 for an image.
    """

    image: Any
    parts: list[Any]
    num_frames: int = 1


def draw_batch(loader: Any, batch: Any, max_images: int, file: str | os.PathLike[str] | None) -> None:
    """Draw the first images of a batch in a grid.

    Args:
        loader: The loader, whose ``Normalize`` is undone, and whose dataset may have names of ``classes``.
        batch: The batch.
        max_images: Maximum number of images.
        file: Where to save the picture. Without it pyplot gets a new figure, which notebooks show.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The batch has no images.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure" if file else "matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise ImportError("show_batch() needs matplotlib, which is not installed: pip install matplotlib") from error
    samples = split_batch(batch)[:max_images]
    if not samples:
        raise ValueError("show_batch() needs images in the batch, and found none")
    num_frames = max(sample.num_frames for sample in samples)
    columns = math.ceil(math.sqrt(len(samples)) / num_frames)
    rows = math.ceil(len(samples) / columns)
    normalizations, classes = _find_normalizations(loader), find_classes(loader.dataset)
    pictures = [to_pixels(sample.image, normalizations) for sample in samples]
    width, slope = _WIDTH * num_frames, max(picture.shape[0] / picture.shape[1] for picture in pictures)
    size = (width * columns, (width * min(slope, _MAX_SLOPE) + _TITLE) * rows)
    figure: Any = (
        figures.Figure(size, layout="constrained") if file else figures.figure(None, size, layout="constrained")
    )
    grid: Any = figure.subplots(rows, columns, squeeze=False).flat
    for axes, sample, pixels in zip(grid, samples, pictures, strict=False):
        axes.imshow(pixels, interpolation="nearest")
        for part in sample.parts:
            draw_part(axes, part, pixels.shape[:2])
        # A class may be named with a dollar sign, which is no formula.
        axes.set_title(make_title(sample.parts, classes), fontsize=9, parse_math=False)
    for axes in figure.axes:
        axes.axis("off")
    if file:
        figure.savefig(file)


def split_batch(batch: Any) -> list[Sample]:
    """Return the samples of a batch. The first part that looks like images is taken for the images.

    Images are a tensor (N, C, H, W), or a list of tensors (C, H, W) or PIL images. The batch may also be a list of
    samples, as a ``collate_fn`` returns that collates nothing. Several images of a sample are drawn as its first one.
    Frames of a video stand side by side.
    """
    if _is_list(batch) and batch and all(_is_sample(sample) for sample in batch):
        return [Sample(*_split_sample(sample)) for sample in batch]
    images = next(_find_images(batch), None)
    if images is None:
        return []
    pictures = [line_up(image) for image in images]
    others = [part for part in _list_parts(batch) if not _is_images(part)]
    return [
        Sample(picture, [leaf for part in others for leaf in _list_leaves(_select(part, i, len(pictures)))], count)
        for i, (picture, count) in enumerate(pictures)
    ]


def to_pixels(image: Any, normalizations: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> np.ndarray[Any, Any]:
    """Convert an image to ``(H, W, 3)``, float32 from 0 to 1, without its normalizations."""
    if isinstance(image, PIL.Image.Image):
        image = F.pil_to_tensor(image.convert("RGB"))
    pixels: torch.Tensor = image.detach().as_subclass(torch.Tensor).cpu()
    if not pixels.dtype.is_floating_point:
        pixels = pixels.float() / (1 if pixels.dtype == torch.bool else torch.iinfo(pixels.dtype).max)
    else:
        pixels = pixels.float()
        for mean, std in reversed(normalizations):
            if len(mean) in (1, len(pixels)):
                pixels = pixels * std + mean
        if pixels.nan_to_num().abs().max() >= _UNIT_RANGE_BOUND and not normalizations:
            pixels = pixels / 255
    pixels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return pixels.nan_to_num().clamp(0, 1).permute(1, 2, 0).numpy()


def _find_normalizations(loader: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the mean and the standard deviation of each ``Normalize`` of a loader, in order."""
    chain: list[Any] = []
    for dataset in reversed(list_datasets(loader.dataset)):
        own = getattr(dataset, "transform", None)
        chain += flatten(own) if callable(own) else []
    return [
        (torch.tensor(transform.mean).float().view(-1, 1, 1), torch.tensor(transform.std).float().view(-1, 1, 1))
        for transform in [*chain, *flatten(loader.transform)]
        if isinstance(transform, (v1.Normalize, v2.Normalize))
    ]


def find_classes(dataset: Any) -> Sequence[Any]:
    """Return the names of a dataset's classes; empty if it has none."""
    for inner in list_datasets(dataset):
        classes: Any = getattr(inner, "classes", None)
        if _is_list(classes):
            return classes
    return ()


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_image(value: Any) -> bool:
    if isinstance(value, PIL.Image.Image):
        return True
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, (tv_tensors.Mask, tv_tensors.BoundingBoxes, _KEY_POINTS))
        and value.ndim == 3
        and len(value) <= _MAX_CHANNELS
        and min(value.shape) > 0
    )


def _is_images(value: Any) -> bool:
    """Return True for the images of a batch: a tensor, or a list with an image for each sample."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, tv_tensors.Mask) and value.ndim >= 4 and len(value) > 0
    return _is_list(value) and len(value) > 0 and all(map(_is_image, value))


def _is_sample(value: Any) -> bool:
    """Return True for one sample: a tuple or dictionary with an image among its parts."""
    return isinstance(value, (list, tuple, Mapping)) and not _is_images(value) and any(map(_is_image, _values(value)))


def _values(value: Any) -> list[Any]:
    return list(cast("Mapping[Any, Any]", value).values() if isinstance(value, Mapping) else value)


def _split_sample(sample: Any) -> tuple[Any, list[Any]]:
    parts = _values(sample)
    image = next(filter(_is_image, parts))
    return image, [leaf for part in parts if part is not image for leaf in _list_leaves(part)]


def _find_images(value: Any) -> Iterator[Any]:
    if _is_images(value):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for part in _values(value):
            yield from _find_images(part)


def line_up(image: Any) -> tuple[Any, int]:
    """Return an image as it is, or frames of a video at equal distances side by side; and how many these are."""
    while isinstance(image, torch.Tensor) and image.ndim > 4:
        image = image[0]
    if not isinstance(image, torch.Tensor) or image.ndim == 3:
        return image, 1
    count = min(len(image), _MAX_FRAMES)
    chosen: list[int] = np.linspace(0, len(image) - 1, count).astype(int).tolist()
    return torch.cat([image[i] for i in chosen], -1), count


def _list_parts(batch: Any) -> list[Any]:
    """Return the parts of a collated batch beside which the images are."""
    if isinstance(batch, (list, tuple, Mapping)) and not _is_images(batch):
        return [inner for part in _values(batch) for inner in (_list_parts(part) if _has_images(part) else [part])]
    return [batch]


def _has_images(part: Any) -> bool:
    return next(_find_images(part), None) is not None


def _select(part: Any, index: int, count: int) -> Any:
    """Return one sample's share of a collated part; None if it has none."""
    if isinstance(part, torch.Tensor):
        if not part.ndim or len(part) != count:
            return None
        wrap: Any = tv_tensors.wrap
        return wrap(part[index], like=part) if isinstance(part, tv_tensors.TVTensor) else part[index]
    if isinstance(part, Mapping):
        return [_select(value, index, count) for value in _values(part)]
    if _is_list(part):
        return part[index] if len(part) == count else [_select(value, index, count) for value in part]
    return None


def _list_leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, Mapping)):
        return [leaf for part in _values(value) for leaf in _list_leaves(part)]
    return [] if value is None else [value]


def make_title(parts: Sequence[Any], classes: Sequence[Any]) -> str:
    """Return the name of a sample's class, its label or its text; empty if it has none."""
    for part in parts:
        if isinstance(part, torch.Tensor) and part.numel() == 1 and not part.dtype.is_floating_point:
            part = int(part)
        elif isinstance(part, torch.Tensor) and part.ndim == 1 and part.dtype.is_floating_point and len(classes) > 1:
            part = int(part.argmax()) if len(part) == len(classes) else None  # MixUp's shares of each class
        if isinstance(part, int) and not isinstance(part, bool):
            part = str(classes[part]) if 0 <= part < len(classes) else str(part)
        if isinstance(part, str):
            return part if len(part) <= _MAX_TITLE else f"{part[: _MAX_TITLE - 3]}..."
    return ""


def draw_part(axes: Any, part: Any, size: tuple[int, ...]) -> None:
    """Draw boxes, a mask or key points over an image of this height and width."""
    if isinstance(part, tv_tensors.BoundingBoxes):
        corners = _find_corners(part)
        for i, corner in enumerate(corners):
            axes.fill(*corner.T, fill=False, edgecolor=_COLORS[i % len(_COLORS)], linewidth=1.5)
    elif isinstance(part, tv_tensors.Mask) and tuple(part.shape[-2:]) == size:
        axes.imshow(_color_mask(part.as_subclass(torch.Tensor).cpu().numpy()), interpolation="nearest")
    elif _KEY_POINTS and isinstance(part, _KEY_POINTS):
        for i, points in enumerate(part.as_subclass(torch.Tensor).cpu().float().reshape(len(part), -1, 2).numpy()):
            axes.plot(*points.T, ".", color=_COLORS[i % len(_COLORS)], markersize=8, markeredgecolor="white")


def _find_corners(boxes: tv_tensors.BoundingBoxes) -> np.ndarray[Any, Any]:
    """Return the corners of boxes, ``(K, 4, 2)``, each in x and y."""
    plain = boxes.as_subclass(torch.Tensor).detach().cpu().float()
    name = boxes.format.name
    if name in ("CXCYWHR", "XYWHR", "XYXYXYXY"):
        rotated = F.convert_bounding_box_format(plain, boxes.format, type(boxes.format)["XYXYXYXY"])
        return rotated.as_subclass(torch.Tensor).reshape(-1, 4, 2).numpy()
    converted = F.convert_bounding_box_format(plain, boxes.format, tv_tensors.BoundingBoxFormat.XYXY)
    return converted.as_subclass(torch.Tensor)[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2).numpy()


def _color_mask(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a mask as a half transparent picture ``(H, W, 4)``: a color for each object, or for each label but 0."""
    if mask.ndim == 3 and len(mask) == 1 and mask.max(initial=0) > 1:  # of classes, as mask files are
        mask = mask[0]
    if mask.ndim == 3:
        labels = np.zeros(mask.shape[1:], np.int64)
        for i, one in enumerate(mask, start=1):
            labels[one > 0] = i
    else:
        labels = np.where(mask == 255, 0, mask).astype(np.int64)
    colors = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in _COLORS]) / 255
    alpha = np.where(labels > 0, 0.5, 0)[..., None]
    return np.concatenate([colors[(labels - 1) % len(_COLORS)], alpha], axis=-1)
