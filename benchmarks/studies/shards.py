"""Shards and tables against an image folder: the loader alone, on the same pictures.

    python -m benchmarks.studies.shards --images 8192 --cores 16,4 --kinds tar,zip,tfrecord,recordio,lmdb

Pictures are written into each kind of store once. The datasets are iterated by turns over a few epochs, so that all
meet the same state of the machine, and the median of the turns counts. A loader is faster or slower than another one of
the same files for all its life. So ``--loaders 3`` makes three of each kind, and compares with the mean of the image
folder's. The kind ``folder`` is a copy of that folder, so its ratio tells how much chance decides. All batches are on
the GPU, after a random resized crop, a flip and the normalization. Without a GPU the numbers mean nothing. ``--cold``
drops the files from the page cache before each epoch, which then reads the disk under ``--root``.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.common import data, stores
from torchdali import DALILoader

TURNS = 7
_WARMUP = 6.0
"""Seconds for which each loader is iterated before. After five seconds of waiting it gets a second pipeline."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--cores", default="16,4", help="numbers of cores, separated by commas")
    parser.add_argument("--root", type=Path, help="folder of the pictures [in /dev/shm; cold: in /tmp]")
    kinds = ", ".join(stores.KINDS)
    parser.add_argument("--kinds", default="tar", help=f"some of {kinds}, separated by commas [tar]")
    parser.add_argument("--variants", action="store_true", help="tar files also as dictionaries, and not mapped")
    parser.add_argument("--cold", action="store_true", help="read the disk")
    parser.add_argument("--repeats", type=int, default=1, help="how often an epoch lists each picture")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--loaders", type=int, default=1, help="how many of each kind [1]")
    args = parser.parse_args()
    root = args.root or data.default_root(args.images, in_memory=not args.cold)
    data.make(root, args.images)
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(224),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    datasets: dict[str, Any] = {"image folder": ImageFolder(root, transform)}
    datasets |= {kind: stores.make(kind, root, transform) for kind in args.kinds.split(",")}
    if args.variants:
        datasets["tar, samples are dictionaries"] = stores.make("tar", root, transform, label=("cls",))
        datasets["tar, not mapped"] = stores.make("tar", root, transform, is_mapped=False)
    rows = list(range(args.images)) * args.repeats
    datasets = {name: Subset(dataset, rows) for name, dataset in datasets.items()}
    files = [*root.rglob("*.*")]
    files += [file for kind in args.kinds.split(",") for file in stores.list_files(kind, root)]
    available = sorted(os.sched_getaffinity(0))
    if args.cold:
        drop(files)
        print(f"the shards read by one thread from start to end: {read(root) * args.images:9,.0f} images/s")
    for cores in map(int, args.cores.split(",")):
        os.sched_setaffinity(0, available[:cores])
        measure(datasets, args, files, min(cores, len(available)))
        os.sched_setaffinity(0, available)


def measure(datasets: dict[str, Any], args: argparse.Namespace, files: Iterable[Path], cores: int) -> None:
    """Print images/s of each loader, and its ratio to the image folder's."""
    loaders = {
        (name, number): DALILoader(dataset, args.batch_size, shuffle=True, drop_last=True)
        for name, dataset in datasets.items()
        for number in range(args.loaders)
    }
    speeds: dict[tuple[str, int], list[float]] = {key: [] for key in loaders}
    for loader in loaders.values():
        end = time.perf_counter() + _WARMUP
        while time.perf_counter() < end:
            run_epoch(loader)
    for turn in range(args.turns):
        for key in reversed(loaders) if turn % 2 else loaders:
            if args.cold:
                drop(files)
            speeds[key].append(run_epoch(loaders[key]))
    base = next(iter(datasets))
    bases = [statistics.mean(turn) for turn in zip(*(speeds[base, i] for i in range(args.loaders)), strict=True)]
    for (name, _), turns in speeds.items():
        ratio = statistics.median(own / other for own, other in zip(turns, bases, strict=True))
        spread = f"{min(turns):,.0f} to {max(turns):,.0f}"
        print(f"{cores:3} cores  {name:30} {statistics.median(turns):9,.0f} images/s ({spread})  ratio {ratio:.3f}")
    for loader in loaders.values():
        loader.close()


def run_epoch(loader: DALILoader) -> float:
    """Return images/s of one epoch."""
    start, count = time.perf_counter(), 0
    for batch in loader:
        images = batch["image"] if isinstance(batch, dict) else batch[0]
        count += len(images)
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def read(root: Path) -> float:
    """Read all tar files. Return how often that could be done in a second."""
    start = time.perf_counter()
    for path in stores.list_files("tar", root):
        with path.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass
    return 1 / (time.perf_counter() - start)


def drop(files: Iterable[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    main()
