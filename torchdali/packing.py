"""What worker processes do with samples: the images into one block of memory, the rest collated.

Everything here runs where the dataset is asked for samples, in a worker or in the process itself. It draws no random
number and knows no CUDA.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torch.utils.data import get_worker_info
from torchvision import tv_tensors

from torchdali.blocks import BlockRing, ReceivedBlock, SentBlock, aligned
from torchdali.errors import TransformError
from torchdali.sources import UNREADABLE, Header, header_of, read_header
from torchdali.spec import Entry, IntArray, Spec
from torchdali.structure import collate, images_of, leaves, replaced, with_slots

__all__ = ["PIXEL_DTYPES", "Packed", "PackedImages", "Packer", "RefusedError", "listed", "outline", "ppm", "prepared"]

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


class _Image(NamedTuple):
    """An image as it will be packed.

    Attributes:
        route: What it is, and how it is fed.
        size: Height and width.
        data: Bytes of a file, or of its path, or HWC.
        header: Of the file that a path leads to.
    """

    route: tuple[Spec, Entry]
    size: tuple[int, int]
    data: npt.NDArray[Any]
    header: Header | None = None


class RefusedError(Exception):
    """Why an image cannot be packed."""


@dataclass
class PackedImages:
    """Images of one kind, of one batch.

    Attributes:
        spec: What they are.
        entry: How they are fed.
        sample: ``(N,)`` which sample of the batch each belongs to.
        slot: ``(N,)`` which of its sample's images each is; images come slot by slot.
        size: ``(N, 2)`` heights and widths.
        start: ``(N,)`` where each begins in the block; without a block, nothing.
        length: ``(N,)`` bytes of each.
        headers: Of the files, where paths are packed.
        arrays: Where there is no block, the images themselves.
    """

    spec: Spec
    entry: Entry
    sample: IntArray
    slot: IntArray
    size: IntArray
    start: IntArray
    length: IntArray
    headers: list[Header]
    arrays: list[npt.NDArray[Any]] = field(default_factory=list[npt.NDArray[Any]])


@dataclass
class Packed:
    """A batch as a worker sends it.

    Attributes:
        rest: The collated samples, or the list of them, with slots where images were.
        count: Number of samples.
        places: Where the images of the samples are, where all have them in the same places.
        groups: The images, by kind.
        block: The memory that they are in; None where there was no worker.
        worker: Whose batch it is.
        reasons: What is wrong with an image, by sample; with the file's name.
        outline: What the first sample is made of, where no image was found.
        task: Number that the batch was asked for under.
    """

    rest: Any
    count: int
    places: tuple[str, ...] = ()
    groups: list[PackedImages] = field(default_factory=list[PackedImages])
    block: SentBlock | ReceivedBlock | None = None
    worker: int = 0
    reasons: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    outline: str = ""
    task: int = 0

    def pin_memory(self) -> Packed:
        """Called by DataLoader, in a thread of its own where there are workers."""
        self.rest = replaced(self.rest, _pinned, whole=_can_be_pinned)
        return self


def _can_be_pinned(node: Any) -> bool:
    return callable(getattr(cast("object", node), "pin_memory", None))


def _pinned(leaf: Any) -> Any:
    """What DataLoader does to a leaf; but a tensor that is on a device stays there, as the user may not have asked."""
    if isinstance(leaf, torch.Tensor) and (leaf.device.type != "cpu" or leaf.layout != torch.strided):
        return leaf
    return leaf.pin_memory() if _can_be_pinned(leaf) else leaf


class Packer:
    """What workers have in the place of the loader's ``collate_fn``.

    Args:
        collate_fn: The loader's.
        batched: Whether samples come in lists.
        stacks: Whether ``collate_fn`` is one of DataLoader's own, which need no image to do their work.
        images: Whether images are taken out; else ``collate_fn`` does all there is to do.
        converts: Whether the transforms begin with the conversion of PIL images to tensors.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], batched: bool, stacks: bool, images: bool, converts: bool = True
    ) -> None:
        self._collate, self._batched, self._stacks, self._images = collate_fn, batched, stacks, images
        self._converts = converts
        self._process = os.getpid()
        self._ring: BlockRing | None = None

    def __call__(self, data: Any) -> Packed:
        """Packs a list of samples, or one sample."""
        # A dataset may have a loader of its own, without workers but in one: it is no worker of that loader.
        info = get_worker_info() if self._process != os.getpid() else None
        samples: list[Any] = [data]
        if self._batched:  # what a dataset's __getitems__ gives may be no list, and is the collate_fn's affair then
            samples = list(cast("Sequence[Any]", data)) if isinstance(data, Sequence) else []
        found = [images_of(sample) for sample in samples] if self._images else []
        if not any(found):
            first = outline(samples[0]) if self._images and samples else ""
            return Packed(self._collate(data), len(samples), worker=info.id if info else 0, outline=first)
        for sample in samples:
            _refuse_annotations(sample)
        packed = Packed(None, len(samples), worker=info.id if info else 0)
        if self._stacks:
            packed.places, packed.reasons = _common_places(samples, found)
        if not packed.reasons:
            self._pack(packed, found, in_worker=info is not None)
        if not packed.reasons:
            slotted = [with_slots(sample, images) for sample, images in zip(samples, found, strict=True)]
            if not self._stacks:
                packed.rest = slotted
            else:
                packed.rest = collate(slotted) if self._batched else self._collate(slotted[0])
        return packed

    def _pack(self, packed: Packed, found: Sequence[Sequence[tuple[str, Any]]], in_worker: bool) -> None:
        groups: dict[tuple[Spec, Entry], list[tuple[int, int, _Image]]] = {}
        for slot in range(max(map(len, found))):
            for sample, images in enumerate(found):
                if slot < len(images):
                    leaf = images[slot][1]
                    try:
                        image = prepared(leaf, self._converts)
                    except RefusedError as reason:
                        named = str(leaf) if isinstance(leaf, PurePath) else images[slot][0] or "the sample itself"
                        packed.reasons.setdefault(sample, (named, str(reason)))
                        continue
                    groups.setdefault(image.route, []).append((sample, slot, image))
        if packed.reasons:
            return
        at = 0
        for (spec, entry), members in groups.items():
            group, at = _laid_out(spec, entry, members, at)
            packed.groups.append(group)
        every = [[image.data for _, _, image in members] for members in groups.values()]
        if not in_worker:
            for group, arrays in zip(packed.groups, every, strict=True):
                group.arrays = [np.ascontiguousarray(array) for array in arrays]
            return
        self._ring = self._ring or BlockRing()
        memory, packed.block = self._ring.take(at)
        for group, arrays in zip(packed.groups, every, strict=True):
            for start, length, array in zip(group.start.tolist(), group.length.tolist(), arrays, strict=True):
                np.copyto(memory[start : start + length].view(array.dtype).reshape(array.shape), array)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ring": None}


