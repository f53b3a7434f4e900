"""What holds a loader beside a step of ResNet-18? Each lever alone, in a process of its own.

    python -m benchmarks.studies.beside_step --cores 16,4 --steps eager,compiled,graphs

* ``synthetic``: the step alone, on one batch that stays on the GPU: the ceiling;
* ``default``: DALILoader;
* ``own_stream``: DALILoader, and the training in a stream of its own;
* ``second_process``: DALILoader in another process, which shares its batches by CUDA IPC;
* ``nvimgcodec``: a thread decodes a batch for each step with nvImageCodec itself, and nothing else is done with it.

Without a GPU the numbers mean nothing.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.common import data, report
from benchmarks.common.script import Results, main, make_parser, parse_args, run_worker
from benchmarks.studies.versions_worker import COMPILERS, describe, make_step

SYSTEMS = {
    "synthetic": "one batch on the GPU",
    "default": "torchdali",
    "own_stream": "torchdali, the training in its own stream",
    "second_process": "torchdali in a second process",
    "nvimgcodec": "nvImageCodec decodes, and the step reads one batch",
}
_WARMUP, _AHEAD = 40, 4


def work(options: dict[str, Any]) -> None:
    """Print what is measured here, and the images per second of a step beside a system."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: options["cores"]]))
    import torch

    import torchdali  # noqa: F401 - sets the number of hardware queues

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = make_step(torch, device, options["step"])
    print(json.dumps(describe(torch)), flush=True)
    own = options["system"] == "own_stream" and device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream()) if own else nullcontext():
        batches = _MAKERS[options["system"]](options, device)
        for images, labels in itertools.islice(batches, _WARMUP):
            step(images, labels)
        _synchronize(torch)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < options["seconds"]:
            images, labels = next(batches)
            step(images, labels)
            count += len(images)
        _synchronize(torch)
    print(json.dumps({"images_per_s": count / (time.perf_counter() - start)}), flush=True)
    for process in multiprocessing.active_children():  # os._exit() leaves them, and they hold the output open
        process.kill()
    os._exit(0)


def _synchronize(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _synthetic(options: dict[str, Any], device: Any) -> Iterator[Any]:
    import torch

    images = torch.randn(options["batch_size"], 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    return itertools.repeat((images, torch.zeros(len(images), dtype=torch.long, device=device)))


def _load(options: dict[str, Any], _device: Any) -> Iterator[Any]:
    """Give the batches of one epoch after another."""
    from torchvision.datasets import ImageFolder

    from benchmarks.systems.systems import make_sampler, make_transforms
    from torchdali import DALILoader

    dataset = ImageFolder(options["root"], make_transforms())
    loader = DALILoader(dataset, options["batch_size"], sampler=make_sampler(dataset, 8), drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def _load_elsewhere(options: dict[str, Any], device: Any) -> Iterator[Any]:
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    batches: Any = context.Queue(_AHEAD)
    context.Process(target=_send, args=(options, device, batches), daemon=True).start()
    while True:
        yield batches.get(timeout=120)


def _send(options: dict[str, Any], device: Any, batches: Any) -> None:
    """Put the batches of a loader into a queue, as copies: CUDA IPC shares memory of torch's allocator alone."""
    import torch

    kept: list[Any] = []  # because the other process may still open them
    for batch in _load(options, device):
        copied = [torch.as_tensor(part).clone() for part in batch]
        _synchronize(torch)
        batches.put(copied)
        kept = [*kept, copied][-2 * _AHEAD :]


def _decode_directly(options: dict[str, Any], device: Any) -> Iterator[Any]:
    """Give the same batch again and again, while a thread decodes a batch for each."""
    import torch
    from nvidia import nvimgcodec  # pyright: ignore

    files = [path.read_bytes() for path in sorted(Path(options["root"]).rglob("*.jpg"))]
    params = nvimgcodec.DecodeParams(color_spec=nvimgcodec.ColorSpec.SRGB)
    decoder = nvimgcodec.Decoder(max_num_cpu_threads=4)
    ready: queue.Queue[Any] = queue.Queue(_AHEAD)

    def decode() -> None:
        stream = torch.cuda.Stream() if device.type == "cuda" else None
        for begin in itertools.cycle(range(0, len(files) - options["batch_size"], options["batch_size"])):
            streams = [nvimgcodec.CodeStream(file) for file in files[begin : begin + options["batch_size"]]]
            images = decoder.decode(streams, params=params, cuda_stream=stream.cuda_stream if stream else 0)
            if stream:
                stream.synchronize()
            ready.put(images)

    threading.Thread(target=decode, daemon=True).start()
    for batch in _synthetic(options, device):
        ready.get(timeout=60)
        yield batch


_MAKERS: dict[str, Callable[[dict[str, Any], Any], Iterator[Any]]] = {
    "synthetic": _synthetic,
    "default": _load,
    "own_stream": _load,
    "second_process": _load_elsewhere,
    "nvimgcodec": _decode_directly,
}


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return what a process has measured."""
    described, measured = run_worker("studies.beside_step", options, timeout=180)
    return {**options, **described, **measured}


def render(whole: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    ceilings = {
        (run["step"], run["cores"]): run["images_per_s"] for run in whole["runs"] if run["system"] == "synthetic"
    }
    rows = [["step", "cores", "system", "images/s", "of the step alone"]]
    for run in whole["runs"]:
        share = run["images_per_s"] / ceilings.get((run["step"], run["cores"]), float("nan"))
        figures = f"{run['images_per_s']:,.0f}", f"{share:.1%}"
        rows.append([run["step"], str(run["cores"]), SYSTEMS[run["system"]], *figures])
    lines = ["# Levers beside a ResNet-18", "", *report.format_machine(whole["machine"])]
    return "\n".join([*lines, f"- command: `{whole['command']}`", "", report.markdown(rows)])


def parse(command: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("studies.beside_step", __doc__.splitlines()[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument("--steps", default="eager,compiled", help=f"some of {', '.join(COMPILERS)}")
    parser.add_argument("--cores", default="16", help="numbers of cores, separated by commas")
    parser.add_argument("--seconds", type=float, default=6.0, help="time of a measurement")
    parser.add_argument("--pictures", type=int, default=5_120, help="different files")
    parser.add_argument("--batch-size", type=int, default=256, help="images in a batch")
    return parse_args(parser, command)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, and return the report."""
    results = Results("studies.beside_step", args, render)
    root = data.default_root(args.pictures)
    data.make(root, args.pictures)
    for step, cores, system in itertools.product(
        args.steps.split(","), map(int, args.cores.split(",")), args.systems.split(",")
    ):
        options = {"step": step, "cores": cores, "system": system, "root": str(root)}
        options |= {"batch_size": args.batch_size, "seconds": args.seconds}
        entry = measure(options)
        results.add(entry, f"{step}, {report.cores(cores)}, {system}: {entry['images_per_s']:,.0f} images/s")
    print(render(results.whole))
    return results.whole


if __name__ == "__main__":
    main(work, run, parse)
