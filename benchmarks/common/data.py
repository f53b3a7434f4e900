"""Make the benchmark's pictures: unique files, cropped from real photographs.

The photographs are in the wheels of scikit-image and scikit-learn, so nothing is downloaded. Every picture is a crop at
its own position and scale, in a class folder named after its photograph. All runs make the same pictures. There are
four sets:

* ``imagenet``: JPEGs of sizes that are common in ImageNet, most of them 500x375, about 98 kB each;
* ``large``: JPEGs of 2048x1536, mosaics of sixteen such crops, so that they have as much detail;
* ``small``: PNGs of 32x32, as in CIFAR;
* ``progressive``: as ``imagenet``, but progressive JPEGs.

The default folder is in memory (``/dev/shm``), so that the loader is measured and not a disk.

    python -m benchmarks.common.data --images 8192
"""

import argparse
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from PIL import Image

PHOTOGRAPHS = {
    "astronaut": "skimage/data/astronaut.png",
    "chelsea": "skimage/data/chelsea.png",
    "china": "sklearn/datasets/images/china.jpg",
    "coffee": "skimage/data/coffee.png",
    "flower": "sklearn/datasets/images/flower.jpg",
    "hubble": "skimage/data/hubble_deep_field.jpg",
    "ihc": "skimage/data/ihc.png",
    "motorcycle": "skimage/data/motorcycle_left.png",
    "retina": "skimage/data/retina.jpg",
    "rocket": "skimage/data/rocket.jpg",
}
SIZES = ((500, 375),) * 6 + ((375, 500),) * 2 + ((500, 333), (333, 500), (500, 400), (400, 500))
# A mean of about 98 kB with these photographs.
QUALITY = 98
LARGE = (2048, 1536)
SMALL = (32, 32)
TILES = 4
CHUNK = 64
MARK = "made-by-torchdali-benchmarks.json"


@dataclass(frozen=True)
class DataSet:
    """One of the sets.

    Attributes:
        title: Description of its pictures in headings.
        suffix: Suffix of the files.
        images: Default number of images.
        batch_size: Default number of images in a batch.
        size: Side of the images in a batch, in pixels.
        picture: Function that makes a picture, from a photograph's name, a random generator and all names.
    """

    title: str
    suffix: str
    images: int
    batch_size: int
    size: int
    picture: Callable[[str, random.Random, list[str]], bytes]


def default_root(images: int, kind: str = "imagenet", in_memory: bool = True) -> Path:
    """Return the default folder of a set, in ``/dev/shm`` if `in_memory` and if that exists."""
    memory = Path("/dev/shm")
    parent = memory if in_memory and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return parent / ("torchdali-benchmark-" + ("" if kind == "imagenet" else f"{kind}-") + str(images))


def make(root: Path, images: int, workers: int | None = None, kind: str = "imagenet") -> dict[str, float | str]:
    """Write `images` pictures to class folders under `root`, unless they are already there.

    Return the number of pictures, their mean size in bytes and the seconds that it took.

    Raises:
        SystemExit: `root` has other contents, or no photographs are installed.
    """
    if root.exists():
        return {**_read_mark(root, images, kind), "seconds": 0.0}
    start = time.perf_counter()
    names = [name for name in PHOTOGRAPHS if _find_file(name) is not None]
    if not names:
        raise SystemExit("no photographs found: pip install scikit-image scikit-learn")
    # Renamed when it is complete, so that an interrupted run leaves no part of a set.
    unfinished = root.with_name(root.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name in names:
        (unfinished / name).mkdir(parents=True)
    chunks = [range(at, min(at + CHUNK, images)) for at in range(0, images, CHUNK)]
    sizes: list[int] = []
    digests: set[bytes] = set()
    for size, digest in _write_all(partial(_write_chunk, unfinished, names, kind), chunks, workers):
        sizes.append(size)
        digests.add(digest)
    if len(digests) != images:
        raise RuntimeError(f"only {len(digests)} of {images} pictures are unique")
    report = {"images": images, "mean_bytes": round(sum(sizes) / images), "kind": kind}
    (unfinished / MARK).write_text(json.dumps(report))
    unfinished.rename(root)
    return {**report, "seconds": round(time.perf_counter() - start, 1)}


def _read_mark(root: Path, images: int, kind: str) -> dict[str, int | str]:
    """Return the report of an earlier call for the same set."""
    mark = root / MARK
    if not mark.exists():
        raise SystemExit(f"{root} exists and was not made by this benchmark")
    report = {"kind": "imagenet", **json.loads(mark.read_text())}
    if (report["images"], report["kind"]) != (images, kind):
        holds = f"{report['images']} pictures ({report['kind']}), not {images} ({kind})"
        raise SystemExit(f"{root} holds {holds}: remove it or name another")
    return report


def _write_all(write, chunks: list[range], workers: int | None) -> Iterator[tuple[int, bytes]]:
    if len(chunks) == 1:
        yield from write(chunks[0])
        return
    # Spawned, because the caller may have threads that hold locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or len(os.sched_getaffinity(0)), mp_context=context) as pool:
        for written in pool.map(write, chunks):
            yield from written


def _write_chunk(root: Path, names: list[str], kind: str, indices: range) -> list[tuple[int, bytes]]:
    """Write the pictures of `indices`, and return the size and a digest of each."""
    written: list[tuple[int, bytes]] = []
    data_set = KINDS[kind]
    for index in indices:
        name = names[index % len(names)]
        encoded = data_set.picture(name, random.Random(index), names)
        (root / name / f"{index:07d}{data_set.suffix}").write_bytes(encoded)
        written.append((len(encoded), hashlib.blake2b(encoded, digest_size=16).digest()))
    return written


def _crop(name: str, rng: random.Random, width: int, height: int, least: float = 0.7) -> Image.Image:
    """Return a random crop of a photograph, resized. Its scale is at least `least` of the largest possible one."""
    photograph = _load_photograph(name)
    scale = rng.uniform(least, 1.0) * min(photograph.width / width, photograph.height / height)
    left = rng.uniform(0, photograph.width - width * scale)
    top = rng.uniform(0, photograph.height - height * scale)
    box = (left, top, left + width * scale, top + height * scale)
    return photograph.resize((width, height), Image.Resampling.BICUBIC, box=box)


def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, kind, **options)
    return encoded.getvalue()


