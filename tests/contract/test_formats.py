"""Files are read as PIL reads them, whatever their name says and whatever PIL forgives."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageCms
import PIL.PngImagePlugin
import pytest
from conftest import PER_BATCH, assert_pairs, encoded, in_order
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError

pytestmark = pytest.mark.timeout(30)

ODD_ONE = 7
"""The sample whose file is another one; its batch has two JPEGs beside it."""


def odd_path(dataset: ImageFolder) -> Path:
    return Path(dataset.samples[ODD_ONE][0])


@pytest.fixture
def photograph(pictures: Path) -> PIL.Image.Image:
    with PIL.Image.open(pictures / "coffee" / "3.jpg") as image:
        return image.convert("RGB")


def without_end_marker(image: PIL.Image.Image) -> bytes:
    data = encoded(image, "JPEG")
    assert data.endswith(b"\xff\xd9")
    return data[:-2]


def animated(image: PIL.Image.Image, kind: str) -> bytes:
    return encoded(image, kind, save_all=True, append_images=[image.rotate(180)])


def palette(image: PIL.Image.Image, **options: Any) -> bytes:
    return encoded(image.quantize(40), "PNG", **options)


def see_through(image: PIL.Image.Image) -> PIL.Image.Image:
    image = image.convert("RGBA")
    image.putalpha(PIL.Image.linear_gradient("L").resize(image.size))
    return image


def deep(image: PIL.Image.Image) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 200)


def rotated(image: PIL.Image.Image, kind: str = "JPEG") -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    return encoded(image, kind, exif=exif)


def png_chunk(image: PIL.Image.Image, name: bytes, data: bytes) -> bytes:
    info = PIL.PngImagePlugin.PngInfo()
    info.add(name, data)
    return encoded(image, "PNG", pnginfo=info)


def profiled(image: PIL.Image.Image, kind: str) -> bytes:
    profile = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("XYZ"))
    return encoded(image, kind, icc_profile=profile.tobytes())


def without_adobe(image: PIL.Image.Image) -> bytes:
    """Its components are named R, G and B, which alone says that they are."""
    whole = encoded(image, "JPEG", keep_rgb=True)
    at = whole.index(b"\xff\xee")
    return whole[:at] + whole[at + 2 + int.from_bytes(whole[at + 2 : at + 4], "big") :]


def ppm(image: PIL.Image.Image, highest: int) -> bytes:
    pixels = np.asarray(image).astype(np.float64) * highest / 255
    header = b"P6\n# a comment\n%d %d\n%d\n" % (*image.size, highest)
    return header + pixels.astype(">u2" if highest > 255 else np.uint8).tobytes()


def plain_ppm(image: PIL.Image.Image) -> bytes:
    return b"P3 %d %d 255 " % image.size + " ".join(map(str, np.asarray(image).ravel())).encode()


def top_down_bmp(image: PIL.Image.Image) -> bytes:
    data = bytearray(encoded(image.transpose(PIL.Image.Transpose.FLIP_TOP_BOTTOM), "BMP"))
    data[22:26] = struct.pack("<i", -image.height)
    return bytes(data)


ODD: dict[str, Callable[[PIL.Image.Image], bytes]] = {
    "GIF": lambda image: encoded(image, "GIF"),
    "animated GIF": lambda image: animated(image, "GIF"),
    "AVIF": lambda image: encoded(image, "AVIF"),
    "CMYK JPEG": lambda image: encoded(image.convert("CMYK"), "JPEG"),
    "grey JPEG": lambda image: encoded(image.convert("L"), "JPEG"),
    "progressive JPEG": lambda image: encoded(image, "JPEG", progressive=True),
    "JPEG 4:4:4": lambda image: encoded(image, "JPEG", subsampling=0, quality=99),
    "RGB JPEG": lambda image: encoded(image, "JPEG", keep_rgb=True),
    "RGB JPEG, by its names alone": without_adobe,
    "rotated JPEG": rotated,
    "rotated PNG": lambda image: rotated(image, "PNG"),
    "rotated WEBP": lambda image: rotated(image, "WEBP"),
    "JPEG, bytes after its end": lambda image: encoded(image, "JPEG") + b"more" * 99,
    "JPEG after JPEG": lambda image: encoded(image, "JPEG") + encoded(image.rotate(180), "JPEG")[:-70],
    "JPEG, no end marker": without_end_marker,
    "JPEG, half an end marker": lambda image: encoded(image, "JPEG")[:-1],
    "PNG": lambda image: encoded(image, "PNG"),
    "PNG, bytes after its end": lambda image: encoded(image, "PNG") + b"more" * 99,
    "PNG, no end chunk": lambda image: encoded(image, "PNG")[:-12],
    "16-bit PNG": lambda image: encoded(deep(image), "PNG"),
    "RGBA PNG": lambda image: encoded(see_through(image), "PNG"),
    "LA PNG": lambda image: encoded(see_through(image).convert("LA"), "PNG"),
    "palette PNG": palette,
    "transparent palette PNG": lambda image: palette(image, transparency=3),
    "transparent RGB PNG": lambda image: encoded(image, "PNG", transparency=image.getpixel((9, 9))),
    "grey PNG": lambda image: encoded(image.convert("L"), "PNG"),
    "1-bit PNG": lambda image: encoded(image.convert("1"), "PNG"),
    "BMP": lambda image: encoded(image, "BMP"),
    "palette BMP": lambda image: encoded(image.quantize(9), "BMP"),
    "32-bit BMP": lambda image: encoded(see_through(image), "BMP"),
    "top-down BMP": top_down_bmp,
    "PPM": lambda image: encoded(image, "PPM"),
    "PPM of 100 levels": lambda image: ppm(image, 100),
    "PPM of 65,536 levels": lambda image: ppm(image, 65535),
    "plain PPM": plain_ppm,
    "PGM": lambda image: encoded(image.convert("L"), "PPM"),
    "PNG with gamma": lambda image: png_chunk(image, b"gAMA", struct.pack(">I", 100_000)),
    "PNG with a background": lambda image: png_chunk(image, b"bKGD", bytes(6)),
    "PNG with a profile": lambda image: profiled(image, "PNG"),
    "JPEG with a profile": lambda image: profiled(image, "JPEG"),
    "WEBP with a profile": lambda image: profiled(image, "WEBP"),
    "JPEG 4:1:1": lambda image: encoded(image, "JPEG", subsampling="4:1:1"),
    "JPEG with restarts": lambda image: encoded(image, "JPEG", restart_marker_blocks=1),
    "JPEG of two pictures": lambda image: animated(image, "MPO"),
    "JPEG 2000": lambda image: encoded(image, "JPEG2000"),
    "TIFF": lambda image: encoded(image, "TIFF"),
    "CMYK TIFF": lambda image: encoded(image.convert("CMYK"), "TIFF"),
    "WEBP": lambda image: encoded(image, "WEBP"),
    "lossless WEBP": lambda image: encoded(image, "WEBP", lossless=True),
    "RGBA WEBP": lambda image: encoded(see_through(image), "WEBP"),
    "animated WEBP": lambda image: animated(image, "WEBP"),
}


def refusal(dataset: ImageFolder, index: int) -> str:
    """Why PIL does not read a sample; empty where it does."""
    try:
        dataset[index]
    except OSError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("content", ODD.values(), ids=ODD.keys())
def test_odd_file_is_read_as_pil_reads_it(
    fresh: ImageFolder,
    photograph: PIL.Image.Image,
    content: Callable[[PIL.Image.Image], bytes],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = odd_path(fresh)
    path.write_bytes(content(photograph))
    loader = DALILoader(fresh, PER_BATCH, device=device)
    for epoch in range(2):
        if error := refusal(fresh, ODD_ONE):
            with pytest.raises(SampleError, match=f"sample {ODD_ONE} ") as caught:
                list(loader)
            assert error in str(caught.value)
        else:
            if epoch:
                monkeypatch.setattr(
                    "torchdali.pipeline.feed.Prefetcher._run_again", lambda self, batch: pytest.fail("run twice")
                )
            assert_pairs(loader, fresh, in_order())


def test_bytes_after_an_end_are_looked_at_once(
    fresh: ImageFolder, photograph: PIL.Image.Image, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd_path(fresh).write_bytes(encoded(photograph, "JPEG") + b"more" * 99)
    loader = DALILoader(fresh, PER_BATCH, device=device)
    first = [labels.tolist() for _, labels in loader]
    monkeypatch.setattr("torchdali.pipeline.readers.FileReader.load", lambda self, row: pytest.fail("decoded by PIL"))
    assert [labels.tolist() for _, labels in loader] == first


def test_rotation_in_exif_is_not_followed(fresh: ImageFolder, photograph: PIL.Image.Image, device: str) -> None:
    assert photograph.width != photograph.height
    odd_path(fresh).write_bytes(rotated(photograph))
    fresh.transform = v2.ToImage()
    loader = DALILoader(Subset(fresh, [ODD_ONE]), None, device=device)
    assert next(iter(loader))[0].shape == (3, photograph.height, photograph.width)


@pytest.mark.parametrize("size", [(30, 20), (140, 130)], ids=["smaller", "larger"])
def test_file_that_is_rewritten_between_epochs_is_read_anew(
    fresh: ImageFolder, photograph: PIL.Image.Image, size: tuple[int, int], device: str
) -> None:
    loader = DALILoader(fresh, PER_BATCH, device=device)
    assert_pairs(loader, fresh, in_order())
    odd_path(fresh).write_bytes(encoded(photograph.resize(size), "JPEG"))
    assert_pairs(loader, fresh, in_order())
