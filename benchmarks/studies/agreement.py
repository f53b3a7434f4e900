"""Model check: does a network trained from torchdali's batches get as good as one trained from DataLoader's?

    python -m benchmarks.studies.agreement
    python -m benchmarks.studies.agreement --seeds 1 --epochs 1 --images 64 --name trial

It runs `recipes/imagefolder_classification.py` once for each loader and seed, on crops of real photographs: which
photograph is this piece from? Pieces for training and for validation come from disjoint tiles. It compares the
accuracies after the last epoch: their means, Welch's t, and an exact permutation test. The test counts how many of all
assignments of the accuracies to the two loaders set the means as far apart. The results are JSON and Markdown in
`benchmarks/results`.
"""

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.common import data, report

_REPOSITORY = Path(__file__).resolve().parents[2]
_RECIPE = Path("recipes") / "imagefolder_classification.py"
LOADERS = ("torch", "torchdali")
TITLES = {"torch": "DataLoader", "torchdali": "**torchdali**"}

PHOTOGRAPHS = {
    **data.PHOTOGRAPHS,
    **{name: f"skimage/data/{name}.png" for name in ("brick", "camera", "coins", "grass", "gravel", "moon")},
}
TILE = 64
SMALLEST = 40
"""Side of a tile, and least side of a piece in it, in pixels."""
VAL_SHARE = 3
"""One of this number of tiles is for validation."""

_EPOCH = re.compile(r"^epoch +(\d+)/\d+  loss ([\d.]+)  acc +([\d.]+)%  +([\d,]+) images/s$", re.MULTILINE)


# Data