def _make_jpeg(name: str, rng: random.Random, names: list[str], progressive: bool = False) -> bytes:  # noqa: ARG001
    crop = _crop(name, rng, *rng.choice(SIZES))
    return _encode(crop, "JPEG", quality=QUALITY, subsampling="4:2:0", progressive=progressive)


def _make_mosaic(name: str, rng: random.Random, names: list[str]) -> bytes:
    whole = Image.new("RGB", LARGE)
    width, height = LARGE[0] // TILES, LARGE[1] // TILES
    for tile in range(TILES * TILES):
        crop = _crop(rng.choice(names) if tile else name, rng, width, height)
        whole.paste(crop, (tile % TILES * width, tile // TILES * height))
    return _encode(whole, "JPEG", quality=90, subsampling="4:2:0")


def _make_png(name: str, rng: random.Random, names: list[str]) -> bytes:  # noqa: ARG001
    return _encode(_crop(name, rng, *SMALL, least=0.3), "PNG")


KINDS = {
    "imagenet": DataSet("JPEGs, about 500x375", ".jpg", 8192, 256, 224, _make_jpeg),
    "large": DataSet("JPEGs of 2048x1536", ".jpg", 2048, 128, 224, _make_mosaic),
    "small": DataSet("PNGs of 32x32", ".png", 16384, 256, 32, _make_png),
    "progressive": DataSet(
        "progressive JPEGs, about 500x375", ".jpg", 4096, 256, 224, partial(_make_jpeg, progressive=True)
    ),
}


def load_photographs() -> list[Image.Image]:
    """Return the installed photographs, RGB."""
    return [_load_photograph(name) for name in PHOTOGRAPHS if _find_file(name) is not None]


@cache
def _load_photograph(name: str) -> Image.Image:
    path = _find_file(name)
    assert path is not None
    with Image.open(path) as image:
        return image.convert("RGB")


def _find_file(name: str) -> Path | None:
    """Return the photograph's path in the installed wheel, or None. Do not import the package."""
    package, _, inside = PHOTOGRAPHS[name].partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / inside
    return path if path.exists() else None


def main() -> None:
    """Make the pictures, and print their folder, number and size."""
    parser = argparse.ArgumentParser(description="Make the benchmark's pictures.")
    parser.add_argument("--images", type=int, help=f"default: {', '.join(f'{k} {d.images}' for k, d in KINDS.items())}")
    parser.add_argument("--kind", choices=KINDS, default="imagenet")
    parser.add_argument("--root", type=Path, help="default: a folder in /dev/shm")
    args = parser.parse_args()
    images = args.images or KINDS[args.kind].images
    root = args.root or default_root(images, args.kind)
    report = make(root, images, kind=args.kind)
    kilobytes = report["mean_bytes"] / 1000
    print(f"{root}: {report['images']} pictures of {kilobytes:.1f} kB, {report['seconds']} s")


if __name__ == "__main__":
    main()
