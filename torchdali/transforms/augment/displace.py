"""Augmentations that take each pixel from another place of the image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.tv_tensors import BoundingBoxFormat

from torchdali.transforms.augment.base import Augmentation, Range, convert_to, parse_range, v2, wrap

Pair = tuple[torch.Tensor, torch.Tensor]
Size = tuple[int, int]
"""Height and width of an image."""

_TARGETS = (tv_tensors.BoundingBoxes, tv_tensors.Mask, getattr(tv_tensors, "KeyPoints", tv_tensors.Mask))
_STEPS = 64
"""Parts of the edge of a box, whose ends are moved."""
_ITERATIONS = 32


class Displacement(Augmentation):
    """The base class of transforms that move pixels. Boxes, masks and key points move with them.

    - A mask takes the nearest pixels, whatever the interpolation is. It is 0 outside of the image.
    - A key point moves to the place that is taken from where it was.
    - A box becomes the smallest box around the places to which its edges move, and is clamped by its clamping mode.

    Args:
        interpolation: ``InterpolationMode.NEAREST`` or ``BILINEAR``.
        fill: Value of pixels that come from outside of the image.
    """

    _transformed_types = (*Augmentation._transformed_types, *_TARGETS)  # noqa: SLF001

    def __init__(self, interpolation: InterpolationMode = InterpolationMode.NEAREST, fill: float = 0.0) -> None:
        super().__init__()
        if interpolation not in (InterpolationMode.NEAREST, InterpolationMode.BILINEAR):
            raise ValueError(f"interpolation must be NEAREST or BILINEAR, got {interpolation!r}")
        self.interpolation, self.fill = interpolation, float(fill)

    @abstractmethod
    def find_sources(self, x: torch.Tensor, y: torch.Tensor, size: Size, params: Mapping[str, Any]) -> Pair:
        """Return x and y from which places of the result are taken; a pixel's centre is at .5."""

    @abstractmethod
    def find_places(self, x: torch.Tensor, y: torch.Tensor, size: Size, params: Mapping[str, Any]) -> Pair:
        """Return x and y of the places that are taken from somewhere: the inverse of :meth:`find_sources`."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Apply the transform to one input."""
        if not isinstance(inpt, _TARGETS):
            return super().transform(inpt, params)
        values = inpt.as_subclass(torch.Tensor)
        if isinstance(inpt, tv_tensors.BoundingBoxes):
            moved = self.move_boxes(values, inpt.format, inpt.canvas_size, inpt.clamping_mode, params)
        elif isinstance(inpt, tv_tensors.Mask):
            moved = self.move_mask(values, params)
        else:
            moved = self.move_points(values, inpt.canvas_size, params)
        return wrap(moved, like=inpt)

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        if self.interpolation is InterpolationMode.NEAREST:
            return self._take_nearest(image, params, self.fill)
        height, width = image.shape[-2:]
        x, y = self._find_grid(image, params)
        grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], -1)[None]
        values = image.reshape(1, -1, height, width).float() - self.fill
        moved = torch.nn.functional.grid_sample(values, grid, "bilinear", "zeros", align_corners=False) + self.fill
        return convert_to(moved.reshape(image.shape), image.dtype)

    def move_mask(self, mask: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        """Return moved masks, ``(..., H, W)``."""
        return self._take_nearest(mask, params, 0)

    def move_points(self, points: torch.Tensor, size: Size, params: Mapping[str, Any]) -> torch.Tensor:
        """Return moved key points, ``(..., 2)`` x and y; a pixel's centre is at 0."""
        places = points.double() + 0.5
        x, y = self.find_places(places[..., 0], places[..., 1], size, params)
        return (torch.stack((x, y), -1) - 0.5).to(points.dtype)

    def move_boxes(
        self, boxes: torch.Tensor, box_format: Any, size: Size, clamping_mode: Any, params: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return moved boxes, ``(N, 4)``.

        Raises:
            ValueError: They are rotated.
        """
        if tv_tensors.is_rotated_bounding_format(box_format):
            raise ValueError(
                f"boxes must not be rotated, because {type(self).__name__} bends their edges, got {box_format.value}; "
                "leave it out of this chain"
            )
        convert = v2.functional.convert_bounding_box_format
        left, top, right, bottom = convert(boxes.double(), box_format, BoundingBoxFormat.XYXY)[:, :, None].unbind(1)
        share = torch.linspace(0, 1, _STEPS + 1, dtype=torch.float64)
        across, down = left + (right - left) * share, top + (bottom - top) * share
        x = torch.cat((across, across, left.expand_as(down), right.expand_as(down)), 1)
        y = torch.cat((top.expand_as(across), bottom.expand_as(across), down, down), 1)
        x, y = self.find_places(x, y, size, params)
        moved = torch.stack((x.amin(1), y.amin(1), x.amax(1), y.amax(1)), 1)
        moved = convert(moved, BoundingBoxFormat.XYXY, box_format)
        return v2.functional.clamp_bounding_boxes(
            moved, format=box_format, canvas_size=size, clamping_mode=clamping_mode
        ).to(boxes.dtype)

    def _take_nearest(self, image: torch.Tensor, params: Mapping[str, Any], fill: float) -> torch.Tensor:
        height, width = image.shape[-2:]
        x, y = self._find_grid(image, params)
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        moved = image[..., y.floor().long().clamp(0, height - 1), x.floor().long().clamp(0, width - 1)]
        return moved.masked_fill(~inside, fill)

    def _find_grid(self, image: torch.Tensor, params: Mapping[str, Any]) -> Pair:
        """Return ``(H, W)`` x and y of the places that the pixels of an image are taken from."""
        height, width = image.shape[-2:]
        x, y = torch.arange(width)[None] + 0.5, torch.arange(height)[:, None] + 0.5
        x, y = self.find_sources(x, y, (height, width), params)
        return x.to(image.device), y.to(image.device)


class Water(Displacement):
    """Move pixels along waves, as seen through water.

    A pixel (x, y) comes from ``(x + amplitude_x * sin(frequency_x * y + phase_x),
    y + amplitude_y * cos(frequency_y * x + phase_y))``. Waves that are so steep that they fold the image show some of
    its places several times. A key point then moves to a place within the amplitude.

    Args:
        amplitude: Height of the waves in pixels, along x and y.
        frequency: Angle in radians by which a wave advances in a pixel, along x and y.
        phase: Angle in radians at the first pixel, or its range. It is drawn for each of the two axes.
        interpolation: ``InterpolationMode.NEAREST`` or ``BILINEAR``.
        fill: Value of pixels that come from outside of the image.
    """

    drawn = ("phase_x", "phase_y")

    def __init__(
        self,
        amplitude: tuple[float, float] = (10.0, 10.0),
        frequency: tuple[float, float] = (0.049087, 0.049087),
        phase: Range = 0.0,
        interpolation: InterpolationMode = InterpolationMode.NEAREST,
        fill: float = 0.0,
    ) -> None:
        super().__init__(interpolation, fill)
        self.amplitude = tuple(float(x) for x in amplitude)
        self.frequency = tuple(float(x) for x in frequency)
        self.phase_x = self.phase_y = parse_range("phase", phase)

    def _find_waves(self, x: torch.Tensor, y: torch.Tensor, params: Mapping[str, Any]) -> Pair:
        across = self.amplitude[0] * torch.sin(self.frequency[0] * (y - 0.5) + params["phase_x"])
        return across, self.amplitude[1] * torch.cos(self.frequency[1] * (x - 0.5) + params["phase_y"])

    def find_sources(self, x: torch.Tensor, y: torch.Tensor, size: Size, params: Mapping[str, Any]) -> Pair:
        """See :class:`Displacement`. As in DALI, the waves start at a pixel's corner, not at its centre."""
        across, down = self._find_waves(x, y, params)
        return x - 0.5 + across, y - 0.5 + down

    def find_places(self, x: torch.Tensor, y: torch.Tensor, size: Size, params: Mapping[str, Any]) -> Pair:
        """See :class:`Displacement`. Each step reduces the error by amplitudes times frequencies, or better."""
        to_x, to_y = x, y
        for _ in range(_ITERATIONS):
            across, down = self._find_waves(to_x, to_y, params)
            to_x, to_y = x + 0.5 - across, y + 0.5 - down
        return to_x, to_y


class Sphere(Displacement):
    """Bend the image over a sphere, as DALI's ``sphere``.

    Args:
        interpolation: ``InterpolationMode.NEAREST`` or ``BILINEAR``.
        fill: Value of pixels that come from outside of the image.
    """

    def find_sources(self, x: torch.Tensor, y: torch.Tensor, size: Size, params: Mapping[str, Any]) -> Pair:
        height, width = size
        x, y = x - width / 2, y - height / 2
        radius = torch.sqrt(x * x + y * y) / int(max(size) / 2)
        return width / 2 + radius * x, height / 2 + radius * y

    def find_places(self, x: torch.Tensor, y: torch.Tensor, size: Size, params: Mapping[str, Any]) -> Pair:
        height, width = size
        x, y = x - width / 2, y - height / 2
        # find_sources squares the distance from the middle, as a share of the greatest.
        factor = torch.sqrt(int(max(size) / 2) / torch.sqrt(x * x + y * y).clamp(min=1e-12))
        return width / 2 + factor * x, height / 2 + factor * y


class Jitter(Displacement):
    """Take each pixel from a random place nearby. Boxes and key points stay where they are, and masks move.

    Args:
        degree: The place is at most half as many pixels away, rounded down, along each axis.
        fill: Value of pixels that come from outside of the image.
    """

    def __init__(self, degree: int = 2, fill: float = 0.0) -> None:
        super().__init__(fill=fill)
        if degree < 0:
            raise ValueError(f"degree must be 0 or more, got {degree}")
        self.degree = int(degree)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw how far away each pixel is taken, ``(2, H, W)``: down and across."""
        half = self.degree // 2
        return {"moves": torch.randint(-half, half + 1, (2, *v2._utils.query_size(flat_inputs)))}  # noqa: SLF001

    def find_sources(self, x: torch.Tensor, y: torch.Tensor, size: Size, params: Mapping[str, Any]) -> Pair:
        """See :class:`Displacement`. ``x`` and ``y`` are the centres of all pixels."""
        down, across = params["moves"]
        return x + across, y + down

    def find_places(self, x: torch.Tensor, y: torch.Tensor, size: Size, params: Mapping[str, Any]) -> Pair:
        return x, y
