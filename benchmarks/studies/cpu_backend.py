"""Measure DALI's CPU backend beside DataLoader, by turns in one process, and what some transforms add.

``python -m benchmarks.studies.cpu_backend`` writes ``benchmarks/results/cpu-backend.md``.
"""

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.common import data, report
from benchmarks.systems.batches import surroundings
from torchdali import DALILoader
from torchdali.tools.bench import metrics

IMAGES, BATCH, ROUNDS = 1024, 64, 5
PASSES = 2
"""How often an epoch goes through the pictures."""
ADDED_IMAGES, ADDED_ROUNDS = 256, 2
FLOAT = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
TRAIN, EVAL = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()], [v2.Resize(256), v2.CenterCrop(224)]
PRESETS = {
    "train, tensors": [v2.ToImage(), *TRAIN, *FLOAT],
    "eval, tensors": [v2.ToImage(), *EVAL, *FLOAT],
    "train, PIL": [*TRAIN, v2.ToImage(), *FLOAT],
    "eval, PIL": [*EVAL, v2.ToImage(), *FLOAT],
}
ADDED = {
    "RandomRotation(30)": v2.RandomRotation(30),
    "RandomAffine(20, (0.1, 0.1))": v2.RandomAffine(20, (0.1, 0.1)),
    "GaussianBlur(23)": v2.GaussianBlur(23),
    "RandAugment()": v2.RandAugment(),
    "TrivialAugmentWide()": v2.TrivialAugmentWide(),
    "AutoAugment()": v2.AutoAugment(),
    "RandomEqualize(1)": v2.RandomEqualize(1),
    "ColorJitter(0.4, 0.4, 0.4)": v2.ColorJitter(0.4, 0.4, 0.4),
    "ColorJitter(0.4, 0.4, 0.4, 0.1)": v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
}


def make_small(folder: Path) -> Path:
    """Return a folder with the same pictures, 96x96."""
    small = folder.with_name(folder.name + "-96")
    for file in sorted(folder.rglob("*.jpg")):
        target = small / file.relative_to(folder)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.open(file).resize((96, 96), Image.Resampling.BICUBIC).save(target, quality=92)
    return small


def measure_epoch(loader: Any) -> tuple[float, float]:
    """Return images/s, and CPU milliseconds for an image, of this process and its workers."""
    start, cpu_start, count = time.perf_counter(), metrics.cpu_seconds(), 0
    for images, _ in loader:
        count += len(images)
    seconds = time.perf_counter() - start
    return count / seconds, (metrics.cpu_seconds() - cpu_start) / count * 1000


def compare_speed(folder: Path, chain: list[Any], cores: int) -> tuple[list[float], list[float], float]:
    """Return the medians of both loaders, and of the ratios of their speeds."""
    dataset = ImageFolder(folder, v2.Compose(chain))
    sampler = RandomSampler(dataset, num_samples=PASSES * len(dataset))
    ours = DALILoader(dataset, BATCH, sampler=sampler, device="cpu")
    theirs = DataLoader(dataset, BATCH, sampler=sampler, num_workers=cores, persistent_workers=True)
    for loader in (ours, theirs):
        measure_epoch(loader)  # builds pipelines, reads headers, starts workers
    turns = [(measure_epoch(ours), measure_epoch(theirs)) for _ in range(ROUNDS)]
    medians = [[statistics.median(turn[who][what] for turn in turns) for what in (0, 1)] for who in (0, 1)]
    ours.close()
    return medians[0], medians[1], statistics.median(mine[0] / other[0] for mine, other in turns)


def measure_added(folder: Path, transform: Any | None) -> list[float]:
    """Return CPU milliseconds for an image of both loaders, with a transform after RandomResizedCrop."""
    chain = [v2.ToImage(), TRAIN[0], *([transform] if transform else [])]
    dataset = Subset(ImageFolder(folder, v2.Compose(chain)), range(ADDED_IMAGES))
    loaders = [DALILoader(dataset, BATCH, device="cpu"), DataLoader(dataset, BATCH)]
    for loader in loaders:
        measure_epoch(loader)
    return [statistics.median(measure_epoch(loader)[1] for _ in range(ADDED_ROUNDS)) for loader in loaders]


def main() -> None:
    """Run the study and write the tables."""
    torch.set_num_threads(1)  # as in DataLoader's workers
    cores = len(os.sched_getaffinity(0))
    folder = data.default_root(IMAGES)
    data.make(folder, IMAGES)
    presets = [["preset", "files", "DALILoader, images/s", "DataLoader, images/s", "ratio", "CPU-ms", "DataLoader's"]]
    for files, root in (("500x375", folder), ("96x96", make_small(folder))):
        for name, chain in PRESETS.items():
            (rate, cpu), (other_rate, other_cpu), ratio = compare_speed(root, chain, cores)
            figures = (f"{rate:,.0f}", f"{other_rate:,.0f}", f"{ratio:.2f}", f"{cpu:.2f}", f"{other_cpu:.2f}")
            presets.append([name, files, *figures])
            print(*presets[-1], flush=True)
    added = [["transform", "DALILoader", "DataLoader", "faster in all"]]
    base = measure_added(folder, None)
    for name, transform in ADDED.items():
        total = measure_added(folder, transform)
        own, other = (with_it - without for with_it, without in zip(total, base, strict=True))
        faster = "DALILoader" if total[0] < total[1] else "DataLoader"
        added.append([f"`{name}`", f"{own:.1f}", f"{other:.1f}", faster])
        print(*added[-1], flush=True)
    lines = [
        "# The CPU backend beside DataLoader",
        "",
        *report.format_machine(report.describe_machine([surroundings()])),
        (
            f"- data: {IMAGES} JPEGs of about 500x375 in memory, or the same as 96x96; batches of {BATCH}; DataLoader "
            f"with {cores} persistent workers; medians of {ROUNDS} epochs by turns, each of {PASSES * IMAGES:,} images"
        ),
        "- command: `python -m benchmarks.studies.cpu_backend`",
        "",
        report.markdown(presets),
        "",
        f"CPU-ms an image that a transform adds to `ToImage(), RandomResizedCrop(224)`, {ADDED_IMAGES} images:",
        "",
        report.markdown(added),
    ]
    (Path(__file__).parents[1] / "results" / "cpu-backend.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
