"""Feeds a loader with images whose headers are mutated, under a limit of memory.

As a script: ``python tests/helpers/header_fuzz.py FOLDER SEED SECONDS``. It prints what was wrong, and exits 1 then.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import re
import resource
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from skimage.data import astronaut
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.pipeline.readers.header_reader import HeaderValidator
from torchdali.samples.on_error import OnError

CHAIN = v2.Compose([v2.ToImage(), v2.Resize((16, 16))])
SHAPES = (8, 3), (8, 3), (40, 1)
"""Images of a batch, and batches. DALI reads the headers of 32 images and more in several threads."""
MAX_PIXELS = 250_000
"""``PIL.Image.MAX_IMAGE_PIXELS``. PIL opens images of twice as many: 1.5 MB."""
MEMORY = 300
"""MiB that the process may take beside what it has after the first epoch."""
CHUNKS = (
    rb"IHDR|PLTE|tRNS|IDAT|eXIf|acTL|fcTL|fdAT|IEND",
    rb"VP8.|ALPH|ANIM|ANMF|EXIF",
    rb"jP  |ftyp|jp2h|ihdr|colr|jp2c",
)
HEADER = 400
"""Most mutations are in so many first bytes."""

SEVERAL_KINDS = "differ in shape: ", "no other sample of its batch can take its place"
"""Worker-fed samples of 16 bits keep them. A batch of them and others cannot be stacked, or lend each other samples."""

Image = PIL.Image.Image
Make = Callable[[OnError], DALILoader[Any]]


def write_formats() -> dict[str, bytes]:
    """Return a small image in every format that is accepted."""
    image = PIL.Image.fromarray(np.asarray(cast("Any", astronaut)())).resize((40, 30))
    alpha = image.copy()
    alpha.putalpha(128)
    exif = PIL.Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "described"
    deep = PIL.Image.fromarray((np.asarray(image.convert("L")).astype(np.uint16) << 8) + 7)
    saved: dict[str, tuple[Image, str, dict[str, Any]]] = {
        "jpeg": (image, "JPEG", {"exif": exif}),
        "jpeg, progressive": (image, "JPEG", {"progressive": True}),
        "jpeg, CMYK": (image.convert("CMYK"), "JPEG", {}),
        "jpeg, grey": (image.convert("L"), "JPEG", {"restart_marker_blocks": 2}),
        "png": (image, "PNG", {"exif": exif}),
        "png, palette": (image.convert("P"), "PNG", {"transparency": 3}),
        "png, alpha": (alpha, "PNG", {}),
        "png, 16 bit": (deep, "PNG", {}),
        "png, animated": (image, "PNG", {"save_all": True, "append_images": [alpha.convert("RGB")]}),
        "webp": (image, "WEBP", {"exif": exif}),
        "webp, lossless": (alpha, "WEBP", {"lossless": True}),
        "webp, animated": (image, "WEBP", {"save_all": True, "append_images": [image.rotate(90)]}),
        "tiff": (image, "TIFF", {}),
        "tiff, deflate": (image, "TIFF", {"compression": "tiff_adobe_deflate"}),
        "tiff, lzw": (deep, "TIFF", {"compression": "tiff_lzw"}),
        "tiff, jpeg": (image, "TIFF", {"compression": "jpeg"}),
        "bmp": (image, "BMP", {}),
        "bmp, palette": (image.convert("P"), "BMP", {}),
        "gif": (image, "GIF", {}),
        "gif, animated": (image, "GIF", {"save_all": True, "append_images": [image.rotate(90)]}),
        "jpeg 2000": (image, "JPEG2000", {}),
        "jpeg 2000, code stream": (alpha, "JPEG2000", {"no_jp2": True}),
        "ppm": (image, "PPM", {}),
        "pgm, 16 bit": (deep, "PPM", {}),
    }
    files: dict[str, bytes] = {}
    for name, (picture, kind, options) in saved.items():
        stream = io.BytesIO()
        picture.save(stream, kind, **options)
        files[name] = stream.getvalue()
    codes = files["jpeg 2000, code stream"]
    files["jpeg 2000, tiles of no width"] = codes[:24] + bytes(4) + codes[28:]
    place = files["png"].index(b"eXIf") - 4
    files["png, half a gigabyte of EXIF"] = files["png"][:place] + b"\x1f" + files["png"][place + 1 :]
    return files


def mutate(data: bytes, random: np.random.Generator) -> bytes:
    """Return a file with one to four changes, most of them in its header."""
    changed = bytearray(data)
    for _ in range(int(random.integers(1, 5))):
        changed = changed or bytearray(data)
        limit = len(changed) if random.random() < 0.1 else min(HEADER, len(changed))
        place = int(random.integers(0, max(limit - 8, 1)))
        width = int(random.choice([1, 2, 4, 8]))
        kind = int(random.integers(0, 10))
        if kind <= 1:
            changed[place] ^= 1 << int(random.integers(0, 8))
        elif kind <= 4:
            value = [0, 1, 0xFF, 0x7F, 0x80, 0xF0][int(random.integers(0, 6))]
            fill = 0 if random.random() < 0.5 else 0xFF
            field = [value] + [fill] * (width - 1)
            changed[place : place + width] = bytes(field if random.random() < 0.5 else field[::-1])
        elif kind == 5:
            changed[place : place + width] = b""
        elif kind == 6:
            other = int(random.integers(0, limit))
            changed[place:place] = changed[other : other + 12]
        elif kind <= 8:
            _lengthen(changed, random)
        else:
            del changed[int(random.integers(1, len(changed) + 1)) :]
    return bytes(changed or data)


def _lengthen(data: bytearray, random: np.random.Generator) -> None:
    """Write another length for a chunk of a PNG, WebP or JPEG 2000 file, or for a segment of a JPEG."""
    chunks = [match for tag in CHUNKS for match in re.finditer(tag, data)]
    is_riff = bytes(data[:4]) == b"RIFF"
    if chunks:
        place = chunks[int(random.integers(len(chunks)))].start()
        place += 4 if is_riff else -4
        width, order = 4, "little" if is_riff else "big"
    else:
        markers = [match.start() + 2 for match in re.finditer(rb"\xff[\xc0-\xfe]", data[:HEADER])] or [0]
        place, width, order = markers[int(random.integers(len(markers)))], 2, "big"
    number = int(random.choice([0, 1, 7, 0x7FFF, 0xFFF0, 0xFFFF, 0x1FFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0]))
    data[place : place + width] = (number % 256**width).to_bytes(width, order)


class Files(Dataset[Any]):
    """Paths, or the contents of files."""

    def __init__(self, paths: list[str], encoded: bool) -> None:
        self.paths, self.encoded = paths, encoded

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = Path(self.paths[index])
        return (path.read_bytes() if self.encoded else path), index


class HeaderFuzz:
    """A fuzz of headers.

    Args:
        root: A folder for the files.
        seed: Everything follows from it.

    Attributes:
        wrong: What was wrong.
        seen: How many files came out, and how many faults were named.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.formats = write_formats()
        self.good = self.formats["png, palette"], self.formats["jpeg"]
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self._before = 0
        self.batch, self.batches = SHAPES[0]

    def run(self, seconds: float, rounds: int = sys.maxsize) -> None:
        """Run rounds until the time is over."""
        begin = monotonic()
        self._warm_up()
        for number in range(rounds):
            if monotonic() - begin > seconds:
                break
            self.seen["rounds"] += 1
            self._run_round(self.seed * 1_000_000 + number)
            if (used := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024) > self._before + MEMORY:
                self.wrong.append(f"round {number}: {used - self._before} MiB more than at the beginning")
                break

    def _warm_up(self) -> None:
        """Run an epoch of good images, and limit the memory to what it took and some more."""
        (self.root / "good" / "a").mkdir(parents=True)
        for number in range(80):
            (self.root / "good" / "a" / f"{number}.png").write_bytes(self.good[number % 2])
        for batch_size in (8, 40):
            list(DALILoader(ImageFolder(self.root / "good", CHAIN), batch_size, device="cpu"))
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        limit = mapped + 2**31
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _run_round(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.batch, self.batches = SHAPES[seed % len(SHAPES)]
        folder = self.root / str(seed)
        (folder / "a").mkdir(parents=True)
        paths: list[str] = []
        names = list(self.formats)
        one = names[int(random.integers(len(names)))] if random.random() < 0.5 else None
        for number in range(self.batch * self.batches):
            path = folder / "a" / f"{number:02}.png"
            if number % self.batch:  # the first image of a batch is a good one
                path.write_bytes(mutate(self.formats[one or names[int(random.integers(len(names)))]], random))
            else:
                path.write_bytes(self.good[int(random.integers(2))])
            paths.append(str(path))
        before = len(self.wrong)
        for name, make in self._loaders(folder, paths, random):
            try:
                self._check(name, make, paths)
            except Exception as error:  # noqa: BLE001 - it is what the fuzz looks for
                if name in ("paths", "encoded") and any(text in str(error) for text in SEVERAL_KINDS):
                    self.seen["several kinds"] += 1
                    continue
                self.wrong.append(f"{folder.name}: {name}: {type(error).__name__}: {error}")
        if len(self.wrong) == before:
            shutil.rmtree(folder)

    def _loaders(self, folder: Path, paths: list[str], random: np.random.Generator) -> Iterator[tuple[str, Make]]:
        decode_bytes = 20_000 if random.random() < 0.3 else None
        HeaderValidator.is_on = bool(int(folder.name) % 2)  # as beside a GPU

        def native(cache: Any = None) -> Make:
            dataset: Any = ImageFolder(str(folder), CHAIN)
            options: Any = {"cache": cache, "decode_bytes": decode_bytes, "device": "cpu"}
            return lambda on_error: DALILoader(dataset, self.batch, on_error=on_error, **options)

        def fed(encoded: bool) -> Make:
            dataset = Files(paths, encoded)
            return lambda on_error: DALILoader(dataset, self.batch, transform=CHAIN, device="cpu", on_error=on_error)

        kinds = [("host cache", native("host")), ("paths", fed(encoded=False)), ("encoded", fed(encoded=True))]
        yield "native", native()
        yield kinds[int(random.integers(len(kinds)))]

    def _check(self, name: str, make: Make, paths: list[str]) -> None:
        good = set(range(0, len(paths), self.batch))
        expected = [CHAIN(PIL.Image.open(paths[index]).convert("RGB")) for index in sorted(good)]
        modes: list[OnError] = ["raise", "skip", "replace"]
        for on_error in modes:
            loader = make(on_error)
            batches, faults = iter(loader), list[SampleError]()
            for number in range(self.batches):
                try:
                    images, _ = next(batches)
                except SampleError as error:
                    if on_error != "raise":
                        raise
                    faults.append(error)
                    if error.index not in range(self.batch * number, self.batch * (number + 1)):
                        self.wrong.append(f"{name}, {on_error}: batch {number} names sample {error.index}")
                    continue
                if len(images) != self.batch:
                    self.wrong.append(f"{name}, {on_error}: a batch of {len(images)}")
                if (images[0].int() - expected[number].int()).abs().max() > 24:  # the certified bound of Resize
                    self.wrong.append(f"{name}, {on_error}: the good image of batch {number} is another")
                self.seen["images"] += len(images)
            faults += loader.errors
            self.seen[f"{on_error}: faults"] += len(faults)
            for fault in faults:
                if fault.index in good or (name == "native" and fault.path != paths[fault.index]):
                    self.wrong.append(f"{name}, {on_error}: {fault}")
            loader.close()


def main(folder: str, seed: str, seconds: str, rounds: str = "") -> int:
    """Run the fuzz. Return 1 if anything was wrong."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(seconds) + 120, exit=True)
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    PIL.Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    fuzz = HeaderFuzz(Path(folder), int(seed))
    fuzz.run(float(seconds), int(rounds) if rounds else sys.maxsize)
    sys.stdout.write("\n".join([*fuzz.wrong, str(dict(fuzz.seen))]) + "\n")
    return int(bool(fuzz.wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
