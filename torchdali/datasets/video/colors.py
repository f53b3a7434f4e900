"""Colours of video frames: from the luma and chroma that an engine decodes, to the RGB that PyAV makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["NV12", "cut", "find_colors"]

_WEIGHTS = {
    1: (0.2126, 0.0722),  # BT.709
    2: (0.299, 0.114),  # not told: FFmpeg takes BT.601
    4: (0.30, 0.11),  # FCC
    5: (0.299, 0.114),  # BT.601, 625 lines
    6: (0.299, 0.114),  # BT.601, 525 lines
    7: (0.212, 0.087),  # SMPTE 240M
    9: (0.2627, 0.0593),  # BT.2020
    10: (0.2627, 0.0593),  # BT.2020 of constant luminance: FFmpeg takes the same
}
"""By FFmpeg's number of a colour space, the weights of red and blue in the luma. Source: ITU-T H.273, table 4."""

_FULL = 2
"""FFmpeg's number of the range from 0 to 255. In others luma goes from 16 to 235, and chroma from 16 to 240."""

_CHUNK = 2**22
"""Pixels that are converted at once. Each takes 24 bytes meanwhile."""


@dataclass(frozen=True)
class NV12:
    """What turns NV12 frames into RGB: ``rgb = scale * luma + u * blue + v * red + offset``, rounded down.

    Attributes:
        scale: The factor of the luma.
        blue: For red, green and blue, the factor of the first chroma value.
        red: For red, green and blue, the factor of the second chroma value.
        offset: For red, green and blue, what is added.
    """

    scale: float
    blue: tuple[float, float, float]
    red: tuple[float, float, float]
    offset: tuple[float, float, float]

    def convert(self, frames: torch.Tensor) -> torch.Tensor:
        """Return ``(T, H, W, 3)`` uint8 RGB of ``(T, H * 3 / 2, W)`` uint8 NV12 frames.

        A chroma value is that of four pixels, as FFmpeg takes it. The result differs from PyAV's by at most 2 levels.

        Raises:
            ValueError: The height or width of the frames is odd.
        """
        count, rows, width = frames.shape
        height = rows * 2 // 3
        if rows % 3 or height % 2 or width % 2:
            raise ValueError(f"NV12 frames must have an even height and width, got {height}x{width}")
        pixels = torch.empty(count, height, width, 3, dtype=torch.uint8, device=frames.device)
        blue, red, offset = _copy_factors(self, frames.device)
        step = max(_CHUNK // (height * width), 1)
        for first in range(0, count, step):
            part = frames[first : first + step]
            shape = len(part), height // 2, 2, width // 2, 2
            luma = part[:, :height].view(*shape, 1)
            chroma = part[:, height:].reshape(len(part), height // 2, 1, width // 2, 1, 2).float()
            color = torch.addcmul(torch.addcmul(offset, chroma[..., :1], blue), chroma[..., 1:], red)
            rgb = torch.add(color, luma, alpha=self.scale)
            pixels[first : first + step].view(*shape, 3).copy_(rgb.clamp_(0, 255))
        return pixels


def cut(frames: torch.Tensor, top: int, left: int, bottom: int, right: int) -> torch.Tensor:
    """Return ``(T, h * 3 / 2, w)`` what a box shows of ``(T, H * 3 / 2, W)`` NV12 frames.

    Raises:
        ValueError: A side of the box is odd: four pixels share their chroma.
    """
    if any(side % 2 for side in (top, left, bottom, right)):
        raise ValueError(f"a box of NV12 frames must have even sides, got {(top, left, bottom, right)}")
    height = frames.shape[1] * 2 // 3
    luma, chroma = frames[:, top:bottom, left:right], frames[:, height + top // 2 : height + bottom // 2, left:right]
    return torch.cat((luma, chroma), 1)


@cache
def _copy_factors(colors: NV12, device: torch.device) -> torch.Tensor:
    return torch.tensor([colors.blue, colors.red, colors.offset], device=device)


def find_colors(space: int, color_range: int) -> NV12 | None:
    """Return what converts frames as PyAV does; None if it is not known.

    Args:
        space: FFmpeg's number of the colour space.
        color_range: FFmpeg's number of the range.
    """
    if space not in _WEIGHTS:
        return None
    of_red, of_blue = _WEIGHTS[space]
    of_green = 1 - of_red - of_blue
    is_full = color_range == _FULL
    black, scale, chroma = (0.0, 1.0, 1.0) if is_full else (16.0, 255 / 219, 255 / 224)
    blue, red = 2 * (1 - of_blue) * chroma, 2 * (1 - of_red) * chroma
    blues = (0.0, -blue * of_blue / of_green, blue)
    reds = (red, -red * of_red / of_green, 0.0)
    # FFmpeg rounds down each product, so green, the sum of three, is half a level darker.
    lost = [0.0 if is_full else 0.5] * 3
    lost[1] += 0.5
    offsets = [-scale * black - 128 * (b + r) - low for b, r, low in zip(blues, reds, lost, strict=True)]
    return NV12(scale, blues, reds, (offsets[0], offsets[1], offsets[2]))
