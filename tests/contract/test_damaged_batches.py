"""Damaged files in batches as large as those of a training, and files whose headers say what is not so."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
import torch
from conftest import encoded
from PIL import Image, features
from skimage.data import coffee
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, ImageIndex, SampleError

pytestmark = pytest.mark.timeout(120)

CHAIN = v2.Compose([v2.Resize((16, 16)), v2.ToImage()])
COUNT, BAD = 64, 5
PICTURE = Image.fromarray(coffee()).resize((60, 40))


def folder(root, damaged, suffix, kind="PNG"):
    """64 whole files, but for one."""
    (root / "c").mkdir(parents=True)
    whole = encoded(PICTURE, kind)
    for number in range(COUNT):
        (root / "c" / f"{number:02}.{suffix}").write_bytes(damaged if number == BAD else whole)
    return ImageFolder(root, CHAIN)


def png_of(height, width):
    """A PNG whose header, with a checksum that is right, says another size."""
    data = bytearray(encoded(PICTURE, "PNG"))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def jpeg_of(height, width):
    data = bytearray(encoded(PICTURE, "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def two_frames(damaged):
    """A JPEG with a second frame header, which DALI would take for the one that counts."""
    data = encoded(Image.new("RGB", (60, 40)), "JPEG")
    if damaged == "one bit":  # a table of Huffman codes becomes a frame header, of 17 bits a sample
        at = data.rindex(b"\xff\xc4")
        return data[: at + 1] + b"\xc5" + data[at + 2 :]
    at = data.index(b"\xff\xc0")
    frame = bytearray(data[at : at + 19])
    frame[5:9] = b"\0\2\0\2"
    return data[: at + 19] + bytes(frame) + data[at + 19 :]


LARGE_BATCHES = """
import sys
from pathlib import Path
import torchdali
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

