"""Augmentations that compute each pixel from its neighbours."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from torchdali.transforms.augment.base import Augmentation

_functional = cast("Any", torch.nn.functional)
_BINS = 256
_COMPARABLE = {torch.bool: torch.uint8, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Types for which torch has no minimum or median, and types that hold their values."""

_Reduction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Window(Augmentation):
    """The base class of filters with a window. Pixels outside of the image are those of its edge, repeated.

    Args:
        size: Height and width of the window, or one number for both. They are odd.
    """

    def __init__(self, size: int | tuple[int, int] = 3) -> None:
        super().__init__()
        self.size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        if any(side < 1 or side % 2 == 0 for side in self.size):
            raise ValueError(f"size must be odd numbers of pixels, got {size!r}")

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        (height, width), (down, across) = image.shape[-2:], (side // 2 for side in self.size)
        rows = torch.arange(-down, height + down, device=image.device).clamp(0, height - 1)
        columns = torch.arange(-across, width + across, device=image.device).clamp(0, width - 1)
        values = image.to(_COMPARABLE.get(image.dtype, image.dtype))
        return self.filter(values.index_select(-2, rows).index_select(-1, columns)).to(image.dtype)

    @abstractmethod
    def filter(self, padded: torch.Tensor) -> torch.Tensor:
        """Return the filtered images.

        Args:
            padded: ``(..., H, W)``, with half a window more on each side.
        """


def _reduce(function: _Reduction, values: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return the largest or the smallest values of windows.

    Args:
        function: ``torch.maximum`` or ``torch.minimum``.
        values: ``(..., H, W)``.
        size: Height and width of the window.
    """
    for axis, side in zip((-2, -1), size, strict=True):
        done = 1
        while done < side:  # a window of twice the length is two windows
            step = min(done, side - done)
            length = values.shape[axis] - step
            values, done = function(values.narrow(axis, 0, length), values.narrow(axis, step, length)), done + step
    return values


class Dilate(_Window):
    """Replace each value by the largest in a window, for each channel.

    Args:
        size: Height and width of the window, or one number for both. They are odd.
    """

    def filter(self, padded: torch.Tensor) -> torch.Tensor:
        return _reduce(torch.maximum, padded, self.size)


class Erode(_Window):
    """Replace each value by the smallest in a window, for each channel.

    Args:
        size: Height and width of the window, or one number for both. They are odd.
    """

    def filter(self, padded: torch.Tensor) -> torch.Tensor:
        return _reduce(torch.minimum, padded, self.size)


class MedianBlur(_Window):
    """Replace each value by the median of a window, for each channel. The edge of the image is repeated.

    Args:
        size: Height and width of the window, or one number for both. They are odd.
    """

    def filter(self, padded: torch.Tensor) -> torch.Tensor:
        if self.size == (3, 3):
            return _find_median_of_nine(padded)
        windows = padded.unfold(-2, self.size[0], 1).unfold(-2, self.size[1], 1)
        return windows.flatten(-2).median(-1).values


def _find_median_of_nine(padded: torch.Tensor) -> torch.Tensor:
    """Return the medians of windows of 3 x 3: a fiftieth of the time of sorting each window.

    The median of nine is the median of three: the largest of the columns' minima, the median of their medians, and the
    smallest of their maxima.
    """
    height, width = (side - 2 for side in padded.shape[-2:])
    least, middle, most = _sort_three(*(padded.narrow(-2, i, height) for i in range(3)))
    low, medium, high = ([part.narrow(-1, i, width) for i in range(3)] for part in (least, middle, most))
    candidates = _sort_three(*low)[2], _sort_three(*medium)[1], _sort_three(*high)[0]
    return _sort_three(*candidates)[1]


def _sort_three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = torch.minimum(a, b), torch.maximum(a, b)
    b, c = torch.minimum(b, c), torch.maximum(b, c)
    return torch.minimum(a, b), torch.maximum(a, b), c


class CLAHE(Augmentation):
    """Equalize the contrast of tiles: contrast limited adaptive histogram equalization, for each channel of its own.

    The result is that of OpenCV's ``createCLAHE``, and of DALI's ``clahe`` on the CPU. For colours that stay natural,
    apply it to the luma of an image alone.

    Args:
        tiles: Number of tiles down and across, or one number for both.
        clip: A tile's histogram is cut at this multiple of its mean.
    """

    def __init__(self, tiles: int | tuple[int, int] = 8, clip: float = 2.0) -> None:
        super().__init__()
        self.tiles = (tiles, tiles) if isinstance(tiles, int) else (int(tiles[0]), int(tiles[1]))
        self.clip = float(clip)
        if min(self.tiles) < 1 or self.clip <= 0:
            raise ValueError(f"tiles must be 1 or more and clip above 0, got {tiles!r} and {clip!r}")

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        if image.dtype != torch.uint8:
            raise TypeError(f"an image must be uint8, got {image.dtype}")
        if any(side <= tiles for side, tiles in zip(image.shape[-2:], self.tiles, strict=True)):
            raise ValueError(
                f"an image must be larger than the number of CLAHE's tiles, {self.tiles}, got {tuple(image.shape[-2:])}"
            )
        channels = [self._equalize(channel) for channel in image.reshape(-1, *image.shape[-2:])]
        return torch.stack(channels).reshape(image.shape)

    def _equalize(self, image: torch.Tensor) -> torch.Tensor:
        """Return one channel, ``(H, W)``."""
        (height, width), (down, across) = image.shape, self.tiles
        # OpenCV mirrors the image up to a multiple of the tiles: both axes, also if only one is no multiple.
        padding = (0, across - width % across, 0, down - height % down)
        padding = padding if height % down or width % across else (0, 0, 0, 0)
        padded = _functional.pad(image[None, None].float(), padding, mode="reflect")[0, 0].long()
        tile = padded.shape[0] // down, padded.shape[1] // across
        tables = self._make_tables(padded.unfold(0, tile[0], tile[0]).unfold(1, tile[1], tile[1]).flatten(2))
        lower_y, upper_y, weight_y = _find_neighbours(height, tile[0], down, image.device)
        lower_x, upper_x, weight_x = _find_neighbours(width, tile[1], across, image.device)
        values = image.long()

        def look_up(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            return tables[rows[:, None], columns[None], values]

        top = look_up(lower_y, lower_x) * (1 - weight_x) + look_up(lower_y, upper_x) * weight_x
        bottom = look_up(upper_y, lower_x) * (1 - weight_x) + look_up(upper_y, upper_x) * weight_x
        mixed = top * (1 - weight_y[:, None]) + bottom * weight_y[:, None]
        return mixed.round().clamp(0, 255).to(torch.uint8)

    def _make_tables(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return the table of new values of each tile, ``(down, across, 256)``, from its pixels."""
        area = tiles.shape[-1]
        counts = torch.zeros(*tiles.shape[:2], _BINS, dtype=torch.int64, device=tiles.device)
        counts = counts.scatter_add(2, tiles, torch.ones_like(tiles))
        limit = max(int(self.clip * area / _BINS), 1)
        excess = (counts - limit).clamp(min=0).sum(-1, keepdim=True)
        counts = counts.clamp(max=limit) + excess // _BINS
        # What is left goes to bins at equal distances.
        left = excess % _BINS
        step = (_BINS // left.clamp(min=1)).clamp(min=1)
        bins = torch.arange(_BINS, device=tiles.device)
        counts = counts + ((bins % step == 0) & (bins // step < left)).long()
        return (counts.cumsum(-1).float() * ((_BINS - 1) / area)).round().clamp(0, 255)


def _find_neighbours(
    length: int, tile: int, tiles: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each pixel of an axis the tiles before and after it, and the weight of the second."""
    place = torch.arange(length, dtype=torch.float32, device=device) * (1 / tile) - 0.5
    lower = place.floor()
    return lower.long().clamp(min=0), (lower.long() + 1).clamp(max=tiles - 1), place - lower
