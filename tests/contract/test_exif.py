"""A first transform that turns images by EXIF: DALI's decoder does it, and the pictures are PIL's."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encoded
from PIL import Image, ImageOps, PngImagePlugin
from skimage import data as photos
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import torchdali
from torchdali import DALILoader, ImageIndex
from torchdali.sources import UNREADABLE, parse_header
from torchdali.transforms import ExifTranspose, MultiView
from torchdali.transforms.rng import Draws, epoch_key

PHOTO = Image.fromarray(photos.astronaut()[20:111, :140])
ORIENTATION = 0x0112
CROP = (40, 61)
pytestmark = pytest.mark.timeout(60)


def exif(orientation: int | None = None, order: str = "<", more: bytes = b"", kind: int = 3) -> bytes:
    """Return EXIF data with an orientation, of a type such as SHORT (3), and a text."""
    entries: list[bytes] = []
    if more:
        entries.append(struct.pack(f"{order}HHII", 0x010E, 2, len(more), 38))
    if orientation is not None:
        value = struct.pack(f"{order}HH", orientation, 0) if kind == 3 else struct.pack(f"{order}I", orientation)
        entries.append(struct.pack(f"{order}HHI", ORIENTATION, kind, 1) + value)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(entries))
    return b"Exif\0\0" + head + b"".join(entries) + bytes(4) + more


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


def png(orientation: int, behind: bool = False, key: str = "") -> bytes:
    """Return a PNG with an orientation: in eXIf, before or behind the pixels, or in a text."""
    info, content = PngImagePlugin.PngInfo(), b""
    if key == "XML:com.adobe.xmp":
        info.add_itxt(key, (XMP % orientation).decode())
    elif key:
        profile = exif(orientation)
        info.add_text(key, f"\nexif\n{len(profile):8}\n{profile.hex()}\n")
    content = encoded(PHOTO, "PNG", pnginfo=info)
    if key:
        return content
    data = exif(orientation)[6:]
    chunk = struct.pack(">I", len(data)) + b"eXIf" + data + struct.pack(">I", zlib.crc32(b"eXIf" + data))
    place = content.index(b"IEND" if behind else b"IDAT") - 4
    return content[:place] + chunk + content[place:]


def jpeg(orientation: int, **options: Any) -> bytes:
    return encoded(PHOTO, "JPEG", exif=exif(orientation), **options)


KINDS: dict[str, Callable[[int], bytes]] = {
    "jpeg": jpeg,
    "progressive": lambda o: jpeg(o, progressive=True),
    "grey jpeg": lambda o: encoded(PHOTO.convert("L"), "JPEG", exif=exif(o)),
    "cmyk jpeg": lambda o: encoded(PHOTO.convert("CMYK"), "JPEG", exif=exif(o)),
    "big-endian": lambda o: encoded(PHOTO, "JPEG", exif=exif(o, ">")),
    "long exif": lambda o: encoded(PHOTO, "JPEG", exif=exif(o, more=b"x" * 5000)),
    "as LONG": lambda o: encoded(PHOTO, "JPEG", exif=exif(o, kind=4)),
    "xmp": lambda o: encoded(PHOTO, "JPEG", xmp=XMP % o),
    "xmp against exif": lambda o: encoded(PHOTO, "JPEG", xmp=XMP % 3, exif=exif(o)),
    "xmp beside empty exif": lambda o: encoded(PHOTO, "JPEG", xmp=XMP % o, exif=exif()),
    "png": png,
    "png, behind": lambda o: png(o, behind=True),
    "png, text": lambda o: png(o, key="Raw profile type exif"),
    "png, xmp": lambda o: png(o, key="XML:com.adobe.xmp"),
    "rgba png": lambda o: encoded(PHOTO.convert("RGBA"), "PNG", exif=exif(o)),
    "webp": lambda o: encoded(PHOTO, "WEBP", lossless=True, exif=exif(o)),
    "tiff": lambda o: encoded(PHOTO, "TIFF", tiffinfo={ORIENTATION: o}),
}
BY_DALI = ("jpeg", "progressive", "grey jpeg", "big-endian", "long exif", "xmp against exif")
UPRIGHT = {
    "no exif": encoded(PHOTO, "JPEG"),
    "empty exif": encoded(PHOTO, "JPEG", exif=exif()),
    "orientation 0": jpeg(0),
    "orientation 9": jpeg(9),
    "plain png": encoded(PHOTO, "PNG"),
    "gif": encoded(PHOTO, "GIF"),
}
ALL = ("jpeg", "progressive", "png", "webp", "tiff")
"""Kinds with all orientations. Of the others four tell enough."""
FILES = {f"{name} {o}": make(o) for name, make in KINDS.items() for o in (range(1, 9) if name in ALL else (1, 4, 6, 7))}
FILES |= UPRIGHT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with every orientation."""
    root = tmp_path_factory.mktemp("exif")
    (root / "a").mkdir()
    for i, content in enumerate(FILES.values()):
        (root / "a" / f"{i:03}.jpg").write_bytes(content)
    return root


