"""What is wrong with a sample is said in its batch's turn, names the sample, and harms nothing after it."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageCms
import PIL.PngImagePlugin
import pytest
import torch
from conftest import PER_BATCH, Numbered, assert_pairs, in_order
from torch.utils.data import Subset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import BatchShapeError, DALILoader, SampleError

pytestmark = pytest.mark.timeout(30)

BAD = 7
OF_BAD = BAD // PER_BATCH
"""The batch that has the bad sample in it: the third of eight."""


def sample_path(dataset: ImageFolder, index: int = BAD) -> Path:
    return Path(dataset.samples[index][0])


def encoded(image: PIL.Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.fixture
def photograph(pictures: Path) -> PIL.Image.Image:
    with PIL.Image.open(pictures / "coffee" / "3.jpg") as image:
        return image.convert("RGB")


@pytest.fixture
def fresh(fresh_pictures: Path, numbered: Numbered) -> ImageFolder:
    """A numbered dataset whose files may be damaged."""
    return numbered(fresh_pictures)


# Files that are no pictures


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def shortened(kind: str, part: float, **options: Any) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        with PIL.Image.open(path) as image:
            data = encoded(image.convert("RGB"), kind, **options)
        path.write_bytes(data[: round(part * len(data))])

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(np.random.default_rng(0).bytes(2000)),
    "garbage after a JPEG's first bytes": lambda path: path.write_bytes(path.read_bytes()[:30] + bytes(2000)),
    "truncated JPEG": shortened("JPEG", 0.7),
    "JPEG without its last bytes": shortened("JPEG", 0.98),
    "truncated progressive JPEG": shortened("JPEG", 0.9, progressive=True),
    "truncated PNG": shortened("PNG", 0.7),
    "truncated BMP": shortened("BMP", 0.7),
    "truncated WEBP": shortened("WEBP", 0.7),
    "truncated GIF": shortened("GIF", 0.7),
    "header alone": shortened("JPEG", 0.2),
    "empty": lambda path: path.write_bytes(b""),
    "vanished": Path.unlink,
    "directory": directory,
    "dangling link": lambda path: (path.unlink(), path.symlink_to(path.parent / "nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("known", [False, True], ids=["never read", "read before"])
def test_damaged_file_is_named_in_its_turn(
    fresh: ImageFolder, damage: Callable[[Path], object], known: bool, device: str
) -> None:
    loader = DALILoader(fresh, PER_BATCH, device=device)
    if known:
        assert_pairs(loader, fresh, in_order())
    path = sample_path(fresh)
    content = path.read_bytes()
    damage(path)
    with pytest.raises((OSError, SyntaxError)):
        fresh[BAD]

    for _ in range(2):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(OF_BAD)), fresh, in_order()[:OF_BAD])
        with pytest.raises(SampleError) as caught:
            next(iterator)
        assert (caught.value.index, caught.value.path) == (BAD, str(path))
        assert f"sample {BAD} ({path})" in str(caught.value)
        assert isinstance(caught.value, RuntimeError)
        assert_pairs(iterator, fresh, in_order()[OF_BAD + 1 :])

    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    path.write_bytes(content)
    assert_pairs(loader, fresh, in_order())


def test_the_index_is_the_loaders(fresh: ImageFolder) -> None:
    sample_path(fresh).unlink()
    subset = Subset(fresh, [1, 2, BAD, 4])
    with pytest.raises(SampleError, match="no such file") as caught:
        next(iter(DALILoader(subset, 4, sampler=[3, -2], device="cpu")))
    assert (caught.value.index, caught.value.path) == (2, str(sample_path(fresh)))


def test_each_of_several_bad_files_is_named(fresh: ImageFolder, device: str) -> None:
    bad = {1: "vanished", 6: "truncated JPEG", 7: "garbage", 23: "truncated PNG"}
    for index, damage in bad.items():
        DAMAGES[damage](sample_path(fresh, index))
    iterator, named, whole = iter(DALILoader(fresh, PER_BATCH, device=device)), [], []
    for _ in range(8):
        try:
            whole.append(next(iterator))
        except SampleError as error:
            named.append(error.index)
    assert named in ([1, 6, 23], [1, 7, 23])
    assert_pairs(whole, fresh, [labels for labels in in_order() if not bad.keys() & set(labels)])
    assert next(iterator, None) is None


# Files that are not what their name says, and files that PIL forgives


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
    fresh: ImageFolder, photograph: PIL.Image.Image, content: Callable[[PIL.Image.Image], bytes], device: str
) -> None:
    path = sample_path(fresh)
    path.write_bytes(content(photograph))
    loader = DALILoader(fresh, PER_BATCH, device=device)
    for _ in range(2):
        if error := refusal(fresh, BAD):
            with pytest.raises(SampleError, match=f"sample {BAD} ") as caught:
                list(loader)
            assert error in str(caught.value)
        else:
            assert_pairs(loader, fresh, in_order())


def test_rotation_in_exif_is_not_followed(fresh: ImageFolder, photograph: PIL.Image.Image, device: str) -> None:
    assert photograph.width != photograph.height
    sample_path(fresh).write_bytes(rotated(photograph))
    fresh.transform = v2.ToImage()
    loader = DALILoader(Subset(fresh, [BAD]), None, device=device)
    assert next(iter(loader))[0].shape == (3, photograph.height, photograph.width)


@pytest.mark.parametrize("size", [(30, 20), (140, 130)], ids=["smaller", "larger"])
def test_file_that_is_rewritten_between_epochs_is_read_anew(
    fresh: ImageFolder, photograph: PIL.Image.Image, size: tuple[int, int], device: str
) -> None:
    loader = DALILoader(fresh, PER_BATCH, device=device)
    assert_pairs(loader, fresh, in_order())
    sample_path(fresh).write_bytes(encoded(photograph.resize(size), "JPEG"))
    assert_pairs(loader, fresh, in_order())


# Batches that cannot be made


@pytest.mark.parametrize(
    ("chain", "advice"),
    [
        ([v2.ToImage()], "Resize((224, 224))"),
        ([v2.ToImage(), v2.Resize(32)], "add CenterCrop(32)"),
        ([v2.ToImage(), v2.Lambda(torch.clone)], "RandomResizedCrop(224)"),
    ],
    ids=["no size", "one side", "in torch"],
)
def test_unequal_shapes_name_two_samples_and_a_transform(
    pictures: Path, numbered: Numbered, chain: Any, advice: str, device: str
) -> None:
    dataset = numbered(pictures, v2.Compose(chain))
    shapes = [tuple(dataset[index][0].shape) for index in range(4)]
    other = next(index for index in range(4) if shapes[index] != shapes[0])
    loader = DALILoader(dataset, 4, device=device)
    iterator = iter(loader)
    with pytest.raises(BatchShapeError) as caught:
        next(iterator)
    for index in (0, other):
        assert f"{shapes[index]} (sample {index}, {sample_path(dataset, index)})" in str(caught.value)
    assert advice in str(caught.value)
    with pytest.raises(BatchShapeError, match="sample 4, "):
        next(iterator)
    assert len(list(DALILoader(dataset, 1, device=device))) == 24


def test_crop_larger_than_a_picture_names_both(pictures: Path, numbered: Numbered, device: str) -> None:
    dataset = numbered(pictures, v2.Compose([v2.ToImage(), v2.RandomCrop(70)]))
    smaller = [min(picture.size) < 70 for picture, _ in numbered(pictures, None)]
    small, large = ([i for i in range(24) if smaller[i] is which] for which in (True, False))
    iterator = iter(DALILoader(dataset, PER_BATCH, sampler=[*large[:3], large[0], small[0], *large[:3]], device=device))
    assert next(iterator)[0].shape == (3, 3, 70, 70)
    with pytest.raises(SampleError, match=r"transform 2, RandomCrop\(size=\(70, 70\).*larger than the image") as caught:
        next(iterator)
    assert (caught.value.index, caught.value.path) == (small[0], str(sample_path(dataset, small[0])))
    assert next(iterator)[1].tolist() == large[1:3]


class OwnError(Exception):
    """Raised by what users write."""


def failing_at(call: int) -> Callable[[Any], Any]:
    """An identity that fails once."""
    calls = iter(range(1000))

    def maybe(value: Any) -> Any:
        if next(calls) == call:
            raise OwnError("mine")
        return value

    return maybe


@pytest.mark.parametrize("place", ["transform", "target_transform", "collate_fn"])
def test_errors_of_users_code_are_theirs(
    pictures: Path, numbered: Numbered, dataset: ImageFolder, place: str, device: str
) -> None:
    whole = numbered(pictures)
    collate = default_collate
    if place == "transform":
        dataset.transform = v2.Compose([*dataset.transform.transforms, v2.Lambda(failing_at(BAD))])
    elif place == "target_transform":
        dataset.target_transform = failing_at(BAD)
    else:
        fail = failing_at(OF_BAD)
        collate = lambda samples: fail(default_collate(samples))  # noqa: E731
    loader = DALILoader(dataset, PER_BATCH, collate_fn=collate, device=device)
    iterator = iter(loader)
    assert_pairs((next(iterator) for _ in range(OF_BAD)), whole, in_order()[:OF_BAD])
    with pytest.raises(OwnError, match="mine"):
        next(iterator)
    assert_pairs(iterator, whole, in_order()[OF_BAD + 1 :])
    assert_pairs(loader, whole, in_order())


class Raising:
    """A batch sampler that fails after two batches."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from in_order()[:2]
        raise OwnError("mine")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("sampler", "error", "text"),
    [
        (Raising(), OwnError, "mine"),
        ([*in_order()[:2], [1, 24]], IndexError, "24"),
        ([*in_order()[:2], [-25, 0]], IndexError, "-25"),
        ([*in_order()[:2], ["x"]], TypeError, "str"),
        ([*in_order()[:2], [1.0]], TypeError, "float"),
    ],
    ids=["raises", "too large", "too small", "text", "float"],
)
def test_errors_of_the_sampler_come_after_the_batches_before(
    dataset: ImageFolder, sampler: Any, error: type[Exception], text: str, workers: int
) -> None:
    loader = DALILoader(dataset, batch_sampler=sampler, num_workers=workers, device="cpu")
    for _ in range(2):
        iterator = iter(loader)
        assert_pairs((next(iterator) for _ in range(2)), dataset, in_order()[:2])
        with pytest.raises(error, match=text):
            next(iterator)