def write_pieces(root: Path, classes: int, train: int, val: int) -> dict[str, Any]:
    """Write ``train/`` and ``val/`` with JPEGs of each photograph, and return a summary.

    Args:
        root: The folder. Files of an earlier call are replaced.
        classes: Number of photographs; fewer if fewer are installed.
        train: Number of pieces of each for training.
        val: Number of pieces of each for validation.

    Raises:
        SystemExit: `root` exists and was not made by this benchmark, or no photographs are installed.
    """
    mark = root / data.MARK
    if root.exists() and not mark.exists():
        raise SystemExit(f"{root} exists and was not made by this benchmark")
    shutil.rmtree(root, ignore_errors=True)
    rng = np.random.default_rng(0)
    sizes: list[int] = []
    paths = {name: path for name, inside in PHOTOGRAPHS.items() if (path := _find_file(inside))}
    paths = dict(list(paths.items())[:classes])
    if not paths:
        raise SystemExit("no photographs found: pip install scikit-image scikit-learn")
    for name, path in paths.items():
        with Image.open(path) as image:
            photograph = image.convert("RGB")
        tiles = [(x, y) for x in range(photograph.width // TILE) for y in range(photograph.height // TILE)]
        rng.shuffle(tiles)
        held_out = max(1, len(tiles) // VAL_SHARE)
        for split, count, part in (("train", train, tiles[held_out:]), ("val", val, tiles[:held_out])):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                file = folder / f"{number:04}.jpg"
                piece = photograph.crop(_draw_box(part[number % len(part)], rng))
                piece.save(file, quality=int(rng.integers(75, 96)))
                sizes.append(file.stat().st_size)
    counts = {"classes": len(paths), "train": len(paths) * train, "val": len(paths) * val}
    summary = {**counts, "mean_bytes": round(np.mean(sizes))}
    mark.write_text(json.dumps(summary))
    return summary


def _find_file(inside: str) -> Path | None:
    """Return a photograph's path in the installed wheel, or None. Do not import the package."""
    package, _, name = inside.partition("/")
    spec = importlib.util.find_spec(package)
    path = Path(spec.submodule_search_locations[0], name) if spec and spec.submodule_search_locations else None
    return path if path and path.exists() else None


def _draw_box(tile: tuple[int, int], rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw a piece of a tile: left, top, right, bottom."""
    sides = rng.integers(SMALLEST, TILE, 2, endpoint=True)
    left, top = (np.array(tile) * TILE + rng.integers(0, TILE - sides, endpoint=True)).tolist()
    return left, top, left + int(sides[0]), top + int(sides[1])


# Training


def train(args: argparse.Namespace, loader: str, seed: int) -> dict[str, Any]:
    """Run the recipe once, and return the figures that it prints."""
    command = [
        sys.executable,
        str(_RECIPE),
        str(args.root),
        "--loader",
        loader,
        "--seed",
        str(seed),
        *make_recipe_options(args),
    ]
    path = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
    start = time.perf_counter()
    run: dict[str, Any] = {"loader": loader, "seed": seed}
    try:
        done = subprocess.run(
            command,
            cwd=_REPOSITORY,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=args.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return {**run, "seconds": args.timeout, "status": "timeout", "stderr": str(expired)}
    run["seconds"] = round(time.perf_counter() - start, 1)
    lines = _EPOCH.findall(done.stdout)
    if done.returncode or len(lines) != args.epochs:
        return {**run, "status": "failed", "stderr": done.stderr[-3000:]}
    accuracies = [round(float(line[2]) / 100, 4) for line in lines]
    losses = [float(line[1]) for line in lines]
    return {**run, "status": "ok", "accuracy": accuracies[-1], "accuracies": accuracies, "losses": losses}


def make_recipe_options(args: argparse.Namespace) -> list[str]:
    """Return the recipe's options that are the same for all runs."""
    options = {
        "model": args.model,
        "epochs": args.epochs,
        "batch-size": args.batch_size,
        "size": args.size,
        "lr": args.lr,
        "auto-augment": args.auto_augment,
        "random-erase": args.random_erase,
        "workers": args.workers,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


# Comparing


def compare(ours: list[float], theirs: list[float]) -> dict[str, float | None]:
    """Return the difference of the means, its standard error, Welch's t with degrees of freedom, and the exact p."""
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    result: dict[str, float | None] = {"difference": round(difference, 5), "error": None, "t": None, "df": None}
    if min(len(ours), len(theirs)) < 2:
        return {**result, "p": None}
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    if error := math.sqrt(sum(parts)):
        freedom = sum(parts) ** 2 / sum(
            part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs), strict=True)
        )
        result |= {"error": round(error, 5), "t": round(difference / error, 3), "df": round(freedom, 1)}
    return {**result, "p": round(compute_permutation_p(ours, theirs), 4)}


def compute_permutation_p(ours: list[float], theirs: list[float]) -> float:
    """Return the share of all assignments that set the means at least as far apart."""
    both = np.array([*ours, *theirs])
    chosen = np.array(list(itertools.combinations(range(len(both)), len(ours))))
    sums = both[chosen].sum(1)
    gaps = np.abs(sums / len(ours) - (both.sum() - sums) / len(theirs))
    return float((gaps >= gaps[0] - 1e-12).mean())


# Report


def markdown(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    host, pieces = whole["machine"], whole["data"]
    versions = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    where = f"{host['gpu']} (driver {host['driver']})" if host["gpu"] else "no GPU"
    lines = [
        "# Model check: validation accuracy with both loaders",
        "",
        f"- machine: {where}, {host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB",
        f"- software: {versions}; torchdali at commit {host['commit'] or 'unknown'}",
        (
            f"- data: {pieces['train']} training and {pieces['val']} validation JPEGs, pieces of {pieces['classes']} "
            f"photographs, {SMALLEST} to {TILE} pixels a side, the two from disjoint tiles"
        ),
        f"- each training: `python {_RECIPE} DATA --loader LOADER --seed SEED {shlex.join(whole['recipe'])}`",
        f"- command: `{whole['command']}`; {whole['total_seconds']:.0f} s in all",
        f"- date: {whole['date']}",
        "",
        f"| loader | {' | '.join(f'seed {seed}' for seed in whole['seeds'])} | mean | std |",
        f"| --- |{' ---: |' * (len(whole['seeds']) + 2)}",
    ]
    for loader in LOADERS:
        runs = {run["seed"]: run for run in whole["runs"] if run["loader"] == loader}
        cells = [_percent(runs[seed].get("accuracy")) if seed in runs else "-" for seed in whole["seeds"]]
        known = [run["accuracy"] for run in runs.values() if run["status"] == "ok"]
        cells += [_percent(statistics.fmean(known) if known else None)]
        cells += [_percent(statistics.stdev(known) if len(known) > 1 else None)]
        lines.append(f"| {TITLES[loader]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", verdict(whole["comparison"])]) + "\n"


def verdict(comparison: dict[str, float | None] | None) -> str:
    """Return the comparison in a sentence or two."""
    if comparison is None:
        return "A training failed, so there are no accuracies to compare."
    text = f"torchdali minus DataLoader: {100 * comparison['difference']:+.2f} points"
    if comparison["p"] is None:
        return f"{text}. One seed says nothing about noise."
    if comparison["error"] is not None:
        text += f", standard error {100 * comparison['error']:.2f}; Welch's t = {comparison['t']:.2f} with "
        text += f"{comparison['df']:.1f} degrees of freedom"
    result = "within the noise of the seeds" if comparison["p"] > 0.05 else "**more than the noise of the seeds**"
    return f"{text}; exact permutation test p = {comparison['p']:.3f}: {result}."


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all trainings, write the results, and return the whole report."""
    start = time.perf_counter()
    seeds = list(range(args.seeds))
    whole: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.studies.agreement", *args.command]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": write_pieces(args.root, args.classes, args.images, args.val_images),
        "recipe": make_recipe_options(args),
        "seeds": seeds,
    }
    print(f"data: {whole['data']} in {args.root}", flush=True)
    modules = {name: importlib.import_module(name) for name in ("torch", "torchvision", "nvidia.dali", "torchdali")}
    environment = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: module.__version__ for name, module in modules.items()},
    }
    whole["machine"] = report.describe_machine([environment], args.commit)

    def train_one(job: tuple[int, str]) -> dict[str, Any]:
        done = train(args, job[1], job[0])
        outcome = _percent(done.get("accuracy")) if done["status"] == "ok" else done["stderr"]
        print(f"seed {done['seed']}  {done['loader']:<10}{outcome}  {done['seconds']:.0f} s", flush=True)
        return done

    with ThreadPoolExecutor(args.jobs) as pool:
        whole["runs"] = list(pool.map(train_one, itertools.product(seeds, LOADERS)))
    by_loader = [
        [run["accuracy"] for run in whole["runs"] if run["loader"] == loader and run["status"] == "ok"]
        for loader in ("torchdali", "torch")
    ]
    whole["comparison"] = compare(*by_loader) if all(len(values) == len(seeds) for values in by_loader) else None
    whole["total_seconds"] = round(time.perf_counter() - start, 1)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    (args.out / f"{args.name}.md").write_text(markdown(whole))
    return whole


def parse(command: list[str]) -> argparse.Namespace:
    """Parse the options."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.agreement",
        description="Train with both loaders and compare the accuracies.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of trainings with each loader")
    parser.add_argument("--classes", type=int, default=len(PHOTOGRAPHS), help="number of photographs")
    parser.add_argument("--images", type=int, default=100, help="number of training images of each class")
    parser.add_argument("--val-images", type=int, default=100, help="number of validation images of each class")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64, help="height and width that the network sees")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--auto-augment", default="ta_wide", choices=["ra", "ta_wide", "augmix", "imagenet"])
    parser.add_argument("--random-erase", type=float, default=0.1)
    parser.add_argument("--jobs", type=int, default=min(4, max(1, cores // 4)), help="number of trainings at a time")
    parser.add_argument("--workers", type=int, help="num_workers of each loader [the cores, divided by the jobs]")
    parser.add_argument("--timeout", type=float, default=600.0, help="limit of one training in seconds")
    parser.add_argument("--root", type=Path, help="folder for the images [in /dev/shm]")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", help="torchdali's commit, if git cannot tell it")
    parser.add_argument("--name", help="name of the result files [agreement-<GPU>]")
    args = parser.parse_args(command)
    args.command = report.hide_paths(command, args)
    args.workers = args.workers or max(1, cores // args.jobs)
    args.root = args.root or data.default_root(args.images).with_name("torchdali-agreement")
    args.name = args.name or report.default_name("agreement")
    return args


def main() -> None:
    """Run the study and print the report."""
    args = parse(sys.argv[1:])
    whole = run(args)
    print(f"\n{markdown(whole)}")
    if any(run["status"] != "ok" for run in whole["runs"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
