"""Measure images/s with boxes and masks, torchdali beside DataLoader, in one run.

    python -m benchmarks.studies.detection                       # about 3 minutes
    python -m benchmarks.studies.detection --cases ssd300,lsj --seconds 3 --name trial
    python -m benchmarks.studies.detection --train               # also training steps of SSD300 and Mask R-CNN

The cases are torchvision's reference chains: large-scale jitter (``lsj``, 1024 pixels), ``multiscale``, ``ssd300`` and
``segmentation`` (480 pixels). ``+masks`` has instance masks, too. Both loaders have the same dataset, transforms,
workers and batches, which end on the device as float32. DataLoader decodes with PIL in its workers. torchdali's workers
return paths, boxes and masks, and DALI decodes.

With ``--train``, a step is measured with batches of each loader, and with one batch that is there already.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision import models

from benchmarks.common import data
from benchmarks.common.script import Results, make_parser, parse_args
from benchmarks.systems.annotated_pictures import CHAINS, AnnotatedPictures, collate, make_chain
from torchdali import DALILoader

CASES = ["lsj", "lsj+masks", "multiscale", "multiscale+masks", "ssd300", "segmentation"]
SYSTEMS = ["torchdali", "dataloader"]
STEPS = {"ssd300": "ssd300_vgg16", "multiscale+masks": "maskrcnn_resnet50_fpn"}
_MANY = 10**7
_LEGEND = """\
Images/s of the loader alone: batches of {batch_size}, {workers} workers, pictures in memory. *Ratio* is torchdali's
rate to DataLoader's. A training step of torchvision's network, with the batches of a loader, is measured in the same
way; *synthetic* takes one batch again and again. *Host* is the CPU time that torchdali takes from the thread that
iterates."""


def make_loader(args: Namespace, root: Path, case: str, system: str) -> Any:
    """Return the loader of a system for a case. Its epoch is longer than any measurement."""
    name, _, masks = case.partition("+")
    chain = make_chain(name)
    dataset = AnnotatedPictures(root, name, bool(masks), None if system == "torchdali" else chain)
    sampler = RandomSampler(dataset, replacement=True, num_samples=_MANY)
    settings: dict[str, Any] = {"num_workers": args.workers, "collate_fn": collate, "sampler": sampler}
    if system == "torchdali":
        return DALILoader(dataset, args.batch_size, transform=chain, **settings)
    return DataLoader(dataset, args.batch_size, pin_memory=torch.cuda.is_available(), **settings)


def move(part: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to the device. What is there already stays."""
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    if isinstance(part, dict):
        return {name: move(value, device) for name, value in part.items()}
    return [move(value, device) for value in part]


def count_rate(batches: Iterator[Any], step: Any, device: torch.device, args: Namespace) -> tuple[float, float]:
    """Return images/s over ``args.seconds``, after ``args.warmup`` seconds.

    With it comes the CPU time in milliseconds that this thread took for a batch, without the step.
    """

    def run(seconds: float) -> tuple[int, int, float, float]:
        start, images, count, host = time.perf_counter(), 0, 0, 0.0
        while time.perf_counter() - start < seconds:
            before = time.thread_time()
            batch = move(next(batches), device)
            host += time.thread_time() - before
            images, count = images + len(batch[0]), count + 1
            step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return images, count, time.perf_counter() - start, host

    run(args.warmup)
    images, count, seconds, host = run(args.seconds)
    return images / seconds, host / count * 1e3


def measure(args: Namespace, root: Path, case: str, system: str, device: torch.device) -> tuple[float, float]:
    """Measure a loader alone, as :func:`count_rate` does."""
    loader = make_loader(args, root, case, system)
    return count_rate(iter(loader), len, device, args)


def make_step(case: str, device: torch.device) -> Any:
    """Return a function that trains torchvision's network for a case on a batch."""
    model = models.get_model(STEPS[case], weights=None, weights_backbone=None, num_classes=91).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(batch: Any) -> None:
        images, targets = batch
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def measure_steps(args: Namespace, root: Path, case: str, system: str, device: torch.device) -> tuple[float, float]:
    """Measure training steps with the batches of a system, as :func:`count_rate` does."""
    loader = make_loader(args, root, case, "torchdali" if system == "synthetic" else system)
    batches = iter(loader)
    if system == "synthetic":
        batch = move(next(batches), device)
        del batches, loader
        batches = iter(lambda: batch, None)
    return count_rate(batches, make_step(case, device), device, args)