def test_nothing_to_load(dataset: ImageFolder) -> None:
    assert list(DALILoader(dataset, sampler=[], device="cpu")) == []
    assert list(DALILoader(dataset, batch_sampler=[], num_workers=2, device="cpu")) == []
    assert list(DALILoader(dataset, 25, drop_last=True, device="cpu")) == []
    assert list(DALILoader(Subset(dataset, []), device="cpu")) == []
    dataset.samples = []
    loader = DALILoader(dataset, device="cpu")
    assert (list(loader), len(loader)) == ([], 0)


def test_empty_batch_is_what_collate_makes_of_it(dataset: ImageFolder) -> None:
    batches = [[1], [], [2]]
    assert [len(batch) for batch in DALILoader(dataset, batch_sampler=batches, collate_fn=list, device="cpu")] == [
        1,
        0,
        1,
    ]
    iterator = iter(DALILoader(dataset, batch_sampler=batches, device="cpu"))
    next(iterator)
    with pytest.raises(IndexError):
        next(iterator)
    assert_pairs(iterator, dataset, [[2]])


def test_batches_of_any_size(dataset: ImageFolder, device: str) -> None:
    """Also larger than the one that was declared, growing and shrinking, and a short last one."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(24, size=size).tolist() for size in (1, 2, 5, 3, 17, 1, 40, 40, 2, 16)]
    loader = DALILoader(dataset, batch_sampler=batches, device=device)
    assert_pairs(loader, dataset, batches)
    assert_pairs(loader, dataset, batches)
    assert_pairs(
        DALILoader(dataset, 10, device=device), dataset, [list(range(i, min(i + 10, 24))) for i in (0, 10, 20)]
    )