def _laid_out(
    spec: Spec, entry: Entry, members: Sequence[tuple[int, int, _Image]], at: int
) -> tuple[PackedImages, int]:
    """Where images go: side by side where all are equal in shape, so that they are one array, else aligned."""
    length = np.array([image.data.nbytes for _, _, image in members], np.int64)
    dense = entry == "pixels" and len({image.data.shape for _, _, image in members}) == 1
    step = length if dense else np.array([aligned(x) for x in length.tolist()], np.int64)
    start = at + np.concatenate(([0], np.cumsum(step)[:-1]))
    group = PackedImages(
        spec,
        entry,
        np.array([sample for sample, _, _ in members], np.int64),
        np.array([slot for _, slot, _ in members], np.int64),
        np.array([image.size for _, _, image in members], np.int64),
        start,
        length,
        [image.header for _, _, image in members if image.header],
    )
    return group, aligned(at + int(step.sum()))


def _common_places(
    samples: Sequence[Any], found: Sequence[Sequence[tuple[str, Any]]]
) -> tuple[tuple[str, ...], dict[int, tuple[str, str]]]:
    """Where most samples have their images, and what is wrong with those that have not."""
    each = [tuple(path for path, _ in images) for images in found]
    ((most, _),) = Counter(filter(None, each)).most_common(1)
    wrong: dict[int, tuple[str, str]] = {}
    for number, places in enumerate(each):
        if places != most:
            has = f"its images are at {listed(places)}" if places else "no image was found in it"
            reason = (
                f"{has}, in other samples of the batch they are at {listed(most)}; it is {outline(samples[number])}"
            )
            wrong[number] = (listed(most), reason)
            break
    return most, wrong


def listed(places: Sequence[str]) -> str:
    """Places in a sample, in words."""
    return ", ".join(place or "the sample itself" for place in places) or "none"


def outline(sample: Any) -> str:
    """What a sample is made of."""
    parts: list[str] = []
    for path, leaf in leaves(sample):
        shape = getattr(leaf, "shape", None)
        start = repr(bytes(leaf[:8])) if isinstance(leaf, (bytes, bytearray)) else None
        about = start or (f"{tuple(shape)} {getattr(leaf, 'dtype', '')}" if shape is not None else "")
        parts.append(" ".join(filter(None, (path, type(leaf).__name__, about))))
    text = "; ".join(parts)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _refuse_annotations(sample: Any) -> None:
    for path, leaf in leaves(sample):
        if isinstance(leaf, tv_tensors.TVTensor) and not isinstance(leaf, tv_tensors.Image):
            raise TransformError(
                f"a sample has a {type(leaf).__name__} at {path or 'its top'}, which torchvision's transforms change "
                "along with the image, and transform= does not: put the transform into the dataset, or what is to run "
                "on the GPU after it (conversion, normalization) alone into transform= and hand the annotation over "
                "as a plain tensor"
            )