def together(samples: Any) -> Any:
    return [image for image, *_ in samples]


def pictures(loader: Any) -> list[torch.Tensor]:
    return [image.cpu() for batch in loader for image in batch]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor], device: str = "cpu") -> None:
    """JPEGs that a GPU decodes may differ a little, and the photograph differs much from itself turned."""
    assert len(ours) == len(theirs)
    for name, one, other in zip(FILES, ours, theirs, strict=False):
        assert one.shape == other.shape, name
        difference = (one.int() - other.int()).abs().float()
        assert difference.max() == 0 if device == "cpu" else difference.mean() < 3, name


def both(root: Path, chain: Any, device: str, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    dataset, settings = ImageFolder(root, chain), {"batch_size": 40, "collate_fn": together}
    return pictures(DALILoader(dataset, device=device, **settings, **options)), pictures(
        DataLoader(dataset, **settings)
    )


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (ImageOps.exif_transpose, []),
        (v1.Lambda(ImageOps.exif_transpose), [v2.CenterCrop(CROP)]),
        (v2.Lambda(ImageOps.exif_transpose), [v2.CenterCrop(CROP)]),
        (ExifTranspose(), []),
    ],
    ids=["function", "v1.Lambda", "v2.Lambda", "class"],
)
def test_files_are_turned_as_pil_turns_them(folder: Path, first: Any, then: list[Any], device: str) -> None:
    chain = v2.Compose([v2.Identity(), first, *then, v2.PILToTensor()])
    assert_same(*both(folder, chain, device), device)
    loader = DALILoader(ImageFolder(folder, chain), 40, device=device, collate_fn=together)
    next(iter(loader))
    plan = loader._session.native_plan.plan
    assert {step.library for step in plan.steps} <= {"DALI", "nothing"}
    assert plan.adjust_orientation
    assert "turned by EXIF" in str(plan)


def test_windows_lie_in_the_turned_image(folder: Path, device: str) -> None:
    """Windows that are drawn are decoded alone, and counted from the corner of the turned image."""
    crop = v2.Compose([ExifTranspose(), v2.RandomCrop(CROP), v2.PILToTensor()])
    whole = v2.Compose([ExifTranspose(), v2.PILToTensor()])
    settings: Any = {"batch_size": 40, "collate_fn": together}
    loader = DALILoader(ImageFolder(folder, crop), device=device, seed=3, **settings)
    windows = pictures(loader)
    assert loader._session.native_plan.plan.decode_window
    images = pictures(DataLoader(ImageFolder(folder, whole), **settings))
    rows, sizes = np.arange(len(images)), np.array([image.shape[1:] for image in images])
    _, (params,) = loader._session.native_plan.plan.draw(Draws(epoch_key(3, 0), rows, np.zeros_like(rows)), sizes)
    starts = params["start"].tolist()
    parts = [F.crop(image, *start, *CROP) for image, start in zip(images, starts, strict=True)]
    assert_same(windows, parts, device)