def run(args: Namespace) -> dict[str, Any]:
    """Measure all cases, write the results, and return the whole report."""
    root = args.root or data.default_root(args.images)
    pictures = data.make(root, args.images)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    details = {name: getattr(args, name) for name in ("batch_size", "seconds", "workers")}
    results = Results("studies.detection", args, render, data=pictures, **details)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    versions = {"torch": torch.__version__}
    jobs = [(case, system, "loader", measure) for case in args.cases for system in args.systems]
    if args.train:
        systems = [*args.systems, "synthetic"]
        jobs += [
            (case, system, "training", measure_steps) for case in STEPS if case in args.cases for system in systems
        ]
    for case, system, what, function in jobs:
        entry: dict[str, Any] = {"case": case, "system": system, "what": what, "gpu": gpu, "versions": versions}
        try:
            rate, host = function(args, root, case, system, device)
            entry |= {"images_per_second": round(rate, 1), "host_ms_per_batch": round(host, 2)}
        except Exception as error:  # noqa: BLE001 - the other cases are measured all the same
            entry["error"] = f"{type(error).__name__}: {error}"
        found = (
            entry.get("error") or f"{entry['images_per_second']} images/s, {entry['host_ms_per_batch']} ms of the host"
        )
        results.add(entry, f"{what:9} {case:18} {system:11} {found}")
    return results.whole


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    runs = {(run["what"], run["case"], run["system"]): run for run in whole["runs"]}
    rates = {key: run.get("images_per_second") for key, run in runs.items()}
    systems = list(dict.fromkeys(run["system"] for run in whole["runs"]))
    lines = [
        f"# Boxes and masks: {whole['machine']['gpu'] or 'CPU'}",
        "",
        f"- machine: {whole['machine']['cpu']}, {whole['machine']['cores']} cores",
        f"- torchdali: {whole['machine']['commit']}; command: `{whole['command']}`; {whole['date']}",
        "",
        *_LEGEND.format(**whole).splitlines(),
        "",
        "| Images/s | " + " | ".join(systems) + " | ratio | host, ms a batch |",
        "| --- |" + " ---: |" * (len(systems) + 2),
    ]
    for what, case in dict.fromkeys((run["what"], run["case"]) for run in whole["runs"]):
        row = [rates.get((what, case, system)) for system in systems]
        ours, theirs = (rates.get((what, case, system)) for system in SYSTEMS)
        cells = ["" if rate is None else f"{rate:,.0f}" for rate in row]
        cells.append(f"{ours / theirs:.2f}" if ours and theirs else "")
        cells.append(str(runs.get((what, case, "torchdali"), {}).get("host_ms_per_batch", "")))
        lines.append(f"| {what}: {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(command: list[str]) -> Namespace:
    """Parse the command line."""
    parser = make_parser("studies.detection", "Measure loaders with boxes and masks.")
    parser.add_argument("--cases", default=",".join(CASES), help="separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas")
    parser.add_argument("--images", type=int, default=1024, help="number of pictures")
    parser.add_argument("--batch-size", type=int, default=16, help="images in a batch")
    parser.add_argument("--workers", type=int, default=16, help="worker processes of each loader")
    parser.add_argument("--seconds", type=float, default=5, help="time of one measurement")
    parser.add_argument("--warmup", type=float, default=2, help="seconds before it")
    parser.add_argument("--root", type=Path, help="folder of the pictures")
    parser.add_argument("--train", action="store_true", help="also measure training steps")
    args = parse_args(parser, command)
    args.cases, args.systems = args.cases.split(","), args.systems.split(",")
    if unknown := [case for case in args.cases if case.partition("+")[0] not in CHAINS]:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    return args


if __name__ == "__main__":
    run(parse(sys.argv[1:]))
