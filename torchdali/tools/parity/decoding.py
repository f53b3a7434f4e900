"""Measure how far decoded images are from PIL's, for each format."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader

from torchdali.sources.headers.header import read_header
from torchdali.tools.parity.compare import compile_chain, describe_exceeded, run, split_indices
from torchdali.tools.parity.photographs import photographs


@dataclass(frozen=True)
class DecodingDifferences:
    """Differences of the loader's decoders from PIL on one format.

    Attributes:
        max_abs: Largest absolute difference of a value, in grey levels.
        mean_abs: Mean absolute difference, in grey levels.
        by: Library that decoded: "DALI" or "PIL".
        error: Why there is no image, or empty.
    """

    max_abs: float = 0.0
    mean_abs: float = 0.0
    by: str = "DALI"
    error: str = ""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        write: Function that encodes an RGB image.
        lossy: Whether decoders may return different pixels for the same file.
    """

    write: Callable[[Image.Image], bytes]
    lossy: bool = False


def _encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


FORMATS: dict[str, Format] = {
    "JPEG 4:2:0": Format(lambda image: _encode(image, "JPEG", quality=90, subsampling="4:2:0"), lossy=True),
    "JPEG 4:4:4": Format(lambda image: _encode(image, "JPEG", quality=90, subsampling="4:4:4"), lossy=True),
    "JPEG progressive": Format(lambda image: _encode(image, "JPEG", quality=90, progressive=True), lossy=True),
    "JPEG grey": Format(lambda image: _encode(image.convert("L"), "JPEG", quality=90), lossy=True),
    "JPEG CMYK": Format(lambda image: _encode(_to_cmyk(image), "JPEG", quality=90)),
    "PNG": Format(lambda image: _encode(image, "PNG")),
    "WebP": Format(lambda image: _encode(image, "WEBP", quality=90)),
    "TIFF": Format(lambda image: _encode(image, "TIFF")),
    "BMP": Format(lambda image: _encode(image, "BMP")),
    "JPEG 2000": Format(lambda image: _encode(image, "JPEG2000")),
}


def decoding_bound(name: str, device: str) -> tuple[float, float]:
    """Return the largest and the mean difference that torchdali's own decoder may have on a format.

    The JPEG standard does not fix every bit of the decoded image. On the GPU colours are not interpolated as in libjpeg
    (https://github.com/NVIDIA/DALI/issues/4257). This shows where they change from one pixel to the next. On other
    photographs the differences were 37 and 0.84.
    """
    return (64, 1.1) if device == "cuda" and FORMATS[name].lossy else (0, 0)


def find_exceeded_decoding_bounds(name: str, device: str, measured: DecodingDifferences) -> str:
    """Return in words which bounds of a format are exceeded, or an empty string."""
    largest, mean = decoding_bound(name, device)
    return measured.error or describe_exceeded(("max", measured.max_abs, largest), ("mean", measured.mean_abs, mean))


def measure_decoding(root: Path, name: str, device: str) -> DecodingDifferences:
    """Decode photographs in one format.

    Args:
        root: Folder to write them to.
        name: The format.
        device: "cpu" or "cuda".
    """
    folder = root / "all"
    folder.mkdir(parents=True)
    for title, picture in photographs().items():
        (folder / title).with_suffix(".jpg").write_bytes(FORMATS[name].write(Image.fromarray(picture)))
    dataset = ImageFolder(root)
    paths = [path for path, _ in dataset.samples]
    expected = [np.asarray(pil_loader(path)) for path in paths]
    by = "DALI" if all(read_header(path).native for path in paths) else "PIL"
    try:
        return _compare(_decode_with_loader(dataset, device), expected, by)
    except RuntimeError as error:
        return DecodingDifferences(error=(str(error).strip() or type(error).__name__).splitlines()[0])


def _to_cmyk(image: Image.Image) -> Image.Image:
    """Convert to CMYK with the common part of the three colours as black. PIL's own conversion leaves black 0."""
    colours = 255 - np.asarray(image)
    black: npt.NDArray[np.uint8] = colours.min(2, keepdims=True)
    return Image.fromarray(np.concatenate((colours - black, black), axis=2), "CMYK")


def _decode_with_loader(dataset: ImageFolder, device: str) -> list[npt.NDArray[np.uint8]]:
    batches = run(dataset, compile_chain([], device), split_indices(len(dataset)))
    return [
        np.asarray(image.permute(1, 2, 0).cpu())
        for batch in batches
        for image in cast("list[torch.Tensor]", batch.images)
    ]


def _compare(
    actual: list[npt.NDArray[np.uint8]], expected: list[npt.NDArray[np.uint8]], by: str
) -> DecodingDifferences:
    differences = [np.abs(a.astype(np.int16) - b) for a, b in zip(actual, expected, strict=True)]
    return DecodingDifferences(
        float(max(x.max() for x in differences)), float(np.mean([x.mean() for x in differences])), by
    )
