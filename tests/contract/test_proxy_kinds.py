"""Which images a dataset that is asked for samples may have in them: as torchvision takes them, all of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import CROP, encoded
from helpers.proxied import EXACT, Image, Make, Samples, assert_near, decoded, decoded_in, pair
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali import DALILoader, SampleError
from torchdali.samples.image import RefusedError, UnreadableError, make_black, to_image_input

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT = 5


@pytest.fixture
def photographs(pictures: Path) -> list[Image]:
    return decoded_in(pictures, COUNT)


# What stands for a photograph, what torchvision is given in its place, and whether it is a lossy file.
def alpha(image: Image, mode: str) -> Image:
    image = image.convert(mode)
    image.putalpha(PIL.Image.linear_gradient("L").resize(image.size))
    return image


def deep(image: Image) -> Image:
    return PIL.Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 200)


def file(kind: str, change: Make = lambda image: image, **options: Any) -> Make:
    return lambda image: encoded(change(image), kind, **options)


def lazily(data: bytes) -> Image:
    return PIL.Image.open(io.BytesIO(data))


MODES: dict[str, Make] = {
    "RGB": lambda image: image,
    "L": lambda image: image.convert("L"),
    "RGBA": lambda image: alpha(image, "RGBA"),
    "LA": lambda image: alpha(image, "LA"),
    "P": lambda image: image.quantize(40),
    "I": lambda image: image.convert("L").convert("I"),
    "I;16": deep,
    "F": lambda image: image.convert("F"),
    "CMYK": lambda image: image.convert("CMYK"),
    "YCbCr": lambda image: image.convert("YCbCr"),
    "HSV": lambda image: image.convert("HSV"),
}
PIXELS: dict[str, Make] = {
    "array": np.array,
    "array with strides": lambda image: np.array(image)[::2, 1:],
    "array (H, W, 1)": lambda image: np.array(image)[..., :1],
    "array (H, W, 4)": lambda image: np.array(alpha(image, "RGBA")),
    "array float32": lambda image: np.asarray(image).astype(np.float32) / 255,
    "array float64": lambda image: np.asarray(image) / 255.0,
    "array float16": lambda image: (np.asarray(image) / 255.0).astype(np.float16),
    "array int16": lambda image: np.asarray(image).astype(np.int16) - 99,
    "array uint16": lambda image: np.asarray(image).astype(np.uint16) * 200,
    "tensor": F.pil_to_tensor,
    "tensor float32": lambda image: F.pil_to_tensor(image) / 200 - 0.5,
    "tensor float64": lambda image: F.pil_to_tensor(image).double() / 255,
    "tensor with strides": lambda image: F.pil_to_tensor(image).transpose(1, 2),
    "tensor that has a gradient": lambda image: (F.pil_to_tensor(image) / 255).requires_grad_(),
    "tv_tensors.Image": F.to_image,
    "tv_tensors.Image float32": lambda image: tv_tensors.Image(F.pil_to_tensor(image) / 255),
}
FILES: dict[str, Make] = {
    "JPEG": file("JPEG"),
    "grey JPEG": file("JPEG", lambda image: image.convert("L")),
    "CMYK JPEG": file("JPEG", lambda image: image.convert("CMYK")),
    "PNG": file("PNG"),
    "PNG 16 bits": file("PNG", deep),
    "PNG with palette": file("PNG", lambda image: image.quantize(40)),
    "PNG with alpha": file("PNG", lambda image: alpha(image, "RGBA")),
    "WebP": file("WEBP", lossless=True),
    "GIF": file("GIF"),
    "BMP": file("BMP"),
    "TIFF": file("TIFF"),
}
HOLDERS: dict[str, Make] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "array": lambda data: np.frombuffer(data, np.uint8),
    "tensor": lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8),
    "PIL, not loaded": lazily,
}


def compared(images: list[Any], make: Make, true: Make, chain: Any, device: str, mean: float, workers: int = 0) -> int:
    """Ours of what ``make`` makes of images, with the chain; against torchvision's chain on what ``true`` makes.

    Gives the number of batches that were found near enough.
    """
    theirs = DataLoader(Samples(images, pair, lambda image: chain(true(image))), 3)
    ours = DALILoader(Samples(images, pair, make), 3, transform=chain, device=device, num_workers=workers)
    with torch.no_grad():
        batches = list(ours)
        assert_near(batches, list(theirs), mean)
    return len(batches)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] * (i % 3 > 0))
        for i, (name, make) in enumerate((MODES | PIXELS).items())
    ],
)
def test_kinds_of_pixels(photographs: Any, make: Make, device: str) -> None:
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop((CROP, 20)), v2.Pad(2)])
    assert compared(photographs, make, make, chain, device, 0)
    assert compared(photographs[:3], make, make, chain, device, 0, workers=1)


@pytest.mark.parametrize("make", (MODES | PIXELS).values(), ids=(MODES | PIXELS).keys())
def test_kinds_of_pixels_are_scaled_as_torchvision_scales_them(photographs: Any, make: Make, device: str) -> None:
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), v2.ToDtype(torch.float32, scale=True)])
    assert compared(photographs, make, make, chain, device, 1e-7)
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), v2.ToDtype(torch.float32), v2.Normalize([0.2], [3.0])])
    assert compared(photographs, make, make, chain, device, 1e-4)


@pytest.mark.parametrize("make", FILES.values(), ids=FILES.keys())
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
def test_kinds_of_files(photographs: Any, make: Make, holder: Make, device: str) -> None:
    """Read as RGB where they are files of 8 bits; as the image that they are where PIL has opened them."""
    keeps_mode = holder is lazily or make(photographs[0])[:25].endswith(b"\x10")
    whole = (lambda image: lazily(make(image))) if keeps_mode else lambda image: decoded(make(image))
    lossy = device == "cuda" and b"JFIF" in make(photographs[0])
    assert compared(photographs, lambda image: holder(make(image)), whole, EXACT, device, 5 if lossy else 0)


def test_a_draft_of_a_file_is_what_pil_makes_of_it(photographs: Any, device: str) -> None:
    def drafted(image: Image) -> Any:
        opened: Any = lazily(encoded(image, "JPEG"))
        opened.draft("RGB", (image.width // 2, image.height // 2))
        assert opened.size < image.size
        return opened

    assert compared(photographs, drafted, drafted, EXACT, device, 0)


def test_a_relative_path_is_that_of_the_process_that_gave_it(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = min(pictures.rglob("*.jpg"))
    monkeypatch.chdir(path.parent)
    assert bytes(to_image_input(Path(path.name)).data) == bytes(path)


def test_half_a_file_is_unreadable_and_says_how_large_it_was(photographs: Any) -> None:
    whole = encoded(photographs[0], "JPEG")
    with pytest.raises(UnreadableError, match="truncated") as raised:
        to_image_input(whole[: len(whole) // 2])
    size = (photographs[0].height, photographs[0].width)
    assert raised.value.size == size
    assert lazily(bytes(make_black(size).data)).size == photographs[0].size


def test_a_transform_for_pil_images_is_given_bytes_alone(photographs: Any) -> None:
    floats = np.asarray(photographs[0]) / np.float32(255)
    assert to_image_input(floats).size == floats.shape[:2]
    with pytest.raises(RefusedError, match="an array of float32"):
        to_image_input(floats, "rule")


def test_paths_and_mixed_kinds(photographs: Any, pictures: Path, device: str) -> None:
    paths = sorted(pictures.rglob("*.jpg"))[:COUNT]
    mean = 5 if device == "cuda" else 0
    assert compared(paths, lambda path: path, lambda path: decoded(path.read_bytes()), EXACT, device, mean, workers=1)
    makes = [np.array, F.pil_to_tensor, file("PNG"), lambda image: image, F.to_image]
    numbered = list(zip(makes, photographs, strict=True))
    assert compared(numbered, lambda one: one[0](one[1]), lambda one: one[1], EXACT, device, 0)
    grey = v2.Compose([v2.ToImage(), v2.Grayscale(), v2.CenterCrop(CROP)])
    modes = [MODES[mode] for mode in ("RGB", "L", "RGB", "L", "L")]
    numbered = list(zip(modes, photographs, strict=True))
    assert compared(numbered, lambda one: one[0](one[1]), lambda one: one[0](one[1]), grey, device, 1e-3)


@pytest.mark.parametrize("mode", ["P", "CMYK", "YCbCr", "HSV", "F", "I;16", "1"])
def test_modes_that_only_pil_knows_must_be_converted(photographs: Any, mode: str, device: str) -> None:
    """A palette or a colour space would be lost in a rule. A transform that torch runs gets the image itself."""
    make = MODES.get(mode, lambda image: image.convert(mode))
    to_rgb = v2.Lambda(lambda image: image.convert("RGB"))
    chain = v2.Compose([v2.Identity(), to_rgb, v2.ToImage(), v2.CenterCrop(CROP)])
    crop = v2.Compose([v2.CenterCrop(CROP), v2.ToImage()])
    with pytest.raises(SampleError, match=rf"mode '{mode}', .* begin with v2.ToImage\(\), or convert"):
        next(iter(DALILoader(Samples(photographs, pair, make), 2, transform=crop, device=device)))
    assert compared(photographs, make, make, chain, device, 0)
    assert compared(photographs, MODES["L"], MODES["L"], chain, device, 0)
    assert compared(photographs, MODES["RGBA"], MODES["RGBA"], chain, device, 0)


@pytest.mark.parametrize("kind", ["1", "I", "F", "I;16", "array float32", "array int16", "array uint16"])
@pytest.mark.parametrize("to_tensor", [v1.ToTensor, v2.ToTensor], ids=["v1", "v2"])
@pytest.mark.filterwarnings("ignore:The transform `ToTensor:UserWarning")
def test_to_tensor_scales_bytes_alone(photographs: Any, to_tensor: Any, kind: str, device: str) -> None:
    chain = v2.Compose([to_tensor(), v2.CenterCrop(CROP)])
    make = {**MODES, **PIXELS, "1": lambda image: image.convert("1")}[kind]
    assert compared(photographs, make, make, chain, device, 0)


def test_half_precision_is_flipped(photographs: Any, device: str) -> None:
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop(CROP), v2.RandomHorizontalFlip(1)])
    assert compared(photographs, PIXELS["array float16"], PIXELS["array float16"], chain, device, 0)


@pytest.mark.parametrize("kind", ["array", "array (H, W, 1)", "array float32", "array int16"])
@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_that_torch_runs_first_get_arrays(photographs: Any, kind: str, workers: int, device: str) -> None:
    """As functions that are written for arrays expect them, and ``ToPILImage``, which refuses PIL images."""
    chain = v2.Compose(
        [v2.Identity(), lambda array: torch.from_numpy(array[5 : 5 + CROP, :20].transpose(2, 0, 1).copy())]
    )
    assert compared(photographs, PIXELS[kind], PIXELS[kind], chain, device, 0, workers)
    if kind in ("array", "array (H, W, 1)"):
        chain = v2.Compose([v2.ToPILImage(), v2.CenterCrop(CROP), v2.PILToTensor()])
        assert compared(photographs, PIXELS[kind], PIXELS[kind], chain, device, 0, workers)