root, device = Path(sys.argv[1]), sys.argv[2]
chain = v2.Compose([v2.Resize((16, 16)), v2.ToImage()])
run = torchdali.compile(v2.Compose([v2.RandomResizedCrop(16), v2.ToImage()]), device=device, num_threads=4)
for folder in sorted(root.iterdir()):
    for mode in ["raise", "skip", "replace"]:
        loader = torchdali.DALILoader(ImageFolder(folder, chain), batch_size=64, on_error=mode, device=device)
        try:
            ((images, labels),) = loader
            print(folder.name, "made", len(images), [error.index for error in loader.errors], flush=True)
        except torchdali.SampleError as error:
            print(folder.name, "refused", error.index, flush=True)
    for _ in range(3):
        try:
            run([path.read_bytes() for path in sorted((folder / "c").iterdir())])
        except torchdali.SampleError as error:
            print(folder.name, "refused", error.index, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # on a GPU it builds fifty pipelines, in 80 s alone, and longer beside other tests
def test_no_file_in_a_large_batch_kills_the_process(device, run_script, tmp_path):
    """DALI's decoder reads headers in several threads from 32 images on.

    It dies of a header that ends too early, of a strange frame header, and of a window that is not within its image.
    """
    files = {
        "early JPEG": (encoded(PICTURE, "JPEG")[:200], "jpeg", "JPEG"),
        "early PNG": (encoded(PICTURE, "PNG")[:40], "png", "PNG"),
        "frame 19 bytes": (two_frames("19 bytes"), "jpg", "JPEG"),
    }
    whole = encoded(PICTURE, "PNG")[:-12]  # without its last chunk, as PIL reads it
    Image.open(io.BytesIO(whole)).load()
    for name, arguments in {**files, "no end": (whole, "png", "PNG")}.items():
        folder(tmp_path / "root" / name, *arguments)
    done = run_script(LARGE_BATCHES, tmp_path / "root", device, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    events = ["refused 5", "made 64 [5]", "made 64 [5]"] + ["refused 5"] * 3
    assert done.stdout.splitlines() == [
        *(f"{name} {event}" for name in files for event in events),
        *["no end made 64 []"] * 3,
    ]


@pytest.mark.parametrize("damaged", ["one bit", "19 bytes"])
def test_a_second_frame_header_is_found_in_first_bytes_and_in_files(damaged, device, tmp_path):
    dataset = folder(tmp_path / "root", two_frames(damaged), "jpg", "JPEG")
    with pytest.raises((OSError, SyntaxError)):
        dataset[BAD]
    for size in (8, COUNT):
        loader = DALILoader(dataset, batch_size=size, on_error="skip", device=device)
        assert sum(len(images) for images, _ in loader) == COUNT
        assert [error.index for error in loader.errors] == [BAD]


@pytest.mark.parametrize(("count", "apart"), [(1, True), (2, False)])
def test_of_an_animated_png_comes_the_image_that_pil_shows(count, apart, device, tmp_path):
    pictures = [PICTURE.rotate(90 * i) for i in range(count + 1)]
    stream = io.BytesIO()
    pictures[0].save(stream, "PNG", save_all=True, append_images=pictures[1:], default_image=apart)
    dataset = folder(tmp_path / "root", stream.getvalue(), "png")
    dataset.transform = v2.ToImage()
    for size in (8, COUNT):
        images = torch.cat([images for images, _ in DALILoader(dataset, batch_size=size, device=device)])
        assert torch.equal(images[BAD].cpu(), dataset[BAD][0])


@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("damaged", "kind"),
    [
        (jpeg_of(65_535, 65_535), "JPEG"),
        (png_of(30_000, 30_000), "PNG"),
        (png_of(2**31 - 1, 20), "PNG"),
        (png_of(1, 2**20 + 1), "PNG"),
    ],
    ids=["JPEG", "PNG", "PNG of two gigapixels", "PNG of one line"],
)
def test_a_black_image_is_no_larger_than_pil_would_decode(damaged, kind, device, tmp_path):
    dataset = folder(tmp_path / "root", damaged, kind.lower(), kind)
    dataset.transform = v2.ToImage()
    loader = DALILoader(dataset, batch_size=COUNT, on_error="replace", device=device)
    ((images, _),) = loader
    assert images.shape == (COUNT, 3, 40, 60)
    assert images[BAD].sum() == 0
    assert [error.index for error in loader.errors] == [BAD]


@pytest.mark.parametrize("size", [8, COUNT])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_images_are_as_large_as_pil_allows(kind, size, device, monkeypatch, tmp_path):
    dataset = folder(tmp_path / "root", encoded(PICTURE.resize((120, 80)), kind), kind.lower(), kind)
    for most in (None, 120 * 80):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        assert sum(len(images) for images, _ in DALILoader(dataset, size, device=device)) == COUNT
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 120 * 80 // 2 - 1)
    with pytest.raises(Image.DecompressionBombError):
        dataset[BAD]
    with pytest.raises(SampleError, match="sample 5 ") as raised:
        list(DALILoader(dataset, size, device=device))
    assert isinstance(raised.value.__cause__, Image.DecompressionBombError)


def test_images_of_an_index_are_as_large_as_pil_allows(device, monkeypatch, tmp_path):
    """It knows their sizes from when it was written."""
    folder(tmp_path / "root", encoded(PICTURE.resize((120, 80)), "PNG"), "png")
    ImageIndex.write(tmp_path / "index.npz", tmp_path / "root", headers=True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 120 * 80 // 2 - 1)
    with pytest.raises(SampleError, match="sample 5 ") as raised:
        list(DALILoader(ImageIndex(tmp_path / "index.npz", CHAIN), 8, device=device))
    assert isinstance(raised.value.__cause__, Image.DecompressionBombError)


def broken_data():
    """A JPEG with a second beginning in its data, and no end: PIL refuses it, DALI decodes it."""
    data = bytearray(encoded(PICTURE, "JPEG"))
    data[-200:-198] = b"\xff\xd8"
    return bytes(data[:-2])


@pytest.mark.parametrize("size", [16, COUNT])
def test_a_black_image_stands_for_a_damaged_one_in_batches_of_any_size(size, device, tmp_path):
    """Headers of 32 files and more are read together, from files that a black image stands for as well."""
    dataset = folder(tmp_path / "root", broken_data(), "jpg", "JPEG")
    (tmp_path / "root/c/10.jpg").write_bytes(encoded(PICTURE, "PNG")[:-12])
    loader = DALILoader(dataset, batch_size=size, on_error="replace", device=device)
    images = torch.cat([images for images, _ in loader])
    assert [error.index for error in loader.errors] == [BAD]
    assert images[BAD].sum() == 0
    assert np.count_nonzero(images.flatten(1).sum(1).cpu().numpy() == 0) == 1


def avif():
    if not features.check("avif"):
        pytest.skip("this PIL has no AVIF")
    data = bytearray(encoded(PICTURE, "AVIF"))
    start = data.index(b"mdat") + 8
    data[start : start + 16] = b"\xff" * 16
    return bytes(data)


OTHERS = {
    "twenty bytes": lambda: encoded(PICTURE, "PNG")[:20],
    "no size": lambda: png_of(0, 0),
    "AVIF": avif,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_pil_raises_on_a_damaged_file_is_its_samples_error(name, device, tmp_path):
    damaged = OTHERS[name]()
    with pytest.raises((OSError, SyntaxError, RuntimeError)):
        Image.open(io.BytesIO(damaged)).load()
    dataset = folder(tmp_path / "root", damaged, "png")
    with pytest.raises(SampleError, match=r"sample 5 .*cannot be"):
        list(DALILoader(dataset, batch_size=8, device=device))
    loader = DALILoader(dataset, batch_size=8, on_error="skip", device=device)
    assert sum(len(labels) for _, labels in loader) == COUNT
    assert [error.index for error in loader.errors] == [BAD]
