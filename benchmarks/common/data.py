"""Makes the benchmark's pictures: unique files cut from real photographs.

The photographs are those that scikit-image and scikit-learn carry inside their wheels, so nothing is downloaded.
Every picture is a crop of its own place and scale, in a class folder named after its photograph, and the same in
every run. There are four sets:

* ``imagenet``: JPEGs of the sizes that are common in ImageNet, most of them 500x375, about 98 kB each;
* ``large``: JPEGs of 2048x1536, mosaics of sixteen such crops, so that they are as detailed as the small ones;
* ``small``: PNGs of 32x32, as in CIFAR;
* ``progressive``: as ``imagenet``, but progressive JPEGs.

The default place is memory (``/dev/shm``), so that a loader is measured and not a disk.

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
        title: what a heading calls its pictures.
        suffix: of the files.
        images: how many by default.
        batch_size: images in a batch by default.
        size: the side of the squares that a batch is made of.
        picture: makes one: the name of the photograph, random numbers, all names.
    """

    title: str
    suffix: str
    images: int
    batch_size: int
    size: int
    picture: Callable[[str, random.Random, list[str]], bytes]


def default_root(images: int, kind: str = "imagenet", in_memory: bool = True) -> Path:
    """The folder of a set of `images` pictures: in memory where that is wanted and there is ``/dev/shm``."""
    memory = Path("/dev/shm")
    parent = memory if in_memory and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return parent / ("torchdali-benchmark-" + ("" if kind == "imagenet" else f"{kind}-") + str(images))


def make(root: Path, images: int, workers: int | None = None, kind: str = "imagenet") -> dict[str, float | str]:
    """Writes `images` pictures into class folders under `root`; does nothing when they are already there.

    Returns the number of pictures, their mean size in bytes and the seconds that it took.

    Raises:
        SystemExit: where `root` holds something else, or where no photographs are installed.
    """
    if root.exists():
        return {**_made_before(root, images, kind), "seconds": 0.0}
    start = time.perf_counter()
    names = [name for name in PHOTOGRAPHS if _path(name) is not None]
    if not names:
        raise SystemExit("no photographs found: pip install scikit-image scikit-learn")
    # renamed when all are there, so that an interrupted run leaves no half a set
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


def _made_before(root: Path, images: int, kind: str) -> dict[str, int | str]:
    """What an earlier call said about `root`, if it made it, of this kind and with as many pictures."""
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
    # spawned, because the caller may hold threads, which a fork would not survive
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or len(os.sched_getaffinity(0)), mp_context=context) as pool:
        for written in pool.map(write, chunks):
            yield from written


def _write_chunk(root: Path, names: list[str], kind: str, indices: range) -> list[tuple[int, bytes]]:
    """Writes the pictures of `indices`; the size and a digest of each."""
    written: list[tuple[int, bytes]] = []
    made = KINDS[kind]
    for index in indices:
        name = names[index % len(names)]
        encoded = made.picture(name, random.Random(index), names)
        (root / name / f"{index:07d}{made.suffix}").write_bytes(encoded)
        written.append((len(encoded), hashlib.blake2b(encoded, digest_size=16).digest()))
    return written


def _crop(name: str, rng: random.Random, width: int, height: int, least: float = 0.7) -> Image.Image:
    """A random crop of the photograph `name`, at least that share of the largest one, resized."""
    photograph = _photograph(name)
    scale = rng.uniform(least, 1.0) * min(photograph.width / width, photograph.height / height)
    left = rng.uniform(0, photograph.width - width * scale)
    top = rng.uniform(0, photograph.height - height * scale)
    box = (left, top, left + width * scale, top + height * scale)
    return photograph.resize((width, height), Image.Resampling.BICUBIC, box=box)


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, kind, **options)
    return encoded.getvalue()


def _jpeg(name: str, rng: random.Random, names: list[str], progressive: bool = False) -> bytes:  # noqa: ARG001
    crop = _crop(name, rng, *rng.choice(SIZES))
    return _encoded(crop, "JPEG", quality=QUALITY, subsampling="4:2:0", progressive=progressive)


def _mosaic(name: str, rng: random.Random, names: list[str]) -> bytes:
    whole = Image.new("RGB", LARGE)
    width, height = LARGE[0] // TILES, LARGE[1] // TILES
    for tile in range(TILES * TILES):
        crop = _crop(rng.choice(names) if tile else name, rng, width, height)
        whole.paste(crop, (tile % TILES * width, tile // TILES * height))
    return _encoded(whole, "JPEG", quality=90, subsampling="4:2:0")


def _png(name: str, rng: random.Random, names: list[str]) -> bytes:  # noqa: ARG001
    return _encoded(_crop(name, rng, *SMALL, least=0.3), "PNG")


KINDS = {
    "imagenet": DataSet("JPEGs, about 500x375", ".jpg", 8192, 256, 224, _jpeg),
    "large": DataSet("JPEGs of 2048x1536", ".jpg", 2048, 128, 224, _mosaic),
    "small": DataSet("PNGs of 32x32", ".png", 16384, 256, 32, _png),
    "progressive": DataSet(
        "progressive JPEGs, about 500x375", ".jpg", 4096, 256, 224, partial(_jpeg, progressive=True)
    ),
}


def photographs() -> list[Image.Image]:
    """Those that are installed, RGB."""
    return [_photograph(name) for name in PHOTOGRAPHS if _path(name) is not None]


@cache
def _photograph(name: str) -> Image.Image:
    path = _path(name)
    assert path is not None
    with Image.open(path) as image:
        return image.convert("RGB")


def _path(name: str) -> Path | None:
    """Where the installed wheel holds the photograph, or None; the packages themselves are not imported."""
    package, _, inside = PHOTOGRAPHS[name].partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / inside
    return path if path.exists() else None


def main() -> None:
    """Makes the pictures and prints where they are, how many and how large."""
    parser = argparse.ArgumentParser(description="Makes the benchmark's pictures.")
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
