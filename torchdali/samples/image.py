"""Convert an image of a sample, of any type, into an input of DALI."""

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
from PIL import ExifTags, ImageOps
from torchvision import tv_tensors

from torchdali.samples.on_error import limit_size
from torchdali.samples.pil import PILHeader, read_pil_header
from torchdali.sources import UNREADABLE, Header, error_text, is_system_fault, parse_header, read_header
from torchdali.sources.headers.metadata import turn_info
from torchdali.sources.places import WORD
from torchdali.transforms.spec import First, InputKind, Spec

__all__ = [
    "DEEP_MODES",
    "PIXEL_DTYPES",
    "ImageInput",
    "RefusedError",
    "StoredURL",
    "UnreadableError",
    "convert_to_rgb",
    "decode_to_ppm",
    "encode_ppm",
    "make_black",
    "to_image_input",
]

PIXEL_DTYPES = (
    *(torch.uint8, torch.float16, torch.float32, torch.float64),
    *(torch.int16, torch.uint16, torch.int32, torch.int64),
)
"""The dtypes of pixels that DALI takes."""
_TENSOR_LIKE = ("L", "LA", "RGB", "RGBA", "I")
"""Modes of PIL images that can be restored from a tensor, so that transforms get the same image as in torchvision."""
DEEP_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
"""Modes of PIL images with more than 8 bits."""
_ORIENTATION = int(ExifTags.Base.Orientation)
_CONVERT = "of which transforms for PIL images make something else than transforms for tensors: begin with v2.ToImage()"

_CLOSED_OR_UNREADABLE = (*UNREADABLE, AttributeError, AssertionError)
"""PIL raises the last two if the file was closed before its pixels were read."""

_open: Callable[..., Any] = PIL.Image.open
_Bytes = npt.NDArray[np.uint8]


class StoredURL(str):
    """The URL under which ``datasets.Image(decode=False)`` has a file, such as one in an archive or on the hub."""

    __slots__ = ()


class ImageInput(NamedTuple):
    """An image as an input of DALI.

    Attributes:
        key: Spec and input kind. Images with equal keys share a pipeline.
        size: Height and width in pixels.
        data: Pixels ``(H, W, C)``, those of a video ``(T, H, W, C)``, or the bytes of a file or of its path as
            ``(N,)`` uint8.
        header: The header of the file, if the data is a path.
        pil: The attributes of a PIL image besides its pixels.
    """

    key: tuple[Spec, InputKind]
    size: tuple[int, int]
    data: npt.NDArray[Any]
    header: Header | None = None
    pil: PILHeader | None = None

    @property
    def num_frames(self) -> int:
        """Number of images that DALI gets: the frames of a video, or 1."""
        return len(self.data) if self.key[0].kind == "video" else 1


class RefusedError(Exception):
    """The reason why an image cannot be packed."""