def test_dali_decodes_what_it_turns_as_pil_does() -> None:
    for name, content in FILES.items():
        header = parse_header(memoryview(content), adjust_orientation=True)
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)).convert("RGB"))
        assert (header.width, header.height) == image.size, name
        kind, _, orientation = name.rpartition(" ")
        assert header.native == (
            kind in BY_DALI or name in ("no exif", "empty exif", "plain png", "tiff 1") or name == "webp x"
        ), name
        assert header.orientation == (int(orientation) if kind in KINDS and kind != "tiff" else 1), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_is_turned_as_pil_turns_it_or_left_to_pil() -> None:
    """Bytes of the directory are changed at random. What is left to DALI has the orientation that PIL finds."""
    random, native = np.random.default_rng(0), 0
    for _ in range(400):
        content = bytearray(jpeg(int(random.integers(1, 9))))
        begin = content.index(b"II*\0")
        for place in random.integers(0, 26, 2):
            content[begin + place] = random.choice([0, 1, 2, 3, 4, 8, 12, 0x12, 255])
        try:
            header = parse_header(memoryview(content), adjust_orientation=True)
        except UNREADABLE:
            continue
        image = Image.open(io.BytesIO(content)).convert("RGB")
        assert header.orientation == (lambda o: o if o in range(1, 9) else 1)(image.getexif().get(ORIENTATION, 1))
        native += header.native
    assert native > 50


@pytest.mark.parametrize("cache", ["host", "device"])
def test_caches_hold_turned_images(folder: Path, cache: Any, device: str) -> None:
    chain = v2.Compose([ExifTranspose(), v2.CenterCrop(CROP), v2.PILToTensor()])
    loader = DALILoader(
        ImageFolder(folder, chain), 40, device=device, collate_fn=together, cache=cache, cache_bytes=2**24
    )
    theirs = pictures(DataLoader(ImageFolder(folder, chain), 40, collate_fn=together))
    for _ in range(2):
        assert_same(pictures(loader), theirs, device)


def test_a_chain_that_turns_no_more_gets_the_stored_sizes(folder: Path, device: str) -> None:
    turned, stored = (v2.Compose([*first, v2.CenterCrop(CROP), v2.PILToTensor()]) for first in ([ExifTranspose()], []))
    dataset = ImageFolder(folder, turned)
    loader = DALILoader(dataset, 40, device=device, collate_fn=together, cache="host", cache_bytes=2**24)
    for chain in (turned, stored, turned):
        dataset.transform = chain
        assert_same(pictures(loader), pictures(DataLoader(dataset, 40, collate_fn=together)), device)


def test_headers_of_an_index_know_no_orientation(folder: Path, tmp_path: Path, device: str) -> None:
    chain = v2.Compose([ExifTranspose(), v2.CenterCrop(CROP), v2.PILToTensor()])
    ImageIndex.write(tmp_path / "index.npz", folder, headers=True)
    index = ImageIndex(tmp_path / "index.npz", transform=chain)
    ours = pictures(DALILoader(index, 40, device=device, collate_fn=together))
    assert_same(ours, pictures(DataLoader(ImageFolder(folder, chain), 40, collate_fn=together)), device)


class Asked(Dataset[Any]):
    """Images of one type, in samples that workers ask for."""

    def __init__(self, make: Callable[[Path], Any], root: Path, transform: Any = None) -> None:
        self.make, self.transform = make, transform
        self.files = sorted((root / "a").iterdir())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        image = self.make(self.files[index])
        return (self.transform(image) if self.transform else image), index


def opened(path: Path) -> Image.Image:
    return Image.open(io.BytesIO(path.read_bytes()))


def loaded(path: Path) -> Image.Image:
    image = opened(path)
    image.load()
    return image


def edited(path: Path) -> Image.Image:
    """The program has set another orientation since the file was opened."""
    image = opened(path)
    image.getexif()[ORIENTATION] = 3
    return image


def converted(path: Path) -> Image.Image:
    return opened(path).convert("RGB")


