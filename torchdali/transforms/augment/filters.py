"""Augmentations that compute each pixel from its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from torchdali.transforms.augment.base import Augmentation
from torchdali.transforms.augment.displace import Displacement

_functional = cast("Any", torch.nn.functional)
_BINS = 256


class _Window(Augmentation):
    """The base class of filters with a window.

    Args:
        size: Height and width of the window, or one number for both. They are odd.
    """

    def __init__(self, size: int | tuple[int, int] = 3) -> None:
        super().__init__()
        self.size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        if any(side < 1 or side % 2 == 0 for side in self.size):
            raise ValueError(f"size must be odd numbers of pixels, got {size!r}")

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        """See :class:`Augmentation`."""
        del params
        # float32 holds integers of up to 16 bits, and float64 others that images have.
        wide = image.dtype in (torch.int32, torch.int64, torch.uint32, torch.float64)
        values = image.reshape(-1, 1, *image.shape[-2:]).to(torch.float64 if wide else torch.float32)
        return self.filter(values).reshape(image.shape).to(image.dtype)

    def filter(self, values: torch.Tensor) -> torch.Tensor:
        """Return the filtered images, ``(N, 1, H, W)`` floats."""
        raise NotImplementedError

    @property
    def padding(self) -> tuple[int, int]:
        """Half the window, down and across."""
        return self.size[0] // 2, self.size[1] // 2


class Dilate(_Window):
    """Replace each value by the largest in a window, for each channel.

    Args:
        size: Height and width of the window, or one number for both. They are odd.
    """

    def filter(self, values: torch.Tensor) -> torch.Tensor:
        """See the base class. Pixels outside of the image do not count."""
        return _functional.max_pool2d(values, self.size, 1, self.padding)


class Erode(_Window):
    """Replace each value by the smallest in a window, for each channel.

    Args:
        size: Height and width of the window, or one number for both. They are odd.
    """

    def filter(self, values: torch.Tensor) -> torch.Tensor:
        """See the base class. Pixels outside of the image do not count."""
        return -_functional.max_pool2d(-values, self.size, 1, self.padding)


class MedianBlur(_Window):
    """Replace each value by the median of a window, for each channel. The edge of the image is repeated.

    Args:
        size: Height and width of the window, or one number for both. They are odd.
    """

    def filter(self, values: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        down, across = self.padding
        padded = _functional.pad(values, (across, across, down, down), mode="replicate")
        windows = padded.unfold(2, self.size[0], 1).unfold(3, self.size[1], 1)
        return windows.flatten(-2).median(-1).values


class Jitter(Displacement):
    """Take each pixel from a random place nearby.

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
        """Draw a seed for the moves of all images of the sample."""
        del flat_inputs
        return {"seed": int(torch.randint(2**63 - 1, ()))}

    def find_sources(self, height: int, width: int, params: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Displacement`."""
        half, generator = self.degree // 2, torch.Generator().manual_seed(params["seed"])
        down, across = torch.randint(-half, half + 1, (2, height, width), generator=generator)
        return torch.arange(width) + across + 0.5, torch.arange(height)[:, None] + down + 0.5


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
        """See :class:`Augmentation`."""
        del params
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
