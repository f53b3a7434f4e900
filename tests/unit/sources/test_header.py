"""Headers read in Python against PIL."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import skimage.data
import tifffile
from PIL import Image

from torchdali.sources import parse_header, read_header

PHOTOGRAPH = Image.fromarray(skimage.data.coffee()).crop((100, 50, 331, 227))
EXIF = Image.Exif()
EXIF[0x0112] = 6  # turned by a quarter
EXIF[0x9286] = "x" * 9000  # pushes the frame header out of the first read

NATIVE = {
    "baseline": ("JPEG", "RGB", {}),
    "progressive": ("JPEG", "RGB", {"progressive": True}),
    "4:4:4": ("JPEG", "RGB", {"subsampling": 0}),
    "grey jpeg": ("JPEG", "L", {}),
    "exif": ("JPEG", "RGB", {"exif": EXIF}),
    "profile": ("JPEG", "RGB", {"icc_profile": bytes(70_000)}),
    "png": ("PNG", "RGB", {}),
    "grey png": ("PNG", "L", {}),
    "palette": ("PNG", "P", {}),
    "webp": ("WEBP", "RGB", {}),
    "bmp": ("BMP", "RGB", {}),
    "ppm": ("PPM", "RGB", {}),
    "pgm": ("PPM", "L", {}),
    "tiff": ("TIFF", "RGB", {"icc_profile": bytes(700), "description": "a cup", "dpi": (72, 72)}),
    "tiff, a strip for each row": ("TIFF", "RGB", {"tiffinfo": {278: 1}}),
}
FOREIGN = {
    "cmyk": ("JPEG", "CMYK", {}),
    "rgb jpeg": ("JPEG", "RGB", {"keep_rgb": True}),
    "rgba": ("PNG", "RGBA", {}),
    "16 bit": ("PNG", "I;16", {}),
    "gif": ("GIF", "P", {}),
    "palette bmp": ("BMP", "P", {}),
    "rgba bmp": ("BMP", "RGBA", {}),
    "pbm": ("PPM", "1", {}),
    "grey tiff": ("TIFF", "L", {}),
    "rgba tiff": ("TIFF", "RGBA", {}),
    "cmyk tiff": ("TIFF", "CMYK", {}),
    "turned tiff": ("TIFF", "RGB", {"tiffinfo": {274: 3}}),
    "tiff with xmp": ("TIFF", "RGB", {"tiffinfo": {700: b"<x/>"}}),
    "tiff of two": ("TIFF", "RGB", {"save_all": True, "append_images": [PHOTOGRAPH]}),
    "large tiff": ("TIFF", "RGB", {"big_tiff": True}),
    "lzw tiff": ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    "deflate tiff": ("TIFF", "RGB", {"compression": "tiff_adobe_deflate"}),
    "jpeg tiff": ("TIFF", "RGB", {"compression": "jpeg"}),
    "jpeg 2000": ("JPEG2000", "RGB", {}),
}


def written(path, kind):
    form, mode, options = kind
    picture = PHOTOGRAPH.convert("L").point(lambda x: x * 256, "I").convert("I;16") if mode == "I;16" else PHOTOGRAPH
    stream = io.BytesIO()
    (picture if mode == "I;16" else picture.convert(mode)).save(stream, form, **options)
    path.write_bytes(stream.getvalue())
    return str(path)


@pytest.mark.parametrize(("name", "native"), [*((n, True) for n in NATIVE), *((n, False) for n in FOREIGN)])
def test_sizes_are_pils_and_odd_files_are_told_apart(name, native, tmp_path):
    header = read_header(written(tmp_path / "picture.jpg", (NATIVE | FOREIGN)[name]))
    assert (header.width, header.height) == PHOTOGRAPH.size
    assert header.native == native
    assert header.jpeg == ((NATIVE | FOREIGN)[name][0] == "JPEG")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0\x00\x00" * 9, b"\x89PNG\r\n\x1a\n", b"text"]
)
def test_garbage_is_pils_error(content, tmp_path):
    (tmp_path / "picture.jpg").write_bytes(content)
    with pytest.raises((OSError, SyntaxError)):
        read_header(str(tmp_path / "picture.jpg"))


@pytest.mark.parametrize("length", [3, 10, 21, 150, 160, 163, 165])
def test_a_header_cut_off_anywhere_is_an_error_or_the_size(length, tmp_path):
    whole = tmp_path / "whole.jpg"
    written(whole, NATIVE["baseline"])
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(whole.read_bytes()[:length])
    try:
        header = read_header(str(cut))
    except (OSError, SyntaxError):
        return
    assert (header.width, header.height) == PHOTOGRAPH.size


@pytest.mark.parametrize("name", ["bmp", "ppm", "pgm", "tiff", "tiff, a strip for each row"])
def test_a_plain_file_that_lacks_one_byte_is_for_pil(name, tmp_path):
    whole = Path(written(tmp_path / "whole", NATIVE[name])).read_bytes()
    last = max(len(whole) - 1, whole.rfind(PHOTOGRAPH.tobytes()))
    assert parse_header(memoryview(whole)).native
    assert not parse_header(memoryview(whole[:last])).native
    assert parse_header(memoryview(whole + b"more")).native


@pytest.mark.parametrize(("tag", "value"), [(256, 232), (257, 178), (273, 65535), (278, 176), (279, 3), (284, 2)])
def test_a_tiff_with_another_number_in_its_header_is_for_pil(tag, value):
    """For DALI would read other pixels, or such as are not in the file."""
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.asarray(PHOTOGRAPH), photometric="rgb", planarconfig="contig", metadata=None)
    data = stream.getvalue()
    assert parse_header(memoryview(data)).native
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        place = file.pages[0].tags[tag].valueoffset
    changed = bytearray(data)
    changed[place : place + 2] = value.to_bytes(2, "little")
    assert not parse_header(memoryview(bytes(changed))).native