@pytest.mark.parametrize(
    ("ours", "theirs", "num_workers"),
    [
        (opened, opened, 1),
        (loaded, loaded, 0),
        (edited, edited, 0),
        (Path, converted, 1),
        (Path.read_bytes, converted, 0),
    ],
    ids=["opened", "loaded", "edited", "path", "bytes"],
)
def test_images_of_workers_are_turned(folder: Path, ours: Any, theirs: Any, num_workers: int, device: str) -> None:
    chain = v2.Compose([ExifTranspose(), v2.PILToTensor()])
    settings: Any = {"batch_size": 40, "collate_fn": together}
    got = DALILoader(Asked(ours, folder), transform=chain, device=device, num_workers=num_workers, **settings)
    assert_same(pictures(got), pictures(DataLoader(Asked(theirs, folder, chain), **settings)), device)


def describe(image: Image.Image) -> torch.Tensor:
    """Return a number that tells images apart by all but their class."""
    about = image.mode, image.size, image.format, sorted(image.info.items()), sorted(image.getexif().items())
    return torch.tensor([zlib.crc32(repr(about).encode()), zlib.crc32(image.tobytes())]).int()


def test_what_follows_in_torch_gets_pils_metadata(folder: Path) -> None:
    chain = v2.Compose([ExifTranspose(), describe])
    assert_same(*both(folder, chain, "cpu"))
    settings: Any = {"batch_size": 40, "collate_fn": together}
    ours = DALILoader(Asked(opened, folder), transform=chain, device="cpu", **settings)
    assert_same(pictures(ours), pictures(DataLoader(Asked(opened, folder, chain), **settings)))


def test_compile_turns_files_and_pil_images(folder: Path, device: str) -> None:
    files = sorted((folder / "a").iterdir())
    images: list[Any] = [opened(path) if i % 2 else path for i, path in enumerate(files)]
    turn = torchdali.compile(
        v2.Compose([ImageOps.exif_transpose, v2.CenterCrop(CROP), v2.PILToTensor()]), device=device
    )
    theirs = [v2.CenterCrop(CROP)(ImageOps.exif_transpose(converted(path))) for path in files]
    assert_same(list(turn(images).cpu()), [v2.PILToTensor()(image) for image in theirs], device)


@pytest.mark.parametrize(
    "chain",
    [
        [v2.Resize(50), ExifTranspose()],
        [v2.RandomApply([ExifTranspose()], 1.0)],
        [MultiView([ExifTranspose(), v2.Identity()]), itemgetter(0)],
        [MultiView([v2.Identity()] * 2), ExifTranspose(), itemgetter(0)],
    ],
    ids=["later", "sometimes", "in a view", "after views"],
)
def test_elsewhere_in_the_chain_torch_runs_it(folder: Path, chain: list[Any]) -> None:
    dataset = ImageFolder(folder, v2.Compose([*chain, v2.PILToTensor()]))
    loader = DALILoader(dataset, 40, device="cpu", collate_fn=together)
    theirs = pictures(DataLoader(dataset, 40, collate_fn=together))
    for name, one, other in zip(FILES, pictures(loader), theirs, strict=True):
        assert one.shape == other.shape, name
        assert (one.float() - other.float()).abs().mean() < 1, name  # Resize of a PIL image differs in a last bit
    plan = loader._session.native_plan.plan
    assert not plan.adjust_orientation
    assert any(step.library == "torch" for step in plan.steps)


class Mine(ExifTranspose):
    def transform(self, inpt: Any, params: Any) -> Any:
        return inpt


def test_a_subclass_may_do_anything(folder: Path) -> None:
    ours, theirs = both(folder, v2.Compose([Mine(), v2.PILToTensor()]), "cpu")
    assert_same(ours, theirs)


def test_tensors_have_no_exif() -> None:
    image = torch.zeros(3, 5, 7, dtype=torch.uint8)
    assert ExifTranspose()(image) is image
    assert ExifTranspose()({"image": PHOTO, "label": 3})["label"] == 3
    assert repr(ExifTranspose()) == "ExifTranspose()"
    samples = [(image, 0)] * 2
    ours = DALILoader(samples, 2, transform=v2.Compose([ExifTranspose(), v2.ToDtype(torch.float32)]), device="cpu")
    assert next(iter(ours))[0].shape == (2, 3, 5, 7)
    with pytest.raises(AttributeError):  # as in DataLoader
        next(iter(DALILoader(samples, 2, transform=ImageOps.exif_transpose, device="cpu")))