class UnreadableError(RefusedError):
    """An image whose file is missing or damaged.

    Args:
        reason: The reason.
        size: Height and width, if they are known.

    Attributes:
        size: Height and width. None if they are not known, or if PIL would not decode an image of that size.
    """

    def __init__(self, reason: str, size: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.size = limit_size(size)


def to_image_input(leaf: Any, first: First = "conversion", adjust_orientation: bool = False) -> ImageInput:
    """Convert an image into an input of DALI.

    Args:
        leaf: The image.
        first: What the transforms begin with.
        adjust_orientation: Whether the image is turned by its EXIF orientation, here or while DALI decodes it.

    Raises:
        RefusedError: It cannot be converted.
    """
    if leaf is None:
        raise UnreadableError("no image was found in its place")
    if isinstance(leaf, PIL.Image.Image):
        if first == "RGB" and leaf.mode not in _TENSOR_LIKE:
            leaf = leaf.convert("RGB")  # as that transform does with a PIL image
        if first == "rule" and leaf.mode not in _TENSOR_LIKE:
            raise RefusedError(
                f"it is a PIL image of mode {leaf.mode!r}, {_CONVERT}, or convert it in the dataset; wrap a mask in "
                "tv_tensors.Mask"
            )
        if adjust_orientation:
            return _turn_pil_image(leaf)
        file = _read_undecoded(leaf)
        image = _wrap_encoded(file) if file is not None else _wrap_pixels("pil", _pil_to_array(leaf))
        return image._replace(pil=read_pil_header(leaf))
    if isinstance(leaf, PurePath):
        return _read_file(leaf, first, adjust_orientation)
    if isinstance(leaf, StoredURL):
        return _wrap_encoded(_download(leaf), first, adjust_orientation)
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        return _wrap_encoded(np.frombuffer(cast("bytes", leaf), np.uint8), first, adjust_orientation)
    if isinstance(leaf, np.ndarray):
        array: npt.NDArray[Any] = cast("Any", leaf)
        if array.ndim == 1 and array.dtype == np.uint8:
            return _wrap_encoded(np.ascontiguousarray(array), first, adjust_orientation)
        if first in ("rule", "RGB") and array.dtype != np.uint8:
            raise RefusedError(f"it is an array of {array.dtype}, {_CONVERT}")
        if array.ndim != 3:
            raise RefusedError(f"it is an array of shape {array.shape}, not (H, W, C)")
        return _wrap_pixels("array", array)
    tensor: torch.Tensor = leaf.detach()
    if tensor.ndim == 1:
        return _wrap_encoded(tensor.cpu().contiguous().numpy(), first, adjust_orientation)
    if tensor.layout != torch.strided:
        raise RefusedError(f"it is a tensor of layout {tensor.layout}, not strided")
    is_video = isinstance(leaf, tv_tensors.Video)
    if tensor.ndim != 3 + is_video:
        axes = "(T, C, H, W)" if is_video else "(C, H, W)"
        raise RefusedError(f"it is a tensor of shape {tuple(tensor.shape)}, not {axes}")
    if tensor.dtype not in PIXEL_DTYPES:
        raise _make_dtype_error(tensor.dtype)
    kind = "video" if is_video else "image" if isinstance(leaf, tv_tensors.Image) else "tensor"
    return _wrap_pixels(kind, tensor.as_subclass(torch.Tensor).resolve_neg().movedim(-3, -1).cpu().numpy())


def _turn_pil_image(image: PIL.Image.Image) -> ImageInput:
    """Turn an image by its EXIF orientation. DALI turns one that PIL has not decoded, if it finds the same one."""
    file = _read_undecoded(image)
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
        if file is not None and parse_header(memoryview(cast("Any", file)), True).orientation == orientation:
            header = read_pil_header(image)._replace(info=turn_info(image.mode, image.info), format=None)
            return _wrap_encoded(file, adjust_orientation=True)._replace(pil=header)
        turned = ImageOps.exif_transpose(image)
    except _CLOSED_OR_UNREADABLE as error:
        size = image.height, image.width
        raise _make_error(error, size, f"it cannot be turned by its EXIF data ({error_text(error)})") from error
    return _wrap_pixels("pil", _pil_to_array(turned))._replace(pil=read_pil_header(turned))


def _read_file(path: PurePath, first: First, adjust_orientation: bool) -> ImageInput:
    """Return the path of a file. If DALI would decode it differently from PIL, PIL decodes it here."""
    name = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
    try:
        header = read_header(name, adjust_orientation)
    except FileNotFoundError:
        raise UnreadableError("there is no such file") from None
    except UNREADABLE as error:
        raise _make_error(error, None, f"it cannot be read as an image ({error_text(error)})") from error
    if not header.native:
        return _wrap_encoded(np.fromfile(name, np.uint8), first, adjust_orientation)
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


def _make_error(error: Exception, size: tuple[int, int] | None, reason: str) -> UnreadableError:
    """Return what to raise for an error of PIL. One that is the system's fault is raised as it is."""
    if is_system_fault(error):
        raise error
    return UnreadableError(reason, size)


def _make_dtype_error(dtype: Any) -> RefusedError:
    return RefusedError(f"it is of {dtype}; DALI takes {', '.join(map(str, PIXEL_DTYPES))}: convert it in the dataset")


def _wrap_pixels(kind: Any, array: npt.NDArray[Any]) -> ImageInput:
    array = np.asarray(array, cast("Any", array.dtype).newbyteorder("="))
    try:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    except TypeError:
        raise _make_dtype_error(array.dtype) from None
    if dtype not in PIXEL_DTYPES:
        raise _make_dtype_error(dtype)
    if not array.size:
        raise RefusedError(f"it is empty, {array.shape}")
    height, width, channels = array.shape[-3:]
    return ImageInput((Spec.from_input(kind, dtype, channels), InputKind.PIXELS), (height, width), array)


def _pil_to_array(image: PIL.Image.Image) -> npt.NDArray[Any]:
    """Return pixels ``(H, W, C)`` with the channels of the image's mode, as torchvision's ``pil_to_tensor`` does."""
    try:
        array = np.asarray(image)
    except _CLOSED_OR_UNREADABLE as error:
        size = image.height, image.width
        raise _make_error(error, size, f"it cannot be decoded ({error_text(error) or 'its file is closed'})") from error
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    return array[..., None] if array.ndim == 2 else array


def _read_undecoded(image: Any) -> _Bytes | None:
    """Return the file of an open RGB JPEG that PIL has not decoded yet, so that DALI decodes it. Else None."""
    is_jpeg = type(image).__name__ == "JpegImageFile" and image.mode == "RGB"
    # PIL clears ``tile`` when it decodes. After draft(), ``decoderconfig`` asks for a smaller image.
    if not is_jpeg or not image.tile or getattr(image, "fp", None) is None or image.decoderconfig:
        return None
    try:
        position = image.fp.tell()
        try:
            image.fp.seek(0)
            return np.frombuffer(image.fp.read(), np.uint8)
        finally:
            image.fp.seek(position)
    except (OSError, ValueError):  # for example a closed file; the error comes when PIL reads the pixels
        return None


def _wrap_encoded(data: _Bytes, first: First = "conversion", adjust_orientation: bool = False) -> ImageInput:
    """Return an encoded file. If DALI would decode it differently from PIL, PIL decodes it here.

    Grey images of more than 8 bits keep them: ``convert("RGB")`` would clip them.
    """
    memory = memoryview(cast("Any", data))
    size: tuple[int, int] | None = None
    try:
        header = parse_header(memory, adjust_orientation)
        size = header.height, header.width
        if not header.native:
            with _open(io.BytesIO(cast("Any", data))) as image:
                if image.mode in DEEP_MODES:
                    return to_image_input(image, first, adjust_orientation)
                data = encode_ppm(convert_to_rgb(image, adjust_orientation))
        elif header.jpeg and bytes(memory[-2:]) != b"\xff\xd9":
            decode_to_ppm(data)  # raises if PIL cannot read a JPEG that has no end marker; DALI might
    except UNREADABLE as error:
        raise _make_error(error, size, f"it cannot be decoded ({error_text(error)})") from error
    return ImageInput((Spec(), InputKind.ENCODED), size, data)


def convert_to_rgb(image: PIL.Image.Image, adjust_orientation: bool) -> PIL.Image.Image:
    """Return the image as torchvision's default loader does, turned by its EXIF orientation if that is asked for."""
    image = image.convert("RGB")
    return ImageOps.exif_transpose(image) if adjust_orientation else image


def decode_to_ppm(data: _Bytes, adjust_orientation: bool = False) -> _Bytes:
    """Decode an image file with PIL, and return the pixels of :func:`convert_to_rgb` as a PPM file.

    Raises:
        OSError: PIL cannot read it. Other exceptions are listed in ``UNREADABLE``.
    """
    with _open(io.BytesIO(cast("Any", data))) as image:
        return encode_ppm(convert_to_rgb(image, adjust_orientation))


def encode_ppm(image: PIL.Image.Image) -> _Bytes:
    """Encode an image as PPM, which DALI decodes to the same pixels."""
    stream = io.BytesIO()
    image.save(stream, format="PPM")
    stream.write(bytes(-stream.tell() % WORD))  # whole words are fed without a copy
    return np.frombuffer(stream.getvalue(), np.uint8)


def make_black(size: tuple[int, int]) -> ImageInput:
    """Return a black image, encoded, of a height and width."""
    image = PIL.Image.new("RGB", (size[1], size[0]))
    return ImageInput((Spec(), InputKind.ENCODED), size, encode_ppm(image))
