"""An image of a sample, whatever it is given as, as what DALI can be fed with."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torchvision import tv_tensors

from torchdali.samples.on_error import limit_size
from torchdali.samples.pil import PILHeader, read_pil_header
from torchdali.sources import UNREADABLE, Header, error_text, is_system_fault, parse_header, read_header
from torchdali.transforms.spec import First, InputKind, Spec

__all__ = [
    "PIXEL_DTYPES",
    "ImageInput",
    "RefusedError",
    "StoredURL",
    "UnreadableError",
    "black",
    "ppm",
    "ppm_of",
    "to_image_input",
]

PIXEL_DTYPES = (
    *(torch.uint8, torch.float16, torch.float32, torch.float64),
    *(torch.int16, torch.uint16, torch.int32, torch.int64),
)
"""Of images that DALI is fed."""
_TENSOR_LIKE = ("L", "LA", "RGB", "RGBA", "I")
"""Modes of PIL images that can be made of tensors again, so that transforms see what torchvision shows them."""
_CONVERT = "of which transforms for PIL images make something else than transforms for tensors: begin with v2.ToImage()"

_open: Callable[..., Any] = PIL.Image.open
_Bytes = npt.NDArray[np.uint8]


class StoredURL(str):
    """The URL under which ``datasets.Image(decode=False)`` has a file, such as one in an archive or on the hub."""

    __slots__ = ()


class ImageInput(NamedTuple):
    """An image as it will be packed.

    Attributes:
        key: Spec and input kind. Images with equal keys share a pipeline.
        size: Height and width.
        data: Bytes of a file, or of its path, or HWC.
        header: Of the file that a path leads to.
        pil: What a PIL image has besides pixels.
    """

    key: tuple[Spec, InputKind]
    size: tuple[int, int]
    data: npt.NDArray[Any]
    header: Header | None = None
    pil: PILHeader | None = None


class RefusedError(Exception):
    """Why an image cannot be packed."""


class UnreadableError(RefusedError):
    """The same, because its file is missing or damaged.

    Args:
        reason: Why.
        size: Height and width, where that is known all the same.

    Attributes:
        size: Likewise; None also where PIL would not decode an image that large.
    """

    def __init__(self, reason: str, size: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.size = limit_size(size)


def to_image_input(leaf: Any, first: First = "conversion") -> ImageInput:
    """An image as it will be packed.

    Args:
        leaf: The image.
        first: What the transforms begin with.

    Raises:
        RefusedError: Why it cannot be.
    """
    if leaf is None:
        raise UnreadableError("no image was found in its place")
    if isinstance(leaf, PIL.Image.Image):
        if first == "RGB" and leaf.mode not in _TENSOR_LIKE:
            leaf = leaf.convert("RGB")  # as that transform does with a PIL image
        if first == "rule" and leaf.mode not in _TENSOR_LIKE:
            raise RefusedError(f"it is a PIL image of mode {leaf.mode!r}, {_CONVERT}, or convert it in the dataset")
        unread = _unread(leaf)
        image = _encoded(unread) if unread is not None else _pixels("pil", _pil_array(leaf))
        return image._replace(pil=read_pil_header(leaf))
    if isinstance(leaf, PurePath):
        return _file(leaf)
    if isinstance(leaf, StoredURL):
        return _encoded(_download(leaf))
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        return _encoded(np.frombuffer(cast("bytes", leaf), np.uint8))
    if isinstance(leaf, np.ndarray):
        array: npt.NDArray[Any] = cast("Any", leaf)
        if first in ("rule", "RGB") and array.dtype != np.uint8:
            raise RefusedError(f"it is an array of {array.dtype}, {_CONVERT}")
        return _encoded(np.ascontiguousarray(array)) if array.ndim == 1 else _pixels("array", array)
    tensor: torch.Tensor = leaf.detach()
    if tensor.ndim == 1:
        return _encoded(tensor.cpu().contiguous().numpy())
    if tensor.layout != torch.strided:
        raise RefusedError(f"it is a tensor of layout {tensor.layout}, not strided")
    if tensor.ndim != 3:
        raise RefusedError(f"it is a tensor of shape {tuple(tensor.shape)}, not (C, H, W)")
    if tensor.dtype not in PIXEL_DTYPES:
        raise _refused_dtype(tensor.dtype)
    kind = "image" if isinstance(leaf, tv_tensors.Image) else "tensor"
    return _pixels(kind, tensor.as_subclass(torch.Tensor).resolve_neg().permute(1, 2, 0).cpu().numpy())


def _file(path: PurePath) -> ImageInput:
    """A file that DALI decodes as PIL does, by its path; any other is decoded here, by PIL."""
    name = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
    try:
        header = read_header(name)
    except FileNotFoundError:
        raise UnreadableError("there is no such file") from None
    except UNREADABLE as error:
        if is_system_fault(error):
            raise
        raise UnreadableError(f"it cannot be read as an image ({error_text(error)})") from error
    if not header.native:
        return _encoded(np.fromfile(name, np.uint8))
    data = np.frombuffer(os.fsencode(name), np.uint8)
    return ImageInput((Spec(), InputKind.FILES), (header.height, header.width), data, header)


def _download(url: StoredURL) -> _Bytes:
    """Return the contents of a file that ``datasets`` opens with fsspec, which it depends on."""
    import fsspec  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

    try:
        with cast("Any", fsspec).open(str(url), "rb") as file:
            return np.frombuffer(file.read(), np.uint8)
    except (FileNotFoundError, KeyError):  # zip archives raise KeyError
        raise UnreadableError("there is no such file") from None


def _refused_dtype(dtype: Any) -> RefusedError:
    return RefusedError(f"it is of {dtype}; DALI takes {', '.join(map(str, PIXEL_DTYPES))}")


def _pixels(kind: Any, array: npt.NDArray[Any]) -> ImageInput:
    array = np.asarray(array, cast("Any", array.dtype).newbyteorder("="))
    try:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    except TypeError:
        raise _refused_dtype(array.dtype) from None
    if dtype not in PIXEL_DTYPES:
        raise _refused_dtype(dtype)
    if not array.size:
        raise RefusedError(f"it is empty, {array.shape}")
    height, width, channels = array.shape
    return ImageInput((Spec.from_input(kind, dtype, channels), InputKind.PIXELS), (height, width), array)


def _pil_array(image: PIL.Image.Image) -> npt.NDArray[Any]:
    """HWC, with the channels of the image's mode, as in torchvision's ``pil_to_tensor``."""
    try:
        array = np.asarray(image)
    except (*UNREADABLE, AttributeError, AssertionError) as error:  # the last two where its file was closed unread
        if is_system_fault(error):
            raise
        size = image.height, image.width
        raise UnreadableError(f"it cannot be decoded ({error_text(error) or 'its file is closed'})", size) from error
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    return array[..., None] if array.ndim == 2 else array


def _unread(image: Any) -> _Bytes | None:
    """The file of a JPEG that was opened and whose pixels nobody asked for yet; DALI decodes it then."""
    plain = type(image).__name__ == "JpegImageFile" and image.mode == "RGB"
    if not plain or not image.tile or getattr(image, "fp", None) is None or image.decoderconfig:
        return None
    try:
        at = image.fp.tell()
        try:
            image.fp.seek(0)
            return np.frombuffer(image.fp.read(), np.uint8)
        finally:
            image.fp.seek(at)
    except (OSError, ValueError):  # closed, for one; reading the pixels says what is the matter
        return None


def _encoded(data: _Bytes) -> ImageInput:
    """A file that DALI decodes as PIL does; any other is decoded here, by PIL."""
    memory = memoryview(cast("Any", data))
    size: tuple[int, int] | None = None
    try:
        header = parse_header(memory)
        size = header.height, header.width
        whole = not header.jpeg or bytes(memory[-2:]) == b"\xff\xd9"
        if not (header.native and whole):
            pixels = ppm(data)  # of a JPEG without an end marker only to see whether PIL reads it
            data = data if header.native else pixels
    except UNREADABLE as error:
        if is_system_fault(error):
            raise
        raise UnreadableError(f"it cannot be decoded ({error_text(error)})", size) from error
    return ImageInput((Spec(), InputKind.ENCODED), size, data)


def ppm(data: _Bytes) -> _Bytes:
    """An image file, decoded by PIL as torchvision's default loader does, as a file that DALI decodes to the same.

    Raises:
        OSError: PIL does not read it; also what else is in ``UNREADABLE``.
    """
    with _open(io.BytesIO(cast("Any", data))) as image:
        return ppm_of(image.convert("RGB"))


def ppm_of(image: PIL.Image.Image) -> _Bytes:
    """An image as a file that DALI decodes to the same."""
    stream = io.BytesIO()
    image.save(stream, format="PPM")
    return np.frombuffer(stream.getvalue(), np.uint8)


def black(size: tuple[int, int]) -> ImageInput:
    """A black image of some height and width, as a file."""
    image = PIL.Image.new("RGB", (size[1], size[0]))
    return ImageInput((Spec(), InputKind.ENCODED), size, ppm_of(image))
