"""``torchdali.image_size`` is PIL's, from paths and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import skimage.data
from PIL import Image

import torchdali


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff", "bmp", "gif"])
def test_the_size_is_pils(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees when it is shown
    path = tmp_path / f"picture.{suffix}"
    Image.fromarray(skimage.data.chelsea()[:70, :110]).save(path, exif=exif)
    with Image.open(path) as image:
        expected = image.height, image.width
    assert torchdali.image_size(path) == torchdali.image_size(str(path)) == expected
    assert torchdali.image_size(path.read_bytes()) == torchdali.image_size(bytearray(path.read_bytes())) == expected


def test_no_image(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.jpg"):
        torchdali.image_size(tmp_path / "missing.jpg")
    with pytest.raises(OSError, match="cannot identify"):
        torchdali.image_size(b"no image at all")