def prepared(leaf: Any, converts: bool = True) -> _Image:
    """An image as it will be packed.

    Args:
        leaf: The image.
        converts: Whether the transforms begin with the conversion of PIL images to tensors.

    Raises:
        RefusedError: Why it cannot be.
    """
    if isinstance(leaf, PIL.Image.Image):
        if not converts and leaf.mode not in _TENSOR_LIKE:
            raise RefusedError(f"it is a PIL image of mode {leaf.mode!r}, {_CONVERT}, or convert it in the dataset")
        unread = _unread(leaf)
        return _encoded(unread) if unread is not None else _pixels("pil", _pil_array(leaf))
    if isinstance(leaf, PurePath):
        return _file(leaf)
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        return _encoded(np.frombuffer(cast("bytes", leaf), np.uint8))
    if isinstance(leaf, np.ndarray):
        array: npt.NDArray[Any] = cast("Any", leaf)
        if not converts and array.dtype != np.uint8:
            raise RefusedError(f"it is an array of {array.dtype}, {_CONVERT}")
        return _encoded(np.ascontiguousarray(array)) if array.ndim == 1 else _pixels("pil", array)
    tensor: torch.Tensor = leaf.detach()
    if tensor.ndim == 1:
        return _encoded(tensor.cpu().contiguous().numpy())
    if tensor.ndim != 3:
        raise RefusedError(f"it is a tensor of shape {tuple(tensor.shape)}, not (C, H, W)")
    if tensor.dtype not in PIXEL_DTYPES:
        raise _refused_dtype(tensor.dtype)
    kind = "image" if isinstance(leaf, tv_tensors.Image) else "tensor"
    return _pixels(kind, tensor.as_subclass(torch.Tensor).permute(1, 2, 0).cpu().numpy())


def _file(path: PurePath) -> _Image:
    """A file that DALI decodes as PIL does, by its path; any other is decoded here, by PIL."""
    name = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
    try:
        header = read_header(name)
    except FileNotFoundError:
        raise RefusedError("there is no such file") from None
    except UNREADABLE as error:
        raise RefusedError(f"it cannot be read as an image ({error})") from error
    if not header.native:
        return _encoded(np.fromfile(name, np.uint8))
    data = np.frombuffer(os.fsencode(name), np.uint8)
    return _Image((Spec(), "files"), (header.height, header.width), data, header)


def _refused_dtype(dtype: Any) -> RefusedError:
    return RefusedError(f"it is of {dtype}; DALI takes {', '.join(map(str, PIXEL_DTYPES))}")


def _pixels(kind: Any, array: npt.NDArray[Any]) -> _Image:
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
    return _Image((Spec(kind, dtype, channels), "pixels"), (height, width), array)


def _pil_array(image: PIL.Image.Image) -> npt.NDArray[Any]:
    """HWC, with the channels of the image's mode, as in torchvision's ``pil_to_tensor``."""
    try:
        array = np.asarray(image)
    except (*UNREADABLE, AttributeError, AssertionError) as error:  # the last two where its file was closed unread
        raise RefusedError(f"it cannot be decoded ({str(error) or 'its file is closed'})") from error
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


def _encoded(data: _Bytes) -> _Image:
    """A file that DALI decodes as PIL does; any other is decoded here, by PIL."""
    memory = memoryview(cast("Any", data))
    try:
        header = header_of(memory)
        whole = not header.jpeg or bytes(memory[-2:]) == b"\xff\xd9"
        if not (header.native and whole):
            pixels = ppm(data)  # of a JPEG without an end marker only to see whether PIL reads it
            data = data if header.native else pixels
    except UNREADABLE as error:
        raise RefusedError(f"it cannot be decoded ({error})") from error
    return _Image((Spec(), "encoded"), (header.height, header.width), data)


def ppm(data: _Bytes) -> _Bytes:
    """An image file, decoded by PIL as torchvision's default loader does, as a file that DALI decodes to the same.

    Raises:
        OSError: PIL does not read it; also what else is in ``UNREADABLE``.
    """
    stream = io.BytesIO()
    with _open(io.BytesIO(cast("Any", data))) as image:
        image.convert("RGB").save(stream, format="PPM")
    return np.frombuffer(stream.getvalue(), np.uint8)
