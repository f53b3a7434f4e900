"""What a PIL image has besides pixels, so that torch's transforms and ``collate_fn`` get the image that they would."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import PIL.Image

__all__ = ["PILHeader", "read_pil_header", "restore_pil_image"]

_ONE_BYTE = {
    **dict.fromkeys(("L", "P"), 1),
    **dict.fromkeys(("LA", "La", "PA"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "HSV", "LAB"), 3),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK"), 4),
}
"""Channels of modes with one byte a channel."""


class PILHeader(NamedTuple):
    """Mode, palette, metadata, format and file name of a PIL image.

    Attributes:
        mode: Such as "RGB" or "P".
        info: ``Image.info``: EXIF, ICC profile, transparency.
        format: ``Image.format``; None for an image that was converted or made.
        palette: The mode of the palette and its bytes, for mode "P".
        filename: ``Image.filename``; None for an image that is of no file.
    """

    mode: str
    info: dict[Any, Any]
    format: str | None = None
    palette: tuple[str, bytes] | None = None
    filename: Any = None


def read_pil_header(image: PIL.Image.Image, converted: bool = False) -> PILHeader:
    """Return what an image has besides pixels.

    Args:
        image: The image. Its pixels need not be loaded.
        converted: Whether ``convert("RGB")`` comes next, as in torchvision's ``pil_loader``. It keeps ``info`` alone.
    """
    if converted:
        if image.mode != "RGB" and "transparency" in image.info:  # PIL makes a colour of a palette's number
            image = image.convert("RGB")
        return PILHeader("RGB", dict(image.info))
    palette: Any = image.palette if image.mode in ("P", "PA") else None
    colours = (palette.mode, bytes(palette.tobytes())) if palette else None
    return PILHeader(image.mode, dict(image.info), image.format, colours, getattr(image, "filename", None))


def restore_pil_image(image: PIL.Image.Image, header: PILHeader) -> PIL.Image.Image:
    """Return an image of pixels with its mode, palette, metadata, format and file name."""
    if header.mode == "1":
        image = image.convert("1", dither=PIL.Image.Dither.NONE)
    elif header.mode != image.mode and _has_same_bytes(image, header.mode):
        image = PIL.Image.frombytes(header.mode, image.size, image.tobytes())
    if header.palette:
        image.putpalette(header.palette[1], header.palette[0])
    image.info = dict(header.info)
    cast("Any", image).format = header.format
    if header.filename is not None:
        cast("Any", image).filename = header.filename
    return image


def _has_same_bytes(image: PIL.Image.Image, mode: str) -> bool:
    """Return whether an image of another mode is made of the same bytes. 16 and 32 bits have several orders."""
    return image.mode in _ONE_BYTE and mode in _ONE_BYTE and len(image.getbands()) == _ONE_BYTE[mode]
