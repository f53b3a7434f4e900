"""Run one process of `benchmarks.studies.scale`, with the environment variables of `torchrun`."""

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common import memory_use
from torchdali.tools.bench import metrics


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure this process's speed and, for torchdali, its memory."""
    import torch
    from torch import distributed

    from benchmarks.systems.batches import surroundings

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Only for barriers. gloo needs no GPU, so NCCL does not affect the loader.
    distributed.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    figures = (_torchdali if args.system == "torchdali" else _dali_tuned)(args)
    distributed.barrier()
    distributed.destroy_process_group()
    return {**figures, "cpus": sorted(os.sched_getaffinity(0)), **surroundings()}


def _dali_tuned(args: argparse.Namespace) -> dict[str, Any]:
    """Measure tuned DALI with all pictures in each process."""
    from benchmarks.systems import systems

    job = systems.Job(args.root, args.batch_size, max(1, len(os.sched_getaffinity(0)) // 2))
    build = cache(systems.dali_tuned)
    return _measure_rate(lambda _: build(job)(), args.seconds)


def _torchdali(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch import distributed
    from torchvision.datasets import ImageFolder

    from benchmarks.systems.systems import make_transforms
    from torchdali import DALILoader

    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    folder = ImageFolder(args.root, make_transforms())
    samples = folder.samples

    # Every process gets as many pictures as one process alone.
    folder.samples = samples * world
    loader: Any = _loader(DALILoader, folder, args.batch_size)
    figures = _measure_rate(lambda number: _epoch(loader, number), args.seconds)
    distributed.barrier()
    figures["used_on_each_gpu_mib"] = _query_used_memory() if rank == 0 else []
    distributed.barrier()
    loader.close()

    length = world * args.batches * args.batch_size
    folder.samples = (samples * (1 + length // len(samples)))[:length]
    loader = _loader(DALILoader, folder, args.batch_size)
    rows: list[dict[str, float]] = []
    for number in range(args.epochs):
        count = sum(1 for _ in _epoch(loader, number))
        assert count == args.batches, count
        distributed.barrier()
        rows.append(memory_use.measure_all())
    figures["used"] = rows
    others = [i for i in range(torch.cuda.device_count()) if i != rank]
    figures["torch_on_other_gpus_mib"] = max((torch.cuda.memory_reserved(i) / 2**20 for i in others), default=0)
    loader.close()
    return figures


def _loader(kind: Any, dataset: Any, batch_size: int) -> Any:
    from torch.utils.data import DistributedSampler

    return kind(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset), drop_last=True)


def _epoch(loader: Any, number: int) -> Iterator[Any]:
    loader.sampler.set_epoch(number)
    return iter(loader)


def _measure_rate(epoch: Callable[[int], Iterator[Any]], seconds: float) -> dict[str, Any]:
    """Run an epoch to warm up, wait for all processes, and return images/s."""
    from torch import distributed

    start = time.perf_counter()
    batches = epoch(0)
    next(batches)
    _wait()
    first_batch_s = round(time.perf_counter() - start, 3)
    for _ in batches:
        pass
    distributed.barrier()
    return {"first_batch_s": first_batch_s, **_count_images(epoch, seconds)}


def _count_images(epoch: Callable[[int], Iterator[Any]], seconds: float) -> dict[str, float]:
    """Return images/s over epochs. The last epoch is cut."""
    images, number = 0, 0
    cpu_before = metrics.cpu_seconds()
    start = now = time.perf_counter()
    while now - start < seconds:
        number += 1
        for batch in epoch(number):
            images += len(batch[0])
            now = time.perf_counter()
            if now - start >= seconds:
                break
    _wait()
    elapsed = time.perf_counter() - start
    cpu = metrics.cpu_seconds() - cpu_before
    return {
        "images_per_s": round(images / elapsed, 1),
        "images": images,
        "epochs": number,
        "cpu_s_per_1000_images": round(cpu / images * 1000, 3),
    }


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _query_used_memory() -> list[int]:
    """Return the MiB in use on each GPU of the machine, by all processes."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [int(line) for line in done.stdout.split() if line.isdigit()]


def main() -> None:
    """Measure with the options of the command line, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description="One process of benchmarks.studies.scale, which starts it.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--system", required=True, help="torchdali or dali_tuned")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    args = parser.parse_args()
    figures = measure(args)
    unfinished = args.result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(figures))
    unfinished.rename(args.result)


if __name__ == "__main__":
    main()
