"""Measure how fast one core reads objects of a store that answers after 30 ms.

    python -m benchmarks.studies.remote

A process of its own, on the other cores, serves pictures as S3 does, from memory. *Fetching* only reads the objects, by
threads that want 64 at a time, as the loader's do. *DALILoader* also decodes: it makes batches of crops of 224 pixels
of photographs, or of whole small pictures. *Image folder* is the same loader with the same files on the local disk. So
the difference of the two is what the store costs.

Turns of all cases are mixed, and the median counts. CPU time is that of this process. It is told apart, because other
work on the machine makes objects/s worthless, and changes CPU time little. It writes ``remote-cpu.md``.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common import data, report

SERVER = Path(__file__).parents[2] / "tests" / "helpers" / "object_server.py"
CHUNK, THREADS, BATCH = 64, 8, 256
SETS = {"small": "PNGs of 32x32", "imagenet": "JPEGs of about 500x375"}
GOAL = 1000
QUIET = 1.5


@contextmanager
def serve(folder: Path, latency: float, cores: set[int]) -> Iterator[None]:
    """Serve the files of a folder as ``s3://bucket``, from a process on some cores."""
    command = [sys.executable, str(SERVER), str(folder), str(latency)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    assert server.stdin is not None
    assert server.stdout is not None
    os.environ |= {
        "AWS_ENDPOINT_URL": server.stdout.readline().decode().strip(),
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    try:
        yield
    finally:
        server.communicate()  # it ends with its standard input


def make_cases(root: Path, kind: str) -> dict[str, Callable[[], None]]:
    """Return a function for each case, which reads all pictures once."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    from torchdali import DALILoader
    from torchdali.datasets import RemoteImages
    from torchdali.sources.remote import Client, Range

    transform = v2.Compose([v2.ToImage(), v2.CenterCrop(32) if kind == "small" else v2.RandomResizedCrop(224)])
    local, remote = ImageFolder(root, transform), RemoteImages("s3://bucket/", transform)
    client, uris = Client(), [os.fsdecode(uri) for uri in remote.uris]
    chunks = [[Range(uri) for uri in uris[start : start + CHUNK]] for start in range(0, len(uris), CHUNK)]
    pool = ThreadPoolExecutor(THREADS)

    def fetch() -> None:
        assert sum(map(len, pool.map(client.read, chunks))) == len(uris)

    def iterate(loader: Any) -> None:
        assert sum(len(labels) for _, labels in loader) == len(uris)

    loaders = [DALILoader(dataset, BATCH, shuffle=True, device="cpu") for dataset in (remote, local)]
    return {
        "fetching": fetch,
        "DALILoader": lambda: iterate(loaders[0]),
        "image folder": lambda: iterate(loaders[1]),
    }


def measure(cases: dict[str, Callable[[], None]], count: int, turns: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return for each case the objects/s and the CPU-ms an object of each turn."""
    figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
    for turn in range(turns + 1):  # the first warms up
        for name, run in cases.items():
            start, cpu = time.perf_counter(), time.process_time()
            run()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            if turn:
                figures[name][0].append(count / seconds)
                figures[name][1].append(cpu / count * 1e3)
    return figures


def run_set(kind: str, args: argparse.Namespace) -> list[list[str]]:
    """Measure one set of pictures, in this process, and return a row for each case."""
    cores = sorted(os.sched_getaffinity(0))
    root = data.default_root(args.images, kind)
    size = data.make(root, args.images, kind=kind)["mean_bytes"]
    rows: list[list[str]] = []
    with serve(root, args.latency, set(cores[1:] or cores)):
        os.sched_setaffinity(0, cores[:1])  # before other threads start
        for name, (speeds, cpu) in measure(make_cases(root, kind), args.images, args.turns).items():
            spread = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            spent = f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})"
            rows.append([f"{SETS[kind]}, {float(size) / 1000:.1f} kB", name, spread, spent])
    return rows


def main() -> None:
    """Run the study, each set in a process of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--set", choices=SETS, help="measure one set, and print its rows as JSON")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if args.set:
        print(json.dumps(run_set(args.set, args)))
        return
    before, rows = os.getloadavg()[0], [["objects", "case", "objects/s", "CPU-ms an object"]]
    for kind in SETS:
        command = [sys.executable, "-m", "benchmarks.studies.remote", *sys.argv[1:], "--set", kind]
        rows += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    from benchmarks.systems.batches import surroundings

    lines = [
        "# One core, and a store that answers after 30 ms",
        "",
        *report.format_machine(report.describe_machine([surroundings()])),
        f"- obstore {version('obstore')}, from a server in Python on the loopback",
        f"- load before the first turn: {before:.1f}; the loader has one core, the server the others",
        (
            f"- data: {args.images:,} objects of each kind; {args.latency * 1000:.0f} ms before each answer; median of "
            f"{args.turns} epochs, least and largest"
        ),
        f"- command: `{shlex.join(['python', '-m', 'benchmarks.studies.remote', *sys.argv[1:]])}`",
        "",
        report.markdown(rows),
        "",
        f"The goal is {GOAL:,} objects/s with one core, which is at most {1000 / GOAL:.0f} CPU-ms an object.",
    ]
    if before > QUIET:
        lines += ["", "Other work ran on the same cores. So objects/s are too low, and only CPU time tells something."]
    text = "\n".join(lines) + "\n"
    (args.out / "remote-cpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
