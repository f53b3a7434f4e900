"""The size of an image, from its header alone."""

from __future__ import annotations

import os

from torchdali.sources.headers.header import parse_header, read_header


def image_size(image: str | os.PathLike[str] | bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return height and width of an image in pixels, without decoding it.

    They are those of ``PIL.Image.open(image).size``, which turns only TIFFs by their orientation. DALI calls this
    ``peek_image_shape``.

    Args:
        image: The path of an image file, or its bytes.

    Raises:
        OSError: There is no such file, it cannot be read, or its format is unknown.
    """
    if isinstance(image, (bytes, bytearray, memoryview)):
        header = parse_header(memoryview(image).cast("B"))
    else:
        header = read_header(os.path.expanduser(os.fspath(image)))  # noqa: PTH111 - a path of bytes stays one
    return header.height, header.width
