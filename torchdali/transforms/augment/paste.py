"""Paste the image on a larger canvas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from torchvision import tv_tensors

from torchdali.transforms.augment.base import Range, draw_ranges, parse_range, v2
from torchdali.transforms.spec import IntArray


class Paste(v2.Transform):
    """Paste the image on a larger canvas, as DALI's ``paste``. Boxes, masks and key points move with it.

    It is ``v2.RandomZoomOut`` with a range for each number, applied to every sample. For some samples, put it into
    ``v2.RandomApply``.

    Args:
        ratio: The canvas's sides as a multiple of the image's, or its range. At least 1.
        x: Position of the image, from 0 for the left edge of the canvas to 1 for the right one, or its range.
        y: The same from top to bottom.
        fill: Value of the canvas, or one for each channel. Masks get 0.
        min_size: Smallest side of a canvas, in pixels.
    """

    drawn: ClassVar[tuple[str, ...]] = ("ratio", "x", "y")

    def __init__(
        self,
        ratio: Range = (1.0, 4.0),
        x: Range = (0.0, 1.0),
        y: Range = (0.0, 1.0),
        fill: float | Sequence[float] = 0.0,
        min_size: int = 0,
    ) -> None:
        super().__init__()
        self.ratio = parse_range("ratio", ratio, 1)
        self.x, self.y = parse_range("x", x, 0, 1), parse_range("y", y, 0, 1)
        values = tuple(fill) if isinstance(fill, Sequence) else (fill,)
        if not values or not all(isinstance(value, Real) for value in values):
            raise ValueError(f"fill must be a number, or a number for each channel, got {fill!r}")
        if min_size < 0:
            raise ValueError(f"min_size must be 0 or more, got {min_size!r}")
        self.fill = tuple(map(float, values)) if isinstance(fill, Sequence) else float(fill)
        self.min_size = int(min_size)

    def find_canvas(self, size: IntArray, numbers: Mapping[str, Any]) -> tuple[IntArray, IntArray]:
        """Return ``(N, 2)`` tops and lefts of the images, and ``(N, 2)`` sizes of the canvases.

        Args:
            size: ``(N, 2)`` sizes of the images.
            numbers: The drawn numbers, ``(N,)`` of each.
        """
        ratio, x, y = (np.asarray(numbers[name], np.float32) for name in self.drawn)  # as DALI computes
        canvas = np.maximum((size.astype(np.float32) * ratio[:, None]).astype(np.int64), self.min_size)
        return ((canvas - size).astype(np.float32) * np.stack((y, x), 1)).astype(np.int64), canvas

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a number from each range, and find the borders: left, top, right and bottom."""
        numbers = draw_ranges(self)
        size = np.array([v2._utils.query_size(flat_inputs)])  # noqa: SLF001
        start, canvas = self.find_canvas(size, {name: [number] for name, number in numbers.items()})
        after = canvas - size - start
        return {**numbers, "padding": [*start[0, ::-1].tolist(), *after[0, ::-1].tolist()]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Apply the transform to one input."""
        fill = 0.0 if isinstance(inpt, tv_tensors.Mask) else self.fill
        return self._call_kernel(v2.functional.pad, inpt, padding=params["padding"], fill=fill)
