"""The first epoch beside later ones: what does it cost that no header is known yet?

    python -m benchmarks.studies.first_epoch --cores 16,4,1 --cases alone,resnet18

An epoch lists the pictures several times, so that it is long enough to measure. To the loader each is another file,
whose header it does not know. Each number of cores has its own process. There, each turn makes a new loader, and
measures its first epochs. The first batches of an epoch do not count, because then pipelines are built.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common import data, report
from benchmarks.common.script import Results, main, make_parser, parse_args, run_worker

CASES = {"alone": "the loader alone", "resnet18": "beside a step of ResNet-18"}
_WARMUP = 16


def work(options: dict[str, Any]) -> None:
    """Print what is measured here, and then for each turn the images per second of its epochs."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: options["cores"]]))
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    from benchmarks.studies.versions_worker import describe, make_step
    from torchdali import DALILoader

    scale = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    transform = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *scale])
    dataset = ImageFolder(options["root"], transform)
    dataset.samples = (dataset.samples * (options["images"] // len(dataset.samples) + 1))[: options["images"]]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = make_step(torch, device) if options["case"] == "resnet18" else None
    print(json.dumps(describe(torch)), flush=True)
    for _ in range(options["turns"]):
        loader = DALILoader(dataset, options["batch_size"], shuffle=True, drop_last=True)
        epochs = [_time(loader, step) for _ in range(options["epochs"])]
        print(json.dumps(list(zip(*epochs, strict=True))), flush=True)
        loader.close()


def _time(loader: Any, step: Any) -> tuple[float, list[tuple[float, int]]]:
    """Return the images per second of an epoch, from batch 16 on, and of each tenth, with its pipelines at the end."""
    import torch

    count, start = 0, 0.0
    tenth = max(1, len(loader) // 10)
    tenths: list[tuple[float, int]] = []
    latest = time.perf_counter()
    iterator = iter(loader)
    for number, (images, labels) in enumerate(iterator):
        if number == _WARMUP:
            _synchronize(torch)
            start = time.perf_counter()
        if step:
            step(images, labels)
        count += len(images) * (number >= _WARMUP)
        if (number + 1) % tenth == 0:
            before, latest = latest, time.perf_counter()
            pipelines = len(iterator._prefetcher._runners)  # noqa: SLF001 - of no use to others
            tenths.append((tenth * len(images) / (latest - before), pipelines))
    _synchronize(torch)
    return count / (time.perf_counter() - start), tenths


def _synchronize(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return the rates of a process, and the median of the first epochs' rates divided by later ones'."""
    described, *turns = run_worker("studies.first_epoch", options)
    rates, tenths = ([turn[i] for turn in turns] for i in range(2))
    ratios = [first / statistics.mean(later) for first, *later in rates]
    return {**options, **described, "rates": rates, "tenths": tenths, "ratio": statistics.median(ratios)}


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    rows = [["case", "first epoch", "later epochs", "first / later"]]
    for run in whole["runs"]:
        first = [rates[0] for rates in run["rates"]]
        later = [rate for rates in run["rates"] for rate in rates[1:]]
        case = f"{CASES[run['case']]}, {report.cores(run['cores'])}, {len(first)} turns"
        rows.append([case, *map(_format, (first, later)), f"{run['ratio']:.3f}"])
    lines = ["# The first epoch beside later ones", "", *report.format_machine(whole["machine"])]
    lines += [f"- command: `{whole['command']}`", ""]
    lines += ["Images per second: medians, least and largest epoch.", "", report.markdown(rows), ""]
    lines += ["Thousands of images per second in each tenth of the first turn's epochs, and pipelines:", ""]
    for run in whole["runs"]:
        for number, tenths in enumerate(run["tenths"][0]):
            text = ", ".join(f"{rate / 1e3:.1f} ({pipelines})" for rate, pipelines in tenths)
            lines.append(f"- {CASES[run['case']]}, {report.cores(run['cores'])}, epoch {number + 1}: {text}")
    return "\n".join(lines)


def _format(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def parse(command: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("studies.first_epoch", __doc__.splitlines()[0])
    parser.add_argument("--cases", default="alone", help=f"some of {', '.join(CASES)}, separated by commas")
    parser.add_argument("--cores", default="16,4,1", help="numbers of cores, separated by commas")
    parser.add_argument("--turns", type=int, default=3, help="loaders, one after another")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each loader")
    parser.add_argument("--images", type=int, default=65_536, help="files in an epoch")
    parser.add_argument("--pictures", type=int, default=8_192, help="different files")
    parser.add_argument("--batch-size", type=int, default=256, help="images in a batch")
    parser.add_argument("--root", type=Path, help="folder of the pictures")
    return parse_args(parser, command)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, and return the report."""
    root = (args.root or data.default_root(args.pictures)).resolve()
    data.make(root, args.pictures)
    results = Results("studies.first_epoch", args, render)
    names = ("epochs", "turns", "images", "batch_size")
    for cores in map(int, args.cores.split(",")):
        for case in args.cases.split(","):
            options = {"case": case, "cores": cores, "root": str(root), **{name: getattr(args, name) for name in names}}
            entry = measure(options)
            results.add(entry, f"{case}, {report.cores(cores)}: first / later {entry['ratio']:.3f}")
    print(render(results.whole))
    return results.whole


if __name__ == "__main__":
    main(work, run, parse)
