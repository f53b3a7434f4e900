"""Measure DALILoader alone with its caches and without, in the first epoch and in later ones.

    python -m benchmarks.studies.cache
    python -m benchmarks.studies.cache --cases uncached,resized_device --seconds 10 --name trial

Each case runs in a new process on the given cores, under a time limit. The dataset has the pictures of `common.data`
several times, so that an epoch with a cache is long enough. The cache keeps each of these samples separately. The
results are JSON and Markdown in `benchmarks/results`.
"""

import argparse
import cProfile
import io
import multiprocessing
import os
import pstats
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.common import data, report
from benchmarks.common.script import Results, make_parser, parse_args
from torchdali.tools.bench import metrics, subprocesses

_SHORT_SIDE = 256
_PRELOADED = ("torch", "torchvision.transforms.v2", "torchvision.datasets", "torchdali", "nvidia.dali.fn")


@dataclass(frozen=True)
class Kind:
    """A kind of case.

    Attributes:
        title: Title in the table.
        options: Options of DALILoader.
        resized: Whether the files were resized to 256 pixels on the shorter side.
        resize: Whether the transforms begin with Resize(256), followed by a random crop.
    """

    title: str
    options: dict[str, Any]
    resized: bool = False
    resize: bool = False


KINDS = {
    "uncached": Kind("no cache", {}),
    "host": Kind('`cache="host"`', {"cache": "host"}),
    "device": Kind('`cache="device"`', {"cache": "device"}),
    "device_half": Kind('`cache="device"`, half of it fits', {"cache": "device", "cache_bytes": "half"}),
    "resize_uncached": Kind("no cache, `Resize(256)`, `RandomCrop(224)`", {}, resize=True),
    "resize_device": Kind('`cache="device"`, `Resize(256)`, `RandomCrop(224)`', {"cache": "device"}, resize=True),
    "resized_uncached": Kind("no cache, files of 256 pixels", {}, resized=True),
    "resized_device": Kind('`cache="device"`, files of 256 pixels', {"cache": "device"}, resized=True),
}


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: Name in :data:`KINDS`.
        cores: Number of cores that the process may use.
        root: Folder of class folders.
        repeat: How often each picture is in the dataset.
        batch_size: Number of images in a batch.
        seconds: How long later epochs are measured.
        profile: Whether to profile the iterating thread at the end.
    """

    name: str
    cores: int
    root: Path
    repeat: int
    batch_size: int
    seconds: float
    profile: bool


def measure(case: Case, result: Path) -> None:
    """Measure one case, and write its figures to `result`."""
    import torch
    from torchvision.datasets import ImageFolder

    from benchmarks.systems.batches import describe, surroundings
    from benchmarks.systems.systems import SIZE
    from torchdali import DALILoader
    from torchdali.tools.bench.metrics import Gpu

    gpu = Gpu()
    kind = KINDS[case.name]
    dataset = ImageFolder(case.root, _transforms(kind))
    dataset.samples = dataset.samples * case.repeat
    options = dict(kind.options)
    if "cache_bytes" in options:
        options["cache_bytes"] = len(dataset) * 500 * 375 * 3 // 2
    loader = DALILoader(dataset, case.batch_size, shuffle=True, drop_last=True, **options)

    def epoch() -> tuple[int, Any]:
        count, batch = 0, None
        for images_and_labels in loader:
            count, batch = count + 1, images_and_labels
        gpu.wait()
        return count * case.batch_size, batch

    start = time.perf_counter()
    images, batch = epoch()
    first = images / (time.perf_counter() - start)
    gpu.sample_memory()
    epoch()  # the first epoch with a full cache may build pipelines
    images, epochs = 0, 0
    cpu, start = metrics.cpu_seconds(), time.perf_counter()
    while time.perf_counter() - start < case.seconds:
        images += epoch()[0]
        epochs += 1
    elapsed, cpu = time.perf_counter() - start, metrics.cpu_seconds() - cpu
    gpu.sample_memory()
    cache = loader._session.native_plan.cache if loader._session.native_plan else None  # noqa: SLF001
    figures: dict[str, Any] = {
        "first_epoch_images_per_s": round(first, 1),
        "images_per_s": round(images / elapsed, 1),
        "epochs": epochs,
        "samples": len(dataset),
        "cpu_s_per_1000_images": round(cpu / images * 1000, 3),
        "busy_cores": round(cpu / elapsed, 2),
        "gpu_peak_mib": gpu.peak_mib,
        "cache": cache.describe() if cache else None,
        "batch": describe(batch, case.batch_size, SIZE),
        **metrics.host_memory(),
    }
    if case.profile:
        figures["profile"] = _profile(epoch)
    loader.close()
    if gpu.present:
        figures["gpu_after_close_mib"] = round((gpu._free_before - torch.cuda.mem_get_info()[0]) / 2**20)  # noqa: SLF001
    subprocesses.write_figures(figures | surroundings(), result)
    subprocesses.exit_now(0)


def _profile(epoch: Any) -> str:
    profile = cProfile.Profile()
    profile.runcall(lambda: [epoch() for _ in range(5)])
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(40)
    return text.getvalue()


def _transforms(kind: Kind) -> Any:
    from torchvision.transforms import v2

    from benchmarks.systems.systems import SIZE, make_transforms

    chain = make_transforms()
    if kind.resize:
        chain.transforms[1:2] = [v2.Resize(_SHORT_SIDE, antialias=True), v2.RandomCrop(SIZE)]
    return chain


def make_resized(root: Path) -> Path:
    """Write the pictures with 256 pixels on the shorter side, beside the given folder, and return their folder."""
    target = root.with_name(f"{root.name}-{_SHORT_SIDE}")
    if target.exists():
        return target
    unfinished = target.with_name(f"{target.name}.unfinished")
    paths = sorted(root.glob("*/*.jpg"))
    for folder in {path.parent.name for path in paths}:
        (unfinished / folder).mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        list(pool.map(partial(_resize, unfinished), paths, chunksize=64))
    unfinished.rename(target)
    return target


def _resize(target: Path, path: Path) -> None:
    with Image.open(path) as image:
        scale = _SHORT_SIDE / min(image.size)
        size = (max(_SHORT_SIDE, int(image.width * scale)), max(_SHORT_SIDE, int(image.height * scale)))
        image.resize(size, Image.Resampling.BICUBIC).save(target / path.parent.name / path.name, quality=95)


def table(runs: list[dict[str, Any]]) -> str:
    """Return the results, with a row for each case."""
    rows = [["case", "images/s, first epoch", "later", "busy cores", "CPU s/1,000", "GPU MiB", "host peak MiB"]]
    for run in runs:
        title = KINDS[run["case"]].title
        if run["status"] != "ok":
            rows.append([title, run["status"], *[""] * 5])
            continue
        gpu = "-" if run["gpu_peak_mib"] is None else f"{run['gpu_peak_mib']:,}"
        rows.append(
            [
                title,
                f"{run['first_epoch_images_per_s']:,.0f}",
                f"{run['images_per_s']:,.0f}",
                f"{run['busy_cores']}",
                f"{run['cpu_s_per_1000_images']}",
                gpu,
                f"{run['rss_peak_mib']:,}",
            ]
        )
    return report.markdown(rows)


def main() -> None:
    """Run the cases, print each as it ends, and write the results."""
    args = _parse(sys.argv[1:])
    started = time.perf_counter()
    root = args.root or data.default_root(args.images)
    pictures = data.make(root, args.images)
    resized = make_resized(root) if any(KINDS[name].resized for name in args.cases) else root
    print(f"data: {pictures['images']} pictures, {time.perf_counter() - started:.1f} s", flush=True)
    context = subprocesses.start_context(_PRELOADED if not args.spawn else ())
    details = {"batch_size": args.batch_size, "cores": args.cores, "repeat": args.repeat}
    results = Results("cache", args, render, data=pictures, **details)
    for name in args.cases:
        folder = resized if KINDS[name].resized else root
        case = Case(name, args.cores, folder, args.repeat, args.batch_size, args.seconds, args.profile)
        run = {"case": name, **subprocesses.measure_in_process(context, measure, case, args.timeout)}
        figures = [f"{key} {run[key]:,}" for key in ("first_epoch_images_per_s", "images_per_s") if key in run]
        more = [run[key] for key in ("stderr", "cache", "profile") if run.get(key)]
        results.add(run, "\n".join([f"{name:<18}{run['status']} {', '.join(figures)}", *more]))
    print(f"\n{table(results.runs)}\n{time.perf_counter() - started:.0f} s in all")


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    heading = [
        "# Caches",
        "",
        *report.format_machine(whole["machine"]),
        f"- data: {whole['data']['images']:,} pictures, each {whole['repeat']} times in the dataset",
        f"- work: batches of {whole['batch_size']} on {whole['cores']} cores, random crop to 224, flip, normalize",
        f"- command: `{whole['command']}`",
        f"- date: {whole['date']}",
        "",
    ]
    caches = [f"- {KINDS[run['case']].title}: {run['cache']}" for run in whole["runs"] if run.get("cache")]
    return "\n".join([*heading, table(whole["runs"]), "", *caches])


def _parse(command: list[str]) -> argparse.Namespace:
    parser = make_parser("cache", "Measure DALILoader with its caches and without.")
    parser.add_argument("--images", type=int, default=8192, help="number of pictures to make")
    parser.add_argument("--root", type=Path, help="folder of the pictures [in /dev/shm]")
    parser.add_argument("--repeat", type=int, default=4, help="how often each picture is in the dataset")
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--cases", default=",".join(KINDS), help="some of the cases, separated by commas")
    parser.add_argument("--seconds", type=float, default=3.0, help="time of the later epochs of one case")
    parser.add_argument("--timeout", type=float, default=60.0, help="limit of one process in seconds")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="profile the iterating thread")
    parser.add_argument("--spawn", action="store_true", help="start each process as a new interpreter")
    args = parse_args(parser, command)
    args.cases = args.cases.split(",")
    args.cores = min(args.cores, len(os.sched_getaffinity(0)))
    if unknown := set(args.cases) - set(KINDS):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return args


if __name__ == "__main__":
    main()
