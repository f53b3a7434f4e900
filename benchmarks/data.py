"""Makes the benchmark's pictures: unique JPEGs cut from real photographs, about 98 kB each.

The photographs are those that scikit-image and scikit-learn carry inside their wheels, so nothing is
downloaded. Every picture is a crop of its own place and scale, resized to one of the sizes that are common
in ImageNet, most of them 500x375, and written as a 4:2:0 JPEG into a class folder named after its photograph.
The default place is memory (``/dev/shm``), so that a loader is measured and not a disk.

    python -m benchmarks.data --images 8192
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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
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
CHUNK = 64
MARK = "made-by-torchdali-benchmarks.json"


def default_root(images: int) -> Path:
    """The folder of a set of `images` pictures: in memory where there is ``/dev/shm``."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"torchdali-benchmark-{images}"


def make(root: Path, images: int, workers: int | None = None) -> dict[str, float]:
    """Writes `images` pictures into class folders under `root`; does nothing when they are already there.

    Returns the number of pictures, their mean size in bytes and the seconds that it took.

    Raises:
        SystemExit: where `root` holds something else, or where no photographs are installed.
    """
    if root.exists():
        return {**_made_before(root, images), "seconds": 0.0}
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
    for size, digest in _write_all(partial(_write_chunk, unfinished, names), chunks, workers):
        sizes.append(size)
        digests.add(digest)
    if len(digests) != images:
        raise RuntimeError(f"only {len(digests)} of {images} pictures are unique")
    report = {"images": images, "mean_bytes": round(sum(sizes) / images)}
    (unfinished / MARK).write_text(json.dumps(report))
    unfinished.rename(root)
    return {**report, "seconds": round(time.perf_counter() - start, 1)}


def _made_before(root: Path, images: int) -> dict[str, int]:
    """What an earlier call said about `root`, if it made it, and with as many pictures."""
    mark = root / MARK
    if not mark.exists():
        raise SystemExit(f"{root} exists and was not made by this benchmark")
    report = json.loads(mark.read_text())
    if report["images"] != images:
        raise SystemExit(f"{root} holds {report['images']} pictures, not {images}: remove it or name another")
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


def _write_chunk(root: Path, names: list[str], indices: range) -> list[tuple[int, bytes]]:
    """Writes the pictures of `indices`; the size and a digest of each."""
    written: list[tuple[int, bytes]] = []
    for index in indices:
        name = names[index % len(names)]
        encoded = _picture(name, random.Random(index))
        (root / name / f"{index:07d}.jpg").write_bytes(encoded)
        written.append((len(encoded), hashlib.blake2b(encoded, digest_size=16).digest()))
    return written


def _picture(name: str, rng: random.Random) -> bytes:
    """One random crop of the photograph `name`, as a JPEG."""
    photograph = _photograph(name)
    width, height = rng.choice(SIZES)
    scale = rng.uniform(0.7, 1.0) * min(photograph.width / width, photograph.height / height)
    left = rng.uniform(0, photograph.width - width * scale)
    top = rng.uniform(0, photograph.height - height * scale)
    box = (left, top, left + width * scale, top + height * scale)
    crop = photograph.resize((width, height), Image.Resampling.BICUBIC, box=box)
    encoded = io.BytesIO()
    crop.save(encoded, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return encoded.getvalue()


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
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--root", type=Path, help="default: a folder in /dev/shm")
    args = parser.parse_args()
    root = args.root or default_root(args.images)
    report = make(root, args.images)
    kilobytes = report["mean_bytes"] / 1000
    print(f"{root}: {report['images']} pictures of {kilobytes:.1f} kB, {report['seconds']} s")


if __name__ == "__main__":
    main()
