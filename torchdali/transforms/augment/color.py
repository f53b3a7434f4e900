"""Augmentations of colours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch

from torchdali.transforms.augment.base import Augmentation, Range, convert_to, parse_range

_RGB_TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
_YIQ_TO_RGB: torch.Tensor = cast("Any", torch).linalg.inv(_RGB_TO_YIQ.double()).float()

# ITU-R BT.601, luma from 16 to 235: https://www.itu.int/rec/R-REC-BT.601
_RGB_TO_YCBCR = torch.tensor(
    [
        [0.25678824, 0.50412941, 0.09790588],
        [-0.14822290, -0.29099279, 0.43921569],
        [0.43921569, -0.36778831, -0.07142737],
    ]
)
_YCBCR_OFFSET = torch.tensor([16.0, 128.0, 128.0])


def _mix_channels(image: torch.Tensor, matrix: torch.Tensor, offset: Any = 0.0) -> torch.Tensor:
    """Return ``matrix @ pixel + offset`` for each pixel, of the image's type."""
    if image.shape[-3] != 3:
        raise ValueError(f"an image must have 3 channels, got {image.shape[-3]}")
    values = image if image.is_floating_point() else image.float()
    mixed = torch.einsum("ij,...jhw->...ihw", matrix.to(values), values)
    return convert_to(mixed + torch.as_tensor(offset).to(values).reshape(-1, 1, 1), image.dtype)


class ColorTwist(Augmentation):
    """Change hue, saturation, brightness and contrast by one linear map, as DALI's ``color_twist``.

    Hue and saturation change in YIQ. This is faster than torchvision's ``ColorJitter``, and gives other colours.

    Args:
        brightness: Factor, or its range.
        contrast: Factor, or its range. Grey (128, or 0.5 for floats) stays where it is before the brightness changes.
        saturation: Factor, or its range.
        hue: Angle in degrees, or its range.
    """

    drawn = ("brightness", "contrast", "saturation", "hue")

    def __init__(
        self, brightness: Range = 1.0, contrast: Range = 1.0, saturation: Range = 1.0, hue: Range = 0.0
    ) -> None:
        super().__init__()
        self.brightness = parse_range("brightness", brightness, 0)
        self.contrast = parse_range("contrast", contrast, 0)
        self.saturation = parse_range("saturation", saturation, 0)
        self.hue = parse_range("hue", hue)

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        half = 0.5 if image.is_floating_point() else 128.0
        brightness, contrast = params["brightness"], params["contrast"]
        matrix = brightness * contrast * _rotate_hue(params["hue"], params["saturation"])
        return _mix_channels(image, matrix, [(half - half * contrast) * brightness])


class HSV(Augmentation):
    """Change hue, saturation and value by one linear map, as DALI's ``hsv``.

    Args:
        hue: Angle in degrees, or its range.
        saturation: Factor, or its range.
        value: Factor, or its range.
    """

    drawn = ("hue", "saturation", "value")

    def __init__(self, hue: Range = 0.0, saturation: Range = 1.0, value: Range = 1.0) -> None:
        super().__init__()
        self.hue = parse_range("hue", hue)
        self.saturation = parse_range("saturation", saturation, 0)
        self.value = parse_range("value", value, 0)

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        return _mix_channels(image, params["value"] * _rotate_hue(params["hue"], params["saturation"]))


def _rotate_hue(degrees: float, saturation: float) -> torch.Tensor:
    """Return the matrix of RGB values that turns the hue and scales the saturation in YIQ."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[1, 0, 0], [0, cos, sin], [0, -sin, cos]])
    return _YIQ_TO_RGB @ turn @ torch.diag(torch.tensor([1.0, saturation, saturation])) @ _RGB_TO_YIQ


class ColorSpace(Augmentation):
    """Convert RGB images to another colour space.

    Args:
        space: ``"YCbCr"`` (BT.601, luma from 16 to 235) or ``"BGR"``.
    """

    def __init__(self, space: str) -> None:
        super().__init__()
        if space not in ("YCbCr", "BGR"):
            raise ValueError(f"space must be 'YCbCr' or 'BGR', got {space!r}; for grey images use v2.Grayscale")
        self.space = space

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        if self.space == "BGR":
            return image.flip(-3)
        white = 1.0 if not image.is_floating_point() else 255.0
        return _mix_channels(image, _RGB_TO_YCBCR, _YCBCR_OFFSET / white)


class BGR(ColorSpace):
    """Reverse the order of the channels of RGB images."""

    def __init__(self) -> None:
        super().__init__("BGR")


class LookupTable(Augmentation):
    """Replace each value of a uint8 image by an entry of a table.

    Args:
        values: 256 numbers. The image's element type becomes that of this tensor or array: uint8 or float32.
    """

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values: torch.Tensor = torch.as_tensor(values)
        if self.values.shape != (256,) or self.values.dtype not in (torch.uint8, torch.float32):
            raise ValueError(
                f"values must be 256 numbers of uint8 or float32, got {self.values.dtype} of shape "
                f"{tuple(self.values.shape)}"
            )

    def apply(self, image: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
        if image.dtype != torch.uint8:
            raise TypeError(f"an image must be uint8, got {image.dtype}")
        values: torch.Tensor = self.values.to(image.device)
        return values[image.long()]
