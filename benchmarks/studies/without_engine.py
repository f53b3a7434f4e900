"""JPEGs that no engine decodes: progressive ones, and baseline ones on a card whose engine is switched off.

    python -m benchmarks.studies.without_engine --cores 16,4 --threads 0,20,24

CUDA kernels decode them, and cores decode their Huffman codes, in part or wholly. torchdali is compared with DALI tuned
by hand. ``--threads`` are numbers of threads: with 0 torchdali chooses, and DALI has as many as cores. ``--thresholds``
are numbers of pixels above which DALI uses nvJPEG's hybrid decoder of Huffman codes. Each line is a process. Epochs of
torchdali are four times the pictures, because the decoder is idle while an epoch begins.
"""

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import data, report
from benchmarks.common.script import Results, main, make_parser, parse_args, run_worker

CASES = {"progressive": "progressive JPEGs", "imagenet": "baseline JPEGs, engine off"}
SYSTEMS = {"torchdali": "torchdali", "tuned": "DALI tuned by hand"}
_WARMUP, _PASSES = 3.0, 4


def work(options: dict[str, Any]) -> None:
    """Print what is measured here, and the images per second and busy cores of a system."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: options["cores"]]))
    import torch

    from benchmarks.studies.versions_worker import describe
    from benchmarks.systems import systems
    from torchdali.pipeline import graph, tuning

    has_engine = options["case"] == "progressive"  # which it does not decode
    decoder = {"hw_decoder_load": float(has_engine), "hybrid_huffman_threshold": options["threshold"]}
    cores = len(os.sched_getaffinity(0))
    job = systems.Job(Path(options["root"]), options["batch_size"], options["threads"] or cores, options["case"])
    if options["system"] == "torchdali":
        graph.GPU_DECODER.update(decoder)
        if not has_engine:
            tuning.jpeg_engine.has_jpeg_engine = lambda _: False
        epoch = _make_torchdali(job, options["threads"])
    else:
        epoch = systems.build_dali(job, 8, decoder if systems.has_gpu() else {}, {"dont_use_mmap": True})
    print(json.dumps(describe(torch)), flush=True)
    batches = itertools.chain.from_iterable(epoch() for _ in itertools.count())
    _time(torch, batches, _WARMUP)
    print(json.dumps(_time(torch, batches, options["seconds"])), flush=True)
    os._exit(0)


def _make_torchdali(job: Any, threads: int) -> Callable[[], Iterable[Any]]:
    from torchvision.datasets import ImageFolder

    from benchmarks.systems import systems
    from torchdali import DALILoader

    dataset = ImageFolder(job.root, systems.make_transforms(job.data))
    sampler = systems.make_sampler(dataset, _PASSES)
    loader = DALILoader(dataset, job.batch_size, sampler=sampler, drop_last=True, num_workers=threads)
    return lambda: iter(loader)


def _time(torch: Any, batches: Iterator[Any], seconds: float) -> dict[str, float]:
    """Measure the next batches, until the seconds are over."""
    start, cpu, count = time.perf_counter(), _cpu_time(), 0
    while time.perf_counter() - start < seconds:
        count += len(next(batches)[0])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    return {"images_per_s": count / taken, "busy_cores": (_cpu_time() - cpu) / taken}


def _cpu_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return what a process has measured."""
    described, measured = run_worker("studies.without_engine", options, timeout=60)
    return {**options, **described, **measured}


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    rows = [["files", "cores", "system", "threads", "hybrid from, pixels", "images/s", "busy cores"]]
    rows += [
        [
            CASES[run["case"]],
            str(run["cores"]),
            SYSTEMS[run["system"]],
            str(run["threads"] or "default"),
            f"{run['threshold']:,}",
            f"{run['images_per_s']:,.0f}",
            f"{run['busy_cores']:.1f}",
        ]
        for run in whole["runs"]
    ]
    lines = ["# JPEGs that no engine decodes", "", *report.format_machine(whole["machine"])]
    return "\n".join([*lines, f"- command: `{whole['command']}`", "", report.markdown(rows)])


def parse(command: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("studies.without_engine", __doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument("--cores", default="16,4", help="numbers of cores, separated by commas")
    parser.add_argument("--threads", default="0", help="numbers of threads, separated by commas")
    parser.add_argument("--thresholds", default="1000000", help="numbers of pixels, separated by commas")
    parser.add_argument("--seconds", type=float, default=2.5, help="time of a measurement")
    parser.add_argument("--pictures", type=int, default=4_096, help="different files")
    parser.add_argument("--batch-size", type=int, default=256, help="images in a batch")
    return parse_args(parser, command)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, and return the report."""
    results = Results("studies.without_engine", args, render)
    for case in args.cases.split(","):
        root = data.default_root(args.pictures, case)
        data.make(root, args.pictures, kind=case)
        for cores in map(int, args.cores.split(",")):
            choices = itertools.product(
                map(int, args.threads.split(",")), map(int, args.thresholds.split(",")), args.systems.split(",")
            )
            for threads, threshold, system in choices:
                options = {"case": case, "system": system, "cores": cores, "threshold": threshold, "threads": threads}
                options |= {"root": str(root), "batch_size": args.batch_size, "seconds": args.seconds}
                entry = measure(options)
                what = f"{case}, {report.cores(cores)}, {threads} threads, hybrid from {threshold:,}, {system}"
                rate = f"{entry['images_per_s']:,.0f} images/s, {entry['busy_cores']:.1f} cores busy"
                results.add(entry, f"{what}: {rate}")
    print(render(results.whole))
    return results.whole


if __name__ == "__main__":
    main(work, run, parse)
